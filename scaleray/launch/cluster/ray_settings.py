"""Ray's settings in this process. Ray's core reads the environment once, at its import."""

import sys

from scaleray.common.private_parts import SETTINGS


def read_again() -> None:
    """Make an imported Ray core read the environment again, for its settings and its token."""
    if "ray._raylet" in sys.modules and SETTINGS.is_used():
        from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined] # not in its stubs

        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()
