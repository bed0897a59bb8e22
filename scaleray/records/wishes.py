"""Requests to workers while they train, as the answer to their signs of life."""

from __future__ import annotations

from enum import StrEnum


class Wish(StrEnum):
    """Actions of a worker after its step. Empty, and so false, is none."""

    NOTHING = ""
    SAVE = "save"
    """Make a checkpoint, and continue."""
    LINKS = "links"
    """Measure the links between the workers, and continue."""
    LEAVE = "leave"
    """Save, and end in good order."""
