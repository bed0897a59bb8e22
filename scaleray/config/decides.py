"""Effect of each config key: on the result of a training, on how it runs, or on neither.

This single table determines the config's hash, what may change on resume, and what the points of a curve must share.
"""

from enum import Enum


class Decides(Enum):
    """Effect of a config key."""

    RESULT = "result"
    """The computed values."""
    COURSE = "course"
    """How the training runs: its speed, memory and number of workers. The result is the same within rounding."""
    NOTHING = "nothing"
    """Neither: what is recorded, stored or measured."""


BY_PREFIX = {
    "fsdp.parameter_dtype": Decides.RESULT, "fsdp.reduce_dtype": Decides.RESULT,  # loses bits, as does precision.dtype
    "fsdp.reduce_unused": Decides.RESULT,  # optimizers skip parameters without a gradient, but not with a zero
    "scale.": Decides.COURSE, "strategy.": Decides.COURSE, "fsdp.": Decides.COURSE, "tensor.": Decides.COURSE,
    "pipeline.": Decides.COURSE, "shares.": Decides.COURSE, "activations.": Decides.COURSE,
    "compilation.": Decides.COURSE, "memory.": Decides.COURSE, "evaluation.": Decides.COURSE,
    "batch.micro_size": Decides.COURSE, "parallel.": Decides.COURSE,
    "fine_tuning.merge": Decides.COURSE, "data.chunk_mib": Decides.COURSE, "data.prefetch_mib": Decides.COURSE,
    "data.readers": Decides.COURSE, "data.reserved_cpus": Decides.COURSE, "data.timeout_s": Decides.COURSE,
    "recovery.": Decides.NOTHING, "checkpoint.": Decides.NOTHING, "tracking.": Decides.NOTHING,
    "noise_scale.": Decides.NOTHING, "study.": Decides.NOTHING, "alerts.": Decides.NOTHING,
    "monitoring.": Decides.NOTHING,
}  # fmt: skip
"""Effect of a key, by prefix of the dotted key. Keys that are not listed affect the result. Two strategies that are not
both exact still differ in their results, which `Change.alters_training` checks.
"""


def decides(key: str) -> Decides:
    """Effect of the dotted key."""
    return next((what for prefix, what in BY_PREFIX.items() if key.startswith(prefix)), Decides.RESULT)


def is_beside_training(section: str) -> bool:
    """Whether no key of this config section affects the training."""
    return BY_PREFIX.get(f"{section}.") is Decides.NOTHING
