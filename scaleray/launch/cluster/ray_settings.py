"""Ray's settings in this process: its core reads the environment once, when it is imported."""

from __future__ import annotations

import sys

from scaleray.common.private_parts import SETTINGS


def read_again() -> None:
    """Let Ray's core, where it has been imported, read the environment again: its settings, and its token."""
    if "ray._raylet" in sys.modules and SETTINGS.is_used():
        from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined] # not in its stubs

        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()
