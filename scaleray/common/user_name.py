"""Name of this process's user, for records of decisions."""

from __future__ import annotations

import getpass

SOMEBODY = "somebody"


def user_name() -> str | None:
    """The user's name; None if there is none, as in a container that runs under a bare number."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return None


def user_or_somebody() -> str:
    """The user's name, or a placeholder for a user without one."""
    return user_name() or SOMEBODY
