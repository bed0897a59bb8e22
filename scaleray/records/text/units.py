"""Formatting of numbers with units, for all pages, tables and lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from scaleray.common import metric_names as names

if TYPE_CHECKING:
    from scaleray.records.rows import Row
    from scaleray.records.study_record import Estimate


MIB, GIB = 2.0**20, 2.0**30


def shown(row: Row) -> str:
    """A row's value in a readable unit; empty if unknown."""
    if row.value is None:
        return ""
    if row.metric in (names.INPUT_WAIT_SHARE, names.POINT_MFU):
        return f"{row.value:.1%}"
    return SHOWN_AS.get(row.unit, figure)(row.value)


def with_interval(estimate: Estimate, show: Callable[[float], str]) -> str:
    """The value with its interval in brackets, such as `124 ms (122–127 ms)`; no interval if it is a single value."""
    if estimate.low == estimate.high:
        return show(estimate.value)
    low, high = show(estimate.low), show(estimate.high)
    _, space, unit = high.partition(" ")
    return f"{show(estimate.value)} ({low.removesuffix(space + unit) if unit else low}–{high})"


def seconds(value: float | None) -> str:
    """A duration in a readable unit."""
    if value is None:
        return ""
    if value >= 7200:
        return f"{value / 3600:.3g} h"
    if value >= 120:
        return f"{value / 60:.3g} min"
    for limit, factor, unit in ((1.0, 1, "s"), (1e-3, 1e3, "ms")):
        if value >= limit:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"


def memory(value: float | None) -> str:
    """Bytes as MiB or GiB."""
    if not value:
        return ""
    return f"{value / 2**30:.3g} GiB" if value >= 999.5 * 2**20 else f"{value / 2**20:.3g} MiB"


def disk_space(num_bytes: int) -> str:
    """Bytes of files in a readable unit, up to GiB."""
    for limit, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= limit:
            return f"{num_bytes / limit:.1f} {unit}"
    return f"{num_bytes} B"


def count(value: float | None) -> str:
    """A count, with k, M or G from ten thousand on."""
    if value is None:
        return ""
    for limit, unit, suffix in ((1e9, 1e9, " G"), (1e6, 1e6, " M"), (1e4, 1e3, " k")):
        if abs(value) >= limit:
            return f"{value / unit:.3g}{suffix}"
    return f"{value:.4g}"


def figure(value: float | None) -> str:
    """A number as text; empty if unknown."""
    return "" if value is None else f"{value:.4g}"


SHOWN_AS: dict[str, Callable[[float], str]] = {
    "s": seconds,
    "bytes": memory,
    "samples": count,
    "samples/s": count,
    "tokens/s": count,
    "steps": count,
}
"""Formatters by unit; values in other units are plain numbers."""
