"""How the global batch is shared among workers that are not equally fast."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from scaleray.config.base import Count, Positive, Settings

UNEVEN_STRATEGIES = ("ddp", "zero1")
"""Strategies under which workers may run different numbers of micro-batches: they communicate once a step, by sums."""


class SharesSettings(Settings):
    """Equal shares, or shares in proportion to speed."""

    by: Literal["equal", "speed", "given"] = "equal"
    """speed: samples of a step in proportion to what each worker is measured to compute in a second. given: in proportion
    to `speeds`. The samples of a step stay the same, and so does their sum."""
    speeds: tuple[Positive, ...] | None = None
    """by given: relative speed of each worker, in order of rank, such as [2, 1]. Which node has which rank is Ray's choice."""
    measure_every: Count = 50
    """by speed: steps between two measurements, after each of which the shares may change."""
    smallest: Annotated[float, Field(gt=0, le=1)] = 0.25
    """A worker's share is at least this part of an equal one."""

    @model_validator(mode="after")
    def _speeds_are_given_where_they_are_used(self) -> SharesSettings:
        if (self.by == "given") != (self.speeds is not None):
            raise ValueError("shares.by given and shares.speeds belong together: give both or neither")
        return self
