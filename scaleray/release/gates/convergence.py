"""Gate `convergence`: does a candidate learn as well as the baseline, from as many samples, and not suspiciously fast?

Runs of one side repeat each other with different seeds; a run that did not finish has missed the target. The effort of
a run is the number of samples up to the first evaluation that reached the target, which is known only to the distance
between evaluations. Logarithms of efforts are compared, since efforts are skewed to the right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from scaleray.config.base import Target
from scaleray.records.gate_answer import Check, GateResult, gate_of
from scaleray.release.gates.compared import compared
from scaleray.release.gates.confidence import ALPHA, Better, Margin, Runs
from scaleray.release.gates.policy import ConvergencePolicy

LEAST_REFERENCE = 4
"""Smallest number of runs of a reference point, of which two remain without the best and the worst."""


@dataclass(frozen=True)
class ReferencePoint:
    """Effort to the target at one batch size: epochs or samples, the same for all points of one reference."""

    batch_size: int
    mean: float
    stdev: float
    """Standard deviation of all runs, with division by n."""
    number: int
    """Number of runs in the mean."""

    @classmethod
    def of(cls, batch_size: int, efforts: Sequence[float], *, left_out: int = 1) -> ReferencePoint:
        """Point of these runs. left_out: number of best and of worst runs excluded from the mean."""
        return cls(batch_size, olympic(efforts, left_out=left_out), float(np.std(efforts)), len(efforts) - 2 * left_out)

    def slowest_allowed(self, submitted: int, *, alpha: float = ALPHA) -> float:
        """Smallest allowed mean of `submitted` runs, without excluded ones: less is faster than chance explains.

        It is the smallest that a one-sided pooled t-test does not reject, with the reference's standard deviation for
        both sides; MLPerf finds it by bisection. Source: MLPerf Training rules, section Reference Convergence Points;
        mlperf-logging 4.1.68, rcp_checker."""
        freedom = self.number + submitted - 2
        reach = float(stdtrit(freedom, 1 - alpha)) * self.stdev * math.sqrt(1 / self.number + 1 / submitted)
        return max(0.0, self.mean - reach)


def olympic(efforts: Sequence[float], *, left_out: int = 1) -> float:
    """Mean without the `left_out` best and worst."""
    return float(np.mean(sorted(efforts)[left_out : len(efforts) - left_out]))


GATE = "convergence"
TRAIN_MORE = "train more runs with other seeds: scaleray train -c FILE --seed N"
COARSEST = 0.5
"""Largest distance between two evaluations, as a share of the margin; a larger one hides differences of that size."""


@dataclass(frozen=True)
class Learning:
    """Learning of one run. samples_to_target: None if it ended without the target. value: result of its last
    evaluation, None if there was none. every_samples: samples between two evaluations, 0 if unknown. has_finished:
    whether it finished, with or without the target."""

    samples_to_target: float | None
    value: float | None
    every_samples: float = 0.0
    has_finished: bool = True
    is_known: bool = True
    """Whether the evaluations of the target's metric were found."""


def convergence_gate(
    candidates: Sequence[Learning], baselines: Sequence[Learning], *, target: Target | None, policy: ConvergencePolicy
) -> GateResult:
    """The gate's checks: enough runs, target reached, effort, last value, and not faster than chance allows."""
    few = _enough(candidates, baselines, policy.min_runs)
    if not baselines or not candidates:
        return gate_of(GATE, [few])
    checks = [few]
    if target is None:
        words = "there is no target to compare samples for"
        key = "convergence.target in the policy, or stop.at in the config"
        checks.append(Check(what="samples to the target", answer="inconclusive", words=words, remedy=key))
    else:
        reached = _reached(candidates, baselines, policy.may_miss)
        checks.append(reached)
        if reached.answer == "pass":
            checks += _efforts(candidates, baselines, policy)
    better: Better = policy.better or ("lower" if target is not None and target.comparison == "<=" else "higher")
    checks.append(_last_values(candidates, baselines, policy, better))
    return gate_of(GATE, checks)


def _enough(candidates: Sequence[Learning], baselines: Sequence[Learning], least: int) -> Check:
    numbers = {"candidates": float(len(candidates)), "baselines": float(len(baselines))}
    shown = f"{len(candidates)} of the candidate, {len(baselines)} of the baseline"
    what = "repeated runs"
    if min(len(candidates), len(baselines)) >= least:
        return Check(what=what, answer="pass", words=shown, numbers=numbers)
    words = f"{shown}; the policy requires {least} of each side"
    return Check(what=what, answer="inconclusive", words=words, numbers=numbers, runs_needed=least, remedy=TRAIN_MORE)


def _reached(candidates: Sequence[Learning], baselines: Sequence[Learning], may_miss: int) -> Check:
    missed = [sum(run.samples_to_target is None for run in side) for side in (candidates, baselines)]
    numbers = {
        "candidates that missed the target": float(missed[0]),
        "baselines that missed the target": float(missed[1]),
    }
    what = "the target is reached"
    if unknown := sum(not run.is_known for run in (*candidates, *baselines)):
        words = f"{unknown} runs have no evaluation of its metric"
        remedy = "name the MLflow server that has them with --uri, or correct convergence.target"
        return Check(what=what, answer="inconclusive", words=words, numbers=numbers, remedy=remedy)
    if missed[1]:
        words = f"{missed[1]} of {len(baselines)} baselines ended without the target: they cannot be its baseline"
        remedy = "train the baseline longer, or lower the target"
        return Check(what=what, answer="inconclusive", words=words, numbers=numbers, remedy=remedy)
    words = f"{len(candidates) - missed[0]} of {len(candidates)} candidates reached it"
    if failed := sum(not run.has_finished for run in candidates):
        words += f"; {failed} did not finish"
    if missed[0] > may_miss or missed[0] == len(candidates):
        remedy = "convergence.may_miss sets how many may end without the target"
        return Check(what=what, answer="fail", words=words, numbers=numbers, remedy=remedy)
    return Check(what=what, answer="pass", words=words, numbers=numbers)


def _efforts(candidates: Sequence[Learning], baselines: Sequence[Learning], policy: ConvergencePolicy) -> list[Check]:
    sides = [[r.samples_to_target for r in side if r.samples_to_target is not None] for side in (candidates, baselines)]
    efforts = [[float(value) for value in side] for side in sides]
    resolution = max(run.every_samples for run in (*candidates, *baselines))
    means = [sum(side) / len(side) for side in efforts]
    allowed = policy.margin * means[1]
    runs = [
        Runs.of([math.log(value) for value in side], resolution=resolution / mean)
        for side, mean in zip(efforts, means, strict=True)
    ]
    checks = []
    if resolution > COARSEST * allowed:
        words = f"evaluations are {resolution:,.0f} samples apart, more than half of the margin's {allowed:,.0f}"
        remedy = "evaluate more often (evaluation.every) or set a wider convergence.margin"
        checks.append(Check(what="fine enough evaluations", answer="inconclusive", words=words, remedy=remedy))
    margin = Margin(math.log1p(policy.margin), is_relative=False)
    checks.append(_asked("samples to the target", runs, margin, "lower", policy, of_logs=True))
    if policy.not_faster_than_chance:
        checks.append(_not_faster(efforts[0], efforts[1], policy.alpha))
    return checks


def _last_values(
    candidates: Sequence[Learning], baselines: Sequence[Learning], policy: ConvergencePolicy, better: Better
) -> Check:
    ended = [[run.value for run in side if run.has_finished] for side in (candidates, baselines)]
    sides = [[value for value in side if value is not None and math.isfinite(value)] for side in ended]
    what = "last value of the metric"
    missing = sum(map(len, ended)) - sum(map(len, sides))
    if missing or not all(ended):
        words = f"{missing} runs have no evaluation of it" if missing else "no run of one side has finished"
        return Check(what=what, answer="inconclusive", words=words, remedy="convergence.metric names the metric")
    margin = Margin(policy.metric_margin, is_relative=False)
    return _asked(what, [Runs.of(side) for side in sides], margin, better, policy)


def _asked(
    what: str, runs: Sequence[Runs], margin: Margin, better: Better, policy: ConvergencePolicy, *, of_logs: bool = False
) -> Check:
    return compared(
        what, runs, margin, better=better, alpha=policy.alpha, min_runs=policy.min_runs, ask_for=policy.ask_for,
        of_logs=of_logs,
    )  # fmt: skip


def _not_faster(candidates: Sequence[float], baselines: Sequence[float], alpha: float) -> Check:
    what = "not faster than chance explains (MLPerf)"
    if min(len(candidates), len(baselines)) < LEAST_REFERENCE:
        words = f"{LEAST_REFERENCE} runs of each side are needed, as the best and the worst are omitted"
        numbers = {"candidates": float(len(candidates)), "baselines": float(len(baselines))}
        return Check(what=what, answer="inconclusive", words=words, numbers=numbers, runs_needed=LEAST_REFERENCE,
                     remedy=TRAIN_MORE)  # fmt: skip
    point = ReferencePoint.of(0, baselines)
    slowest, mean = point.slowest_allowed(len(candidates) - 2, alpha=alpha), olympic(candidates)
    numbers = {"candidate": mean, "baseline": point.mean, "least allowed": slowest}
    words = f"{mean:,.0f} samples; the baseline's {point.mean:,.0f} allow {slowest:,.0f}"
    if mean >= slowest:  # the test refuses a share alpha of what is as good, whatever the number of runs
        return Check(what=what, answer="pass", words=words, numbers=numbers, power=1 - alpha)
    remedy = "check for differences in data, target or recipe: scaleray compare BASELINE RUN"
    return Check(what=what, answer="fail", words=words, numbers=numbers, remedy=remedy)
