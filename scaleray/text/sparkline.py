"""A curve in one line of characters."""

from __future__ import annotations

import math
from collections.abc import Sequence

BLOCKS, ASCII = "▁▂▃▄▅▆▇█", "_.-=+*#@"
LOG_FROM = 20.0
"""Ratio of the largest to the smallest value from which on heights are logarithmic."""


def sparkline(values: Sequence[float | None], width: int, *, ascii_only: bool = False) -> str:
    """The curve in at most `width` characters, each the mean of the values in its part; `x` if none of them is a
    number.
    """
    if not values or width < 1:
        return ""
    columns = _columns(values, min(width, len(values)))
    known = [value for value in columns if value is not None]
    if not known:
        return "x" * len(columns)
    if min(known) > 0 and max(known) / min(known) >= LOG_FROM:
        columns = [None if value is None else math.log(value) for value in columns]
        known = [value for value in columns if value is not None]
    marks, low, high = ASCII if ascii_only else BLOCKS, min(known), max(known)
    scale = (len(marks) - 1) / (high - low) if high > low else 0.0
    return "".join("x" if value is None else marks[round((value - low) * scale)] for value in columns)


def _columns(values: Sequence[float | None], count: int) -> list[float | None]:
    """The mean of the numbers in each of `count` equal parts; None for a part that has none."""
    found: list[float | None] = []
    for number in range(count):
        begin, end = number * len(values) // count, (number + 1) * len(values) // count
        part = [value for value in values[begin:end] if value is not None and math.isfinite(value)]
        found.append(sum(part) / len(part) if part else None)
    return found
