"""Bounds of verify: the largest differences that rounding explains, by compared quantity and precision."""

BOUND = 1e-9
"""Largest relative difference accepted in float64: an honest reordering of sums differs by about 1e-12;
anything above the bound is a bug."""
SMALL_GRADIENT = 1e-3
"""Least scale of a difference in a parameter's gradient, as a share of the whole gradient's norm;
above it the scale is the norm of the parameter's own gradient."""
IDLE_GRADIENT = 1e-10
"""Share of the whole gradient's norm below which a parameter's gradient is only rounding, such as a bias before a
normalisation."""
BOUNDS = {"fp64": 1e-9, "fp32": 1e-4, "fp16": 5e-2, "bf16": 5e-2}
"""Largest relative difference over some steps that reordered sums explain, by precision. Below float64 the check is
coarse: a small mistake may stay hidden."""
PRECISION_TIMES = 8.0
"""Factor of tolerance: rounding errors vary, and a median over a few steps varies by less than this factor."""
ROUNDING_TIMES = 2.0
"""Factor of tolerance: one change of all parameters' last digits is a (large) sample of the effect of rounding."""
LARGEST_ROUNDING = 1e-6
"""Largest difference that is ever attributed to rounding in float64: beyond it a mistake might hide."""
LARGEST_ROUNDING_IN_FLOAT32 = 1e-5
"""The same for a model that computes a part in float32: a hundred times the last digit of float32."""
LEAST_OF_A_CUT = 1e-6
"""Relative difference of a gradient above which rounding does not explain it."""
SAME_RATIO = 1e-6
"""Relative difference below which two ratios are the same, in float64."""
ROUNDED = 2.0**-7
"""Relative difference of a gradient that a few roundings to bf16 explain."""
