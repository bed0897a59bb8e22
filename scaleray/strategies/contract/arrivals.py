"""Collectives of a step: the time at which this rank arrives at each, and their gradients."""

from collections.abc import Callable
from typing import Any, Protocol

from scaleray.records.profile_record import Places

MOST_PLACES = 16
"""Maximum number of points watched in a pass. Recording costs the host a few microseconds, so layers in between are
merged."""


class Moments:
    """Times at which this rank arrived at each point: first those of the forward pass, then those of the backward pass.

    now: always the same list, to which observers write directly in the thread of the pass, since a function call would
    add a third of the cost. stamp: returns the time."""

    def __init__(self, stamp: Callable[[], Any]) -> None:
        self.stamp = stamp
        self.now: list[Any] = []

    def noting(self, place: int) -> Callable[[], None]:
        """Function that records the arrival at a point."""
        now, stamp = self.now, self.stamp

        def note() -> None:
            now[place] = stamp()

        return note


class ArrivalSource(Protocol):
    """Watches the collectives of a strategy."""

    def settle(self, moments: Moments) -> Places | None:
        """Called after each step until it returns the points; from then on it writes the times. All ranks get the
        points after the same step."""

    def close(self) -> None:
        """Stop watching and remove the hooks."""


def drawn_together(count: int) -> list[range]:
    """Groups of successive points, in each of which only the last point is watched; single points if there are few."""
    width = max(1, -(-count // MOST_PLACES))
    return [range(first, min(count, first + width)) for first in range(0, count, width)]
