"""A check that compares the means of two sets of repeated runs, with its power and the number of runs needed."""

import math
from collections.abc import Callable, Sequence
from typing import Literal

from scaleray.records.gate_answer import Check
from scaleray.release.gates.confidence import (
    POWER,
    Better,
    Margin,
    Runs,
    equal,
    not_worse,
    power,
    power_of_both,
    runs_needed,
)

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
    of_logs: bool = False,
) -> Check:
    """Check that the first of two sides is not worse than the second by the margin, or equal within it. of_logs: values
    are logarithms, so the absolute margin applies to a ratio; the text has geometric means and the relative difference.
    """
    candidate, baseline = runs
    mean: Callable[[float], float] = math.exp if of_logs else float
    apart: Callable[[float], float] = math.expm1 if of_logs else float
    allowed = f"{100 * apart(margin.size):.4g} %" if margin.is_relative or of_logs else f"{margin.size:.4g}"
    what = f"{what}: {ask_for}, within {allowed}"
    test, chance = (equal, power_of_both) if ask_for == "equal" else (not_worse, power)
    found = test(candidate, baseline, margin, better=better, alpha=alpha)
    numbers = {"candidate": mean(candidate.mean), "baseline": mean(baseline.mean)}
    shown = f"{numbers['candidate']:.6g} against {numbers['baseline']:.6g}"
    if found is None:
        words = f"{shown}; a single run does not show noise"
        return Check(what=what, answer="inconclusive", words=words, numbers=numbers, runs_needed=min_runs)

    def enough(number: int) -> bool:
        sides = candidate.repeated(number), baseline.repeated(number)
        return chance(*sides, margin, better=better, alpha=alpha) >= POWER

    needed, sure = runs_needed(enough), f"{100 * (1 - alpha):g} %"
    worse, low, high = apart(found.worse), apart(found.low), apart(found.high)
    words = f"{shown}: worse by {worse:.3g} ({low:.3g} to {high:.3g}, each end with {sure})"
    if found.answer == "inconclusive" and needed is None:
        words += f"; a margin of {allowed} is too narrow for this noise"
    elif found.answer == "fail":
        words += f"; this exceeds the margin of {allowed}"
    numbers |= {"worse": worse, "low": low, "high": high, "p_value": found.p_value}
    likely = chance(candidate, baseline, margin, better=better, alpha=alpha)
    return Check(what=what, answer=found.answer, words=words, numbers=numbers, power=likely, runs_needed=needed)
