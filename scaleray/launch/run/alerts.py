"""Why alerts stopped a run."""

from __future__ import annotations

import contextlib
from typing import Protocol


class Stoppable(Protocol):
    """A recorder, here or as an actor."""

    def stopped_by(self) -> str: ...


def why_stopped(recorder: Stoppable) -> str:
    """The alert that stopped a run, as text; empty if none did, and if it is not known any more."""
    with contextlib.suppress(Exception):
        return recorder.stopped_by()
    return ""
