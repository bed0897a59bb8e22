"""Requests to workers during training, sent in reply to their heartbeats."""

from __future__ import annotations

from enum import StrEnum


class ControlRequest(StrEnum):
    """Action requested of a worker after its step. The empty string, which is false, means none."""

    NOTHING = ""
    SAVE = "save"
    """Write a checkpoint, and continue."""
    LINKS = "links"
    """Measure the links between the workers, and continue."""
    LEAVE = "leave"
    """Save, and end properly."""
