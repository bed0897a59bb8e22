"""What is asked of workers while they train, as the answer to their signs of life."""

from __future__ import annotations

from enum import StrEnum


class Wish(StrEnum):
    """What a worker should do after its step. Empty, and so false, is nothing."""

    NOTHING = ""
    SAVE = "save"
    """Make a checkpoint, and go on."""
    LINKS = "links"
    """Measure the links between the workers, and go on."""
    LEAVE = "leave"
    """Save, and end in good order."""
