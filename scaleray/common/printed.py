"""Short printed form of a record, as in a notebook: its main values and its location."""

from collections.abc import Sequence
from typing import Any

MOST_WORDS = 6
"""Maximum number of sentences of a record that are printed; the rest is in its report."""


def printable(text: object) -> str:
    """The text with spaces in place of line breaks and terminal control characters."""
    return "".join(letter if letter.isprintable() else " " for letter in str(text))


def inert(text: str) -> str:
    """The text with spaces in place of terminal control characters other than line breaks."""
    return "\n".join(printable(line) for line in text.split("\n"))


class Printed:
    """Base of dataclasses that print as a few lines: the first is a heading, the others are indented."""

    def lines(self) -> list[str]:
        """The lines, without indentation."""
        raise NotImplementedError

    @property
    def summary(self) -> str:
        """Result in one line, which `--json` prints with the record."""
        return self.lines()[0]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__repr__ = Printed.__repr__  # type: ignore[method-assign] # a dataclass keeps it, and would write all fields

    def __repr__(self) -> str:
        return "\n  ".join(self.lines())


def figures(values: dict[str, float | None]) -> str:
    """Names and values in one line, without unknown values."""
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items() if value is not None)


def shortened(sentences: Sequence[str], most: int = MOST_WORDS) -> list[str]:
    """The first sentences, and the number of further ones."""
    more = len(sentences) - most
    return [*sentences[:most], *([f"... and {more} more: see its report"] if more > 0 else [])]


def quantity(number: int, noun: str) -> str:
    """A number with its noun, such as `1 worker` or `2 workers`."""
    return f"{number} {noun}{'s' if number != 1 else ''}"
