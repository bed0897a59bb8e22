"""Settings for the end of training and for evaluation."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from scaleray.config.base import WATCHED, Count, Duration, Settings, Target, above_zero


class StopSettings(Settings):
    """When training ends."""

    after: Duration
    """Full length of training, such as `30 epochs` or `2000 steps`."""
    at: Target | None = None
    """Target: training stops early when an evaluation reaches it, such as `val/accuracy >= 0.97`. Needs
    `evaluation.every`."""

    patience: Count | None = None
    """Number of consecutive evaluations without improvement after which training stops. Needs `evaluation.every`. None:
    it continues.
    """
    watch: Annotated[str, Field(pattern=WATCHED)] | None = None
    """Metric for `patience`, and its direction, such as `val/loss min`. None: that of `checkpoint.best`."""

    _check_after = field_validator("after")(above_zero)


class EvaluationSettings(Settings):
    """When the splits other than `train` are evaluated; they are always evaluated at the end."""

    test: Literal["with_others", "at_end"] = "with_others"
    """When the split `test` is evaluated: with the others, or only at the end, so that no decision depends on it."""
    every: Duration | None = None
    """Interval between evaluations. None: only at the end."""
    micro_size: Annotated[int, Field(ge=1, le=2**40)] | None = None
    """Samples in one forward pass of one worker during evaluation. None: as in training."""

    _check_every = field_validator("every")(above_zero)

    @property
    def only_at_end(self) -> str | None:
        """Name of the split that is evaluated only at the end."""
        return "test" if self.test == "at_end" else None
