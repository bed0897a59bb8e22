"""The name of the user of this process, for records of decisions."""

from __future__ import annotations

import getpass

SOMEBODY = "somebody"


def user_name() -> str | None:
    """The user's name; None where there is none, as in a container that runs under a bare number."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return None


def user_or_somebody() -> str:
    """The user's name, or a word for one without."""
    return user_name() or SOMEBODY
