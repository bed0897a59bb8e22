"""Shares of the global batch for workers that are not equally fast."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from scaleray.config.base import Count, Positive, Settings


class SharesSettings(Settings):
    """Equal shares, or shares in proportion to speed."""

    by: Literal["equal", "speed", "given"] = "equal"
    """How samples are shared. equal: in equal parts. speed: in proportion to what each worker is measured to compute in
    a second. given: in proportion to `speeds`. The samples of a step stay the same, and so does their sum."""
    speeds: tuple[Positive, ...] | None = None
    """With `by: given`: relative speed of each worker, in order of rank, such as [2, 1]. Which node has which rank is
    Ray's choice."""
    measure_every: Count = 50
    """With `by: speed`: steps between two measurements, after each of which the shares may change."""
    smallest: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Smallest share of a worker, relative to an equal share."""

    @model_validator(mode="after")
    def _speeds_are_given_where_they_are_used(self) -> SharesSettings:
        if (self.by == "given") != (self.speeds is not None):
            raise ValueError("shares.by given and shares.speeds belong together: give both or neither")
        return self
