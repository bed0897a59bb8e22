"""Difference of the step times of two trainings, by limit."""

from __future__ import annotations

from scaleray.profiling.verdict.findings import Limit, Verdict
from scaleray.text.units import seconds

MOST_OF_IT = 0.5
"""Share of the difference from which on a limit is its reason."""


def seconds_by_limit(verdict: Verdict) -> dict[str, float]:
    """Seconds of a mean step that go to each limit, and to computing."""
    return {limit: share * verdict.step_s for limit, share in verdict.shares.items()}


def reason_of(base: Verdict, other: Verdict) -> str:
    """Where most of the difference between two trainings lies, in words; "" where it lies nowhere in particular, or one
    of them is not known."""
    if Limit.INCOMPLETE in (base.limit, other.limit) or other.step_s == base.step_s:
        return ""
    before, after = seconds_by_limit(base), seconds_by_limit(other)
    whole = other.step_s - base.step_s
    more = {limit: after.get(limit, 0.0) - before.get(limit, 0.0) for limit in {**before, **after}}
    limit = max(more, key=lambda name: more[name] / whole)
    if more[limit] / whole < MOST_OF_IT:
        return ""
    place = f" ({_place(other if whole > 0 else base)})" if limit == Limit.STRAGGLER else ""
    return f"most of it is {limit}{place}: {seconds(abs(more[limit]))} a step {'more' if whole > 0 else 'less'}"


def _place(verdict: Verdict) -> str:
    """Which ranks hold the others up, and where."""
    found = next((one for one in (verdict.primary, *verdict.others) if one.limit is Limit.STRAGGLER), None)
    if found is None:
        return "ranks wait for each other"
    many = "s" if len(found.ranks) > 1 else ""
    return f"rank{many} {', '.join(map(str, found.ranks[:8]))} in {found.phase}"
