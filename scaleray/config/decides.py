"""Which keys of the config decide what a training computes, which only how it runs, and which neither.

The one table behind the config's hash, what may change when a run is resumed, and what points of one curve must share.
"""

from __future__ import annotations

from enum import Enum


class Decides(Enum):
    """Effect of a key of the config."""

    RESULT = "result"
    """The values that are computed."""
    COURSE = "course"
    """How the training runs: its speed, its memory, its number of workers. The result is the same within rounding."""
    NOTHING = "nothing"
    """Neither: it decides what is recorded, stored or measured, apart from the training."""


BY_PREFIX = {
    "fsdp.parameter_dtype": Decides.RESULT, "fsdp.reduce_dtype": Decides.RESULT,  # bits are lost, as by precision.dtype
    "fsdp.reduce_unused": Decides.RESULT,  # an optimizer moves a parameter whose gradient is zero, and not one without
    "scale.": Decides.COURSE, "strategy.": Decides.COURSE, "fsdp.": Decides.COURSE, "tensor.": Decides.COURSE,
    "pipeline.": Decides.COURSE, "shares.": Decides.COURSE, "activations.": Decides.COURSE,
    "compilation.": Decides.COURSE, "memory.": Decides.COURSE, "evaluation.": Decides.COURSE,
    "batch.micro_size": Decides.COURSE, "parallel.": Decides.COURSE,
    "fine_tuning.merge": Decides.COURSE, "data.chunk_mib": Decides.COURSE, "data.prefetch_mib": Decides.COURSE,
    "data.readers": Decides.COURSE, "data.reserved_cpus": Decides.COURSE, "data.timeout_s": Decides.COURSE,
    "checkpoint.": Decides.NOTHING, "tracking.": Decides.NOTHING, "noise_scale.": Decides.NOTHING,
    "study.": Decides.NOTHING, "alerts.": Decides.NOTHING, "monitoring.": Decides.NOTHING,
}  # fmt: skip
"""Effect of a key, by the beginning of the dotted key. A key that is not here decides the result. Two strategies that
are not both exact differ in their result all the same: `Change.alters_training` checks that.
"""


def decides(key: str) -> Decides:
    """Effect of the dotted key."""
    return next((what for prefix, what in BY_PREFIX.items() if key.startswith(prefix)), Decides.RESULT)


def is_beside_training(section: str) -> bool:
    """Whether nothing in this section of the config decides anything about a training."""
    return BY_PREFIX.get(f"{section}.") is Decides.NOTHING
