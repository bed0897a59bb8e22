"""Gates `speed` and `data`: do recent runs still match those of a promoted model? The gate `convergence` evaluates how
they learn. Byte-identical data needs no further check.

Columns are compared by the shares of their rows, for any distribution. A check passes if the largest difference of
shares is below the margin by the noise of a share, and fails if it is above the margin by the noise of the largest
difference (Dvoretzky, Kiefer and Wolfowitz 1956; Massart 1990), so that checks of unchanged data fail with a total
probability of at most `alpha`. Shares of single values are bounded by Clopper and Pearson (1934)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import betaincinv, ndtri

from scaleray.records.gate_answer import Answer, Check, GateResult, gate_of
from scaleray.records.run_record import RunRecord
from scaleray.release.gates.compared import compared
from scaleray.release.gates.confidence import Margin, Runs
from scaleray.release.gates.environment import GPU, facts_of_run
from scaleray.release.gates.policy import DriftPolicy

SPEED, DATA = "speed", "data"
NONE_TODAY = "there is no recent run to compare"
TRAIN_AGAIN = "train and promote it again: records now have the distribution of each column"
LARGEST_OF_NINE_IN_TEN = 1.224
"""Largest difference in 9 of 10 pairs of samples of the same data, in units of a share's noise (Kolmogorov 1933)."""
SUCCESSIVE = 2
"""Number of rows that count as one for passing, since neighbouring rows may be similar."""
CHECKS_A_COLUMN = 3
"""Maximum number of checks of the values of one column."""
Facts = Mapping[str, Any]


def speed_gate(today: Sequence[RunRecord], promoted: Sequence[RunRecord], *, policy: DriftPolicy) -> GateResult:
    """Whether a sample takes no longer than before, on the same hardware."""
    if not today:
        return gate_of(SPEED, [Check(what="time per sample", answer="inconclusive", words=NONE_TODAY)])
    times = [[1 / run.samples_per_s for run in side if run.samples_per_s] for side in (today, promoted)]
    checks = [_same_hardware(today, promoted)]
    if missing := len(today) + len(promoted) - sum(map(len, times)):
        words = f"{missing} runs were too short to have a steady speed"
        return gate_of(SPEED, [*checks, Check(what="time per sample", answer="inconclusive", words=words)])
    # a busy machine makes some runs several times as slow, so that logarithms are compared, and often several in turn
    sides = [Runs.of([math.log(time) for time in side], are_successive=True) for side in times]
    margin = Margin(math.log1p(policy.margin_slower), is_relative=False)
    checks.append(compared("s per sample", sides, margin, better="lower", alpha=policy.alpha, min_runs=policy.min_runs,
                           of_logs=True))  # fmt: skip
    if min(map(len, times)) < policy.min_runs:
        words = f"{len(times[0])} and {len(times[1])} runs; the policy requires {policy.min_runs} of each side"
        checks.append(Check(what="repeated runs", answer="inconclusive", words=words, runs_needed=policy.min_runs))
    return gate_of(SPEED, checks)


def data_gate(today: Sequence[RunRecord], promoted: Sequence[RunRecord], *, policy: DriftPolicy) -> GateResult:
    """Whether splits, columns, their types and their values are those of the promoted model's data."""
    if not today:
        return gate_of(DATA, [Check(what="the same columns", answer="inconclusive", words=NONE_TODAY)])
    before = promoted[0].data
    checks: list[Check] = []
    num_checks = CHECKS_A_COLUMN * sum(len(one.get("columns") or ()) for run in today for one in run.data.values())
    alpha = policy.alpha / max(1, num_checks)
    for run in today:
        if set(run.data) != set(before):
            words = f"{run.name} has {', '.join(sorted(run.data))}; promoted with {', '.join(sorted(before))}"
            checks.append(Check(what="the same splits", answer="fail", words=words))
    if checks:
        return gate_of(DATA, checks)
    for split, facts in before.items():
        others = [(run.name, run.data[split]) for run in today if not _is_same(run.data[split], facts)]
        if not others:
            checks.append(Check(what=f"data of {split}", answer="pass", words="the same bytes"))
        for name, own in others:
            checks += _split(f"{split} of {name}", own, facts, policy, alpha)
    return gate_of(DATA, checks)


def _same_hardware(today: Sequence[RunRecord], promoted: Sequence[RunRecord]) -> Check:
    what = "the same hardware"
    found = [{_hardware(run) for run in side} for side in (today, promoted)]
    if found[0] == found[1] and len(found[0]) == 1:
        return Check(what=what, answer="pass", words=found[0].pop())
    shown = [" and ".join(sorted(side)) for side in found]
    words = f"{shown[0]} today, {shown[1]} then: speeds on different hardware cannot be compared"
    return Check(what=what, answer="inconclusive", words=words)


def _hardware(run: RunRecord) -> str:
    """Workers and processors of a run, as text."""
    facts = facts_of_run(run)
    names = facts.get(f"{GPU}names") or facts.get("environment.cpu.model")
    kinds = ", ".join(names) if isinstance(names, list) else str(names)
    return f"{run.workers} x {run.strategy} on {kinds}"


def _is_same(mine: Facts, theirs: Facts) -> bool:
    known = mine.get("sha256") is not None and "content" in str(mine.get("hashed"))
    return known and mine["sha256"] == theirs.get("sha256") and mine.get("rows") == theirs.get("rows")


def _split(where: str, mine: Facts, theirs: Facts, policy: DriftPolicy, alpha: float) -> list[Check]:
    """Checks of a split with different data: columns and types first, and values of existing columns only."""
    columns = mine.get("columns"), theirs.get("columns")
    what = f"columns and types of {where}"
    if columns[0] is None or columns[1] is None:
        words = "no columns were recorded " + ("today" if columns[0] is None else "then")
        return [Check(what=what, answer="inconclusive", words=words)]
    wrong = _other_types(columns[0], columns[1])
    if wrong:
        return [Check(what=what, answer="fail", words="; ".join(wrong[:6]), numbers={"differences": len(wrong)})]
    words = ", ".join(f"{name} {facts['dtype']}" for name, facts in columns[0].items())
    found = [Check(what=what, answer="pass", words=words)]
    for name, facts in columns[0].items():
        found += _values(f"{name} in {where}", facts, columns[1][name], policy, alpha)
    return found


def _other_types(mine: Mapping[str, Facts], theirs: Mapping[str, Facts]) -> list[str]:
    wrong = [f"{name} is new" for name in mine if name not in theirs]
    wrong += [f"{name} is missing" for name in theirs if name not in mine]
    for name in mine.keys() & theirs.keys():
        for key, shown in (("dtype", ""), ("shape", "of rows of ")):
            if mine[name].get(key) != theirs[name].get(key):
                wrong.append(
                    f"{name} is {shown}{_said(mine[name].get(key))}, was {shown}{_said(theirs[name].get(key))}"
                )
    return sorted(wrong)


def _said(value: Any) -> str:
    if value is None:
        return "unequal length"
    return " x ".join(map(str, value)) or "one value" if isinstance(value, list) else str(value)


def _values(where: str, mine: Facts, theirs: Facts, policy: DriftPolicy, alpha: float) -> list[Check]:
    """Checks of a column's values. alpha: probability that each fails if nothing has changed."""
    sides, rows = (mine, theirs), (mine["rows"], theirs["rows"])
    if any(isinstance(one.get("values"), list) or ("mean" in one and "quantiles" not in one) for one in sides):
        words = "an earlier version of scaleray recorded too little"
        return [Check(what=f"distribution of {where}", answer="inconclusive", words=words, remedy=TRAIN_AGAIN)]
    if not min(rows):
        return []
    checks: list[Check] = []
    known = theirs.get("values", {})
    if known and "values" not in mine and "quantiles" not in mine:
        words = f"there were {len(known)} values; now there are too many to count individually"
        checks.append(Check(what=f"values of {where}", answer="inconclusive", words=words))
    if known and "values" in mine:
        new = {value: count for value, count in mine["values"].items() if value not in known}
        once = sum(count == 1 for count in known.values())
        shown = f"new: {', '.join(list(new)[:8])}" if new else f"{len(mine['values'])} of {len(known)} known values"
        checks.append(_new(f"values of {where}", sum(new.values()), once, rows, shown, policy, alpha))
    bad = [round(share * number) for share, number in zip(_not_finite(sides), rows, strict=True)]
    if bad[0] and not bad[1]:
        checks.append(_new(f"finite values of {where}", bad[0], 0, rows, "all were finite", policy, alpha))
    if (distance := _distance(mine, theirs)) is not None:
        checks.append(_apart(f"distribution of {where}", distance, rows, policy, alpha))
    if "lengths" in mine and "lengths" in theirs:
        distance = _apart_at_most([(one["lengths"], 0.0) for one in sides])
        checks.append(_apart(f"lengths of {where}", distance, rows, policy, alpha))
    return checks


def _new(
    what: str, number: int, once: int, rows: Sequence[int], words: str, policy: DriftPolicy, alpha: float
) -> Check:
    """Whether few enough rows have a value that the promoted data lacked. once: number of values that occurred in
    exactly one promoted row, which predicts unseen values (Good and Turing)."""
    share = number / rows[0]
    least = float(betaincinv(number, rows[0] - number + 1, alpha)) if number else 0.0
    most = _highest_share(number / SUCCESSIVE, rows[0] / SUCCESSIVE, policy.alpha)
    unseen = _highest_share(once, rows[1], alpha)
    answer: Answer = "fail" if least > policy.max_new + unseen else "pass" if most <= policy.max_new else "inconclusive"
    words += f": {100 * share:.3g} % of the rows; {100 * policy.max_new:.3g} % are allowed"
    return Check(what=what, answer=answer, words=words, numbers={"share": share, "low": least, "high": most})


def _apart(what: str, distance: float, rows: Sequence[int], policy: DriftPolicy, alpha: float) -> Check:
    """Whether the largest difference of shares is within the margin."""
    number, margin = rows[0] * rows[1] / (rows[0] + rows[1]), policy.margin_shares
    beyond = distance - math.sqrt(math.log(2 / alpha) / 2 / number)
    noise = float(ndtri(1 - policy.alpha)) / 2 * math.sqrt(SUCCESSIVE)
    within = distance + noise / math.sqrt(number)
    answer: Answer = "fail" if beyond > margin else "pass" if within < margin else "inconclusive"
    words = f"shares of rows differ by {distance:.3g} at most; {margin:g} is allowed"
    needed = math.ceil(2 * ((LARGEST_OF_NINE_IN_TEN + noise) / margin) ** 2)
    if answer == "inconclusive":
        words += f"; {rows[0]} and {rows[1]} rows were read"
    return Check(what=what, answer=answer, words=words, numbers={"distance": distance, "least": max(0.0, beyond)},
                 runs_needed=needed, needed_of="rows of each side")  # fmt: skip


def _distance(mine: Facts, theirs: Facts) -> float | None:
    """Largest difference of the shares of rows below any value, where non-finite rows are below all. None for columns
    with many values that are not numbers."""
    if "quantiles" in mine or "quantiles" in theirs:
        quantiles = [one.get("quantiles", ()) for one in (mine, theirs)]
        return _apart_at_most(list(zip(quantiles, _not_finite((mine, theirs)), strict=True)))
    if "values" in mine and "values" in theirs:
        names = sorted({*mine["values"], *theirs["values"]})
        shares = [np.array([one["values"].get(name, 0) / one["rows"] for name in names]) for one in (mine, theirs)]
        return float(np.abs(np.cumsum(shares[0] - shares[1])).max())
    return None


def _not_finite(sides: Sequence[Facts]) -> list[float]:
    """Share of rows without a finite mean, for each side; 0 for columns that are not numbers. A side may have no finite
    rows."""
    if not any("quantiles" in one for one in sides):
        return [0.0 for _ in sides]
    return [1 - one.get("finite_rows", 0) / one["rows"] for one in sides]


def _apart_at_most(sides: Sequence[tuple[Sequence[float], float]]) -> float:
    """Largest difference between two distributions, each given by its quantiles and a share of rows below them all."""
    places = np.concatenate([quantiles for quantiles, _ in sides])
    below = [
        share + (1 - share) * np.searchsorted(quantiles, places, side="right") / max(1, len(quantiles))
        for quantiles, share in sides
    ]
    return float(max(np.abs(below[0] - below[1]).max(), abs(sides[0][1] - sides[1][1])))


def _highest_share(number: float, rows: float, alpha: float) -> float:
    return float(betaincinv(number + 1, rows - number, 1 - alpha)) if number < rows else 1.0
