"""Why alerts stopped a run."""

from __future__ import annotations

import contextlib
from typing import Protocol


class Stoppable(Protocol):
    """A recorder, here or as an actor."""

    def stopped_by(self) -> str: ...


def why_stopped(recorder: Stoppable) -> str:
    """The alert that stopped a run, in words; empty where none did, and where nobody can say any more."""
    with contextlib.suppress(Exception):
        return recorder.stopped_by()
    return ""
