"""Which workload runs, and with which arguments."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from scaleray.config.base import Settings


class WorkloadSettings(Settings):
    """The user's class and its keyword arguments."""

    name: str = Field(min_length=1)
    """`package.module:Name` or `path/to/file.py:Name`; a relative path is looked up from the current folder, then beside the config."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""
