"""What a strategy knows of the collectives of a step: when this rank comes to each, and whose gradients it carries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from scaleray.records.profile import Places

Note = Callable[[int], None]
"""Function that notes an arrival: at a place of the forward pass, or after all of those, of the backward pass."""
MOST_PLACES = 16
"""Places that are watched in a pass. A note costs the host some microseconds; layers in between are drawn together."""


class ArrivalSource(Protocol):
    """Watches the collectives of a strategy."""

    def settle(self, note: Note) -> Places | None:
        """Called after each step until it gives the places; from then on it calls `note` with the number of the one
        that this rank comes to, from the thread that runs the pass. All ranks get the places after the same step."""

    def close(self) -> None:
        """Watch no more, and remove what was hooked."""


def drawn_together(count: int) -> list[range]:
    """Runs of `count` places, of which the last one each is watched: all of them, where there are few."""
    width = max(1, -(-count // MOST_PLACES))
    return [range(first, min(count, first + width)) for first in range(0, count, width)]
