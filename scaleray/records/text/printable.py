"""Text from elsewhere, such as a run's name, in which a terminal or a parser would obey control characters."""

from __future__ import annotations


def printable(text: object) -> str:
    """The text with spaces in place of line breaks and of what terminals obey."""
    return "".join(letter if letter.isprintable() else " " for letter in str(text))
