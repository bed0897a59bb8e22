"""Whether today's runs are still like those of a promoted model: their speed and their data, answered like gates.

How they learn is judged by `convergence`. Data that is the same to the byte is not looked at any further.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from scaleray.gates.answer import Answer, Check, GateResult, gate_of
from scaleray.gates.compared import compared
from scaleray.gates.environment import GPU, facts_of_run
from scaleray.gates.noisy_means import Margin, Runs
from scaleray.gates.policy import DriftPolicy
from scaleray.records.run import RunRecord

SPEED, DATA = "speed", "data"
NONE_TODAY = "there is no run of today to compare"
Facts = Mapping[str, Any]


def speed_gate(today: Sequence[RunRecord], promoted: Sequence[RunRecord], *, policy: DriftPolicy) -> GateResult:
    """Whether a sample takes no longer than it did, on the same hardware."""
    if not today:
        return gate_of(SPEED, [Check(what="time per sample", answer="inconclusive", words=NONE_TODAY)])
    times = [[1 / run.samples_per_s for run in side if run.samples_per_s] for side in (today, promoted)]
    checks = [_same_hardware(today, promoted)]
    if missing := len(today) + len(promoted) - sum(map(len, times)):
        words = f"{missing} runs were too short to have a steady speed"
        return gate_of(SPEED, [*checks, Check(what="time per sample", answer="inconclusive", words=words)])
    # a busy machine makes some runs several times as slow: of times themselves, whose noise is so skewed, 6.4 % passed
    # at the margin
    sides = [Runs.of([math.log(time) for time in side]) for side in times]
    margin = Margin(math.log1p(policy.margin_slower), is_relative=False)
    checks.append(compared("s per sample", sides, margin, better="lower", alpha=policy.alpha, min_runs=policy.min_runs,
                           of_logs=True))  # fmt: skip
    if min(map(len, times)) < policy.min_runs:
        words = f"{len(times[0])} and {len(times[1])} runs; the policy asks for {policy.min_runs} of each"
        checks.append(Check(what="repeated runs", answer="inconclusive", words=words, runs_needed=policy.min_runs))
    return gate_of(SPEED, checks)


def data_gate(today: Sequence[RunRecord], promoted: Sequence[RunRecord], *, policy: DriftPolicy) -> GateResult:
    """Whether splits, columns, their types and their values are those of the promoted model's data."""
    if not today:
        return gate_of(DATA, [Check(what="the same columns", answer="inconclusive", words=NONE_TODAY)])
    before = promoted[0].data
    checks = []
    for run in today:
        if set(run.data) != set(before):
            words = f"{run.name} has {', '.join(sorted(run.data))}; promoted with {', '.join(sorted(before))}"
            checks.append(Check(what="the same splits", answer="fail", words=words))
    if checks:
        return gate_of(DATA, checks)
    for split, facts in before.items():
        others = [(run.name, run.data[split]) for run in today if not _is_same(run.data[split], facts)]
        if not others:
            checks.append(Check(what=f"data of {split}", answer="pass", words="the same to the byte"))
        for name, own in others:
            checks += _split(f"{split} of {name}", own, facts, policy)
    return gate_of(DATA, checks)


def _same_hardware(today: Sequence[RunRecord], promoted: Sequence[RunRecord]) -> Check:
    what = "the same hardware"
    found = [{_hardware(run) for run in side} for side in (today, promoted)]
    if found[0] == found[1] and len(found[0]) == 1:
        return Check(what=what, answer="pass", words=found[0].pop())
    shown = [" and ".join(sorted(side)) for side in found]
    words = f"{shown[0]} today, {shown[1]} then: speeds of other hardware say nothing of the training"
    return Check(what=what, answer="inconclusive", words=words)


def _hardware(run: RunRecord) -> str:
    """Workers and processors of a run, in words."""
    facts = facts_of_run(run)
    names = facts.get(f"{GPU}names") or facts.get("environment.cpu.model")
    kinds = ", ".join(names) if isinstance(names, list) else str(names)
    return f"{run.workers} x {run.strategy} on {kinds}"


def _is_same(mine: Facts, theirs: Facts) -> bool:
    known = mine.get("sha256") is not None and "content" in str(mine.get("hashed"))
    return known and mine["sha256"] == theirs.get("sha256") and mine.get("rows") == theirs.get("rows")


def _split(where: str, mine: Facts, theirs: Facts, policy: DriftPolicy) -> list[Check]:
    """Checks of a split whose data are others: columns and types first, and values only of those that are there."""
    columns = mine.get("columns"), theirs.get("columns")
    what = f"columns and types of {where}"
    if columns[0] is None or columns[1] is None:
        words = "nothing was recorded of its columns " + ("today" if columns[0] is None else "then")
        return [Check(what=what, answer="inconclusive", words=words)]
    wrong = _other_types(columns[0], columns[1])
    if wrong:
        return [Check(what=what, answer="fail", words="; ".join(wrong[:6]), numbers={"differences": len(wrong)})]
    words = ", ".join(f"{name} {facts['dtype']}" for name, facts in columns[0].items())
    found = [Check(what=what, answer="pass", words=words)]
    for name, facts in columns[0].items():
        found += _values(f"{name} in {where}", facts, columns[1][name], policy)
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


def _values(where: str, mine: Facts, theirs: Facts, policy: DriftPolicy) -> list[Check]:
    checks = []
    if "values" in theirs:
        known = set(theirs["values"])
        new = [str(value) for value in mine.get("values", ["more than were told"]) if value not in known]
        answer: Answer = "fail" if new else "pass"
        words = f"new: {', '.join(new[:8])}" if new else f"{len(mine['values'])} of {len(known)} known ones"
        checks.append(Check(what=f"values of {where}", answer=answer, words=words, numbers={"new": float(len(new))}))
    if mine.get("not_finite", 0.0) > theirs.get("not_finite", 0.0) == 0.0:
        words = f"{100 * mine['not_finite']:.3g} % are not finite; none was"
        checks.append(Check(what=f"finite values of {where}", answer="fail", words=words))
    if "mean" in theirs:
        checks += _distribution(where, mine, theirs, policy)
    return checks


def _distribution(where: str, mine: Facts, theirs: Facts, policy: DriftPolicy) -> list[Check]:
    """Whether mean and deviation of a column's rows are as they were."""
    what = f"mean of {where}"
    if min(mine["rows"], theirs["rows"]) < policy.min_rows or "mean" not in mine or "stdev" not in theirs:
        words = f"{mine['rows']} and {theirs['rows']} rows were looked at; it takes {policy.min_rows}"
        return [Check(what=what, answer="inconclusive", words=words)]
    sides = [Runs(one["mean"], one.get("stdev", 0.0), one["rows"]) for one in (mine, theirs)]
    if sides[0].stdev == sides[1].stdev == 0.0:
        answer: Answer = "pass" if sides[0].mean == sides[1].mean else "fail"
        words = f"always {sides[0].mean:.6g} today, always {sides[1].mean:.6g} then"
        return [Check(what=what, answer=answer, words=words)]
    margin = Margin(policy.margin_shift * max(sides[1].stdev, sides[0].stdev / policy.max_stretch), is_relative=False)
    means = compared(what, sides, margin, better="lower", alpha=policy.alpha, min_runs=policy.min_rows,
                     ask_for="equal")  # fmt: skip
    ratio = sides[0].stdev / sides[1].stdev if sides[1].stdev else math.inf
    kept: Answer = "pass" if 1 / policy.max_stretch <= ratio <= policy.max_stretch else "fail"
    words = f"{sides[0].stdev:.4g} against {sides[1].stdev:.4g}"
    spread = Check(what=f"deviation of {where}, within a factor {policy.max_stretch:g}", answer=kept, words=words)
    return [means, spread]
