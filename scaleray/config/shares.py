"""How the global batch is shared among workers that are not equally fast."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from scaleray.config.base import Count, Settings


class SharesSettings(Settings):
    """Equal shares, or shares in proportion to measured speed."""

    by: Literal["equal", "speed"] = "equal"
    """speed: samples of a step in proportion to what each worker computes in a second. The sum is exact either way."""
    measure_every: Count = 50
    """Steps between two measurements."""
    smallest: Annotated[float, Field(gt=0, le=1)] = 0.25
    """A worker's share is at least this part of an equal one."""
