"""Errors of one rank that all ranks raise, so that none waits in a collective for the one that has left."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from scaleray.errors import DataError, WorkloadError
from scaleray.training.setup.place import Place

Result = TypeVar("Result")


def told_together(place: Place, look: Callable[[], Result]) -> Result:
    """Result of `look` on this rank. If it raises DataError or WorkloadError on any rank, all raise: their own error,
    or that of the first rank that has one. Collective, around code that is not.
    """
    result: list[Result] = []
    error: Exception | None = None
    try:
        result.append(look())
    except (DataError, WorkloadError) as exc:
        error = exc
    everyone: list[Exception | None] = place.gathered(error)
    told = error or next((one for one in everyone if one is not None), None)
    if told is not None:
        raise told
    return result[0]
