"""The check that compares the means of two sides of repeated runs, with its power and the runs that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from scaleray.gates.answer import Check
from scaleray.gates.noisy_means import POWER, Better, Margin, Runs, equal, not_worse, power, power_of_both, runs_needed

AskFor = Literal["not worse", "equal"]


def compared(
    what: str,
    runs: Sequence[Runs],
    margin: Margin,
    *,
    better: Better,
    alpha: float,
    min_runs: int,
    ask_for: AskFor = "not worse",
) -> Check:
    """Whether the first of two sides is not worse than the second by the margin, or equal within it."""
    candidate, baseline = runs
    allowed = f"{100 * margin.size:g} %" if margin.is_relative else f"{margin.size:.4g}"
    what = f"{what}: {ask_for}, within {allowed}"
    test, chance = (equal, power_of_both) if ask_for == "equal" else (not_worse, power)
    found = test(candidate, baseline, margin, better=better, alpha=alpha)
    shown = f"{candidate.mean:.6g} against {baseline.mean:.6g}"
    numbers = {"candidate": candidate.mean, "baseline": baseline.mean}
    if found is None:
        words = f"{shown}; one run says nothing of its noise"
        return Check(what=what, answer="inconclusive", words=words, numbers=numbers, runs_needed=min_runs)

    def enough(number: int) -> bool:
        sides = candidate.repeated(number), baseline.repeated(number)
        return chance(*sides, margin, better=better, alpha=alpha) >= POWER

    needed, sure = runs_needed(enough), f"{100 * (1 - alpha):g} %"
    words = f"{shown}: worse by {found.worse:.3g} ({found.low:.3g} to {found.high:.3g}, each end with {sure})"
    if found.answer == "inconclusive" and needed is None:
        words += f"; a margin of {allowed} is too narrow for this noise"
    elif found.answer == "fail":
        words += f"; that is beyond the margin of {allowed}"
    numbers |= {"worse": found.worse, "low": found.low, "high": found.high, "p_value": found.p_value}
    likely = chance(candidate, baseline, margin, better=better, alpha=alpha)
    return Check(what=what, answer=found.answer, words=words, numbers=numbers, power=likely, runs_needed=needed)
