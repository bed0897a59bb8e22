"""Lists of numbers on the command line."""

from __future__ import annotations

from scaleray.errors import ConfigError


def whole_numbers(option: str, text: str) -> list[int]:
    """Whole numbers of an option such as `1,2,4`. Raises ConfigError naming the option."""
    try:
        return [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        raise ConfigError(option, text, "it must be whole numbers with commas, such as 1,2,4") from None
