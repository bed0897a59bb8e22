"""Bounds of `verify`: the largest differences that rounding explains, by quantity and precision."""

BOUND = 1e-9
"""Largest relative difference accepted in float64. Merely reordering sums changes values by about 1e-12, so anything
above the bound is a bug."""
SMALL_GRADIENT = 1e-3
"""Minimum divisor of a difference in a parameter's gradient, as a share of the whole gradient's norm; normally the
divisor is the norm of the parameter's own gradient."""
IDLE_GRADIENT = 1e-10
"""Share of the whole gradient's norm below which a parameter's gradient is pure rounding, as for a bias before a
normalisation."""
BOUNDS = {"fp64": 1e-9, "fp32": 1e-4, "fp16": 5e-2, "bf16": 5e-2}
"""Largest relative difference over some steps that reordered sums explain, by precision. In less than float64 the check
is coarse and may miss a small mistake."""
PRECISION_TIMES = 8.0
"""Tolerance factor, since rounding errors vary; a median over a few steps varies by less than this factor."""
ROUNDING_TIMES = 2.0
"""Tolerance factor, since one change of all parameters' last digits is only a (large) sample of rounding effects."""
LARGEST_ROUNDING = 1e-6
"""Largest difference that is ever attributed to rounding in float64; a larger one might hide a mistake."""
LARGEST_ROUNDING_IN_FLOAT32 = 1e-5
"""The same bound for a model that computes a part in float32: a hundred times the last digit of float32."""
LEAST_OF_A_CUT = 1e-6
"""Relative difference of a gradient that rounding cannot explain, if exceeded."""
SAME_RATIO = 1e-6
"""Relative difference below which two ratios count as equal, in float64."""
ROUNDED = 2.0**-7
"""Relative difference of a gradient that a few roundings to bf16 can explain."""
