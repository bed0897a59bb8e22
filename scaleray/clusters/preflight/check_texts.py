"""Short texts for lists of nodes and values."""

from collections.abc import Iterable, Mapping, Sequence

from scaleray.records.doctor_record import PreflightCheck

FAILED = "it failed: "
"""Prefix of the reason if a measurement was attempted and failed."""


def unmeasured(name: str, why: str, *, allowed: str = "") -> PreflightCheck:
    """Return the check of a missing measurement: doubtful if it failed, since a slow component may be the cause."""
    if not why.startswith(FAILED):
        return PreflightCheck(name=name, verdict="not applicable", found=why, allowed=allowed)
    remedy = "repeat it while no other programs run; if it fails again, check the named node and its link"
    return PreflightCheck(name=name, verdict="yellow", found=why, allowed=allowed, remedy=remedy)


MOST_NAMED = 4


def node_list(names: Sequence[str]) -> str:
    """The names, or the first few of many."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def by_value(values: Mapping[str, str]) -> str:
    """Values with their nodes, most frequent first, such as `2.13.0 on 7 nodes, 2.12.1 on 10.0.0.9`."""
    groups: dict[str, list[str]] = {}
    for node, value in values.items():
        groups.setdefault(value, []).append(node)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    parts = [
        f"{value or 'missing'} on {f'{len(nodes)} nodes' if not rank and len(nodes) > 1 else node_list(nodes)}"
        for rank, (value, nodes) in enumerate(ordered)
    ]
    return ", ".join(parts)


def minority(values: Mapping[str, str]) -> list[str]:
    """Nodes whose value is not the most frequent one."""
    found = list(values.values())
    usual = max(dict.fromkeys(found), key=found.count) if found else ""
    return [node for node, value in values.items() if value != usual]


def together(parts: Iterable[str]) -> str:
    """Join the non-empty parts into one text."""
    return "; ".join(part for part in parts if part)
