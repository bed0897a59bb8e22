"""Gate `scaling`: is the efficiency of a number of workers, by a scaling study, above the policy's limit?

The lower end of an interval counts, so that one lucky measurement does not pass. It is `SUCCESSIVE` times as far away
as the end of the study's 95 % interval, since measurements are successive: with 3 skewed measurements of one worker and
30 of four workers, 6.5 % passed."""

import math
import shlex

from scipy.special import stdtrit

from scaleray.records.gate_answer import Check, GateResult, gate_of
from scaleray.records.study_record import CurvePoint, Estimate, StudyRecord
from scaleray.release.gates.confidence import BEYOND, POWER, SUCCESSIVE, Contrast, Runs, runs_needed
from scaleray.release.gates.policy import ScalingPolicy

GATE = "scaling"
UNREAL = {"emulated": "its compute was a timed sleep", "oversubscribed": "its workers shared processors"}
"""Marks of points whose speed does not apply to real devices, with reasons."""


def scaling_gate(study: StudyRecord | None, *, workers: int, policy: ScalingPolicy) -> GateResult:
    """The gate's check. workers: number of workers of the candidate."""
    if workers == 1:
        return gate_of(GATE, [Check(what="efficiency", answer="pass", words="one worker is the reference")])
    what = f"efficiency of {workers} workers ({policy.mode}) above {policy.min_efficiency:g}"
    if study is None:
        words, remedy = "there is no scaling study", study_command(None, workers, policy, policy.min_launches)
        remedy += ", then --study NAME"
        return gate_of(GATE, [Check(what=what, answer="inconclusive", words=words, remedy=remedy)])
    ask = study_command(study, workers, policy, policy.min_launches)
    points = [one for curve in study.curves if curve.mode == policy.mode for one in curve.points]
    found = next((one for one in points if one.point.workers == workers), None)
    if found is None:
        sizes = ", ".join(str(one.point.workers) for one in points) or "none"
        words = f"study {study.name} measured {sizes} workers ({policy.mode})"
        return gate_of(GATE, [Check(what=what, answer="inconclusive", words=words, remedy=ask)])
    base = min(one.point.workers for one in points)
    if base == workers or base > policy.base_workers:
        words = f"study {study.name} begins with {base} workers, so its efficiency is relative to them"
        if base == workers:
            words += ": it is 1 by definition"
        return gate_of(GATE, [Check(what=what, answer="inconclusive", words=words, remedy=ask)])
    what += f", relative to {base}" if base > 1 else ""
    return gate_of(GATE, [_check(what, found, study, policy)])


def study_command(study: StudyRecord | None, workers: int, policy: ScalingPolicy, turns: int) -> str:
    """The command that measures each size this many times: the study's own, with the missing options."""
    words = shlex.split(study.command) if study is not None and study.command else ["scaleray", "study", "-c", "FILE"]
    known = study.curves if study is not None else []
    sizes = sorted({1, workers, *(one.point.workers for curve in known for one in curve.points)})
    modes = dict.fromkeys([*(curve.mode for curve in known), policy.mode])
    asked = {"--world-sizes": ",".join(map(str, sizes)), "--mode": ",".join(modes), "--repeats": str(turns)}
    for option, value in asked.items():
        if option in words[:-1]:
            words[words.index(option) + 1] = value
        else:
            words += [option, value]
    return shlex.join(words)


def _check(what: str, found: CurvePoint, study: StudyRecord, policy: ScalingPolicy) -> Check:
    efficiency, point = _judged(found.efficiency), found.point
    turns, limit = len(point.turns), policy.min_efficiency
    numbers = {"efficiency": efficiency.value, "low": efficiency.low, "high": efficiency.high, "turns": float(turns)}
    shown = f"{efficiency} in study {study.name}, {turns} measurements"
    if marks := [mark for mark in point.marks if mark in UNREAL]:
        why = "; ".join(UNREAL[mark] for mark in marks)
        return Check(what=what, answer="inconclusive", words=f"{shown}; {why}", numbers=numbers)
    if turns < policy.min_launches:
        words = f"{shown}; the policy requires {policy.min_launches}"
        remedy = study_command(study, point.workers, policy, policy.min_launches)
        return Check(what=what, answer="inconclusive", words=words, numbers=numbers, remedy=remedy,
                     runs_needed=policy.min_launches, needed_of="measurements of each size")  # fmt: skip
    noise = _noise(found)
    power, needed = _power(noise, limit), _turns_needed(noise, limit)
    if efficiency.low > limit:
        return Check(what=what, answer="pass", words=shown, numbers=numbers, power=power)
    if efficiency.high < limit:
        remedy = "scaleray profile RUN shows what the workers wait for"
        return Check(what=what, answer="fail", words=shown, numbers=numbers, remedy=remedy)
    words = f"{shown}; the interval contains {limit:g}"
    if needed is None:
        words += ", and no number of measurements would prove this efficiency above it"
    else:
        needed = max(needed, turns + 1)
    remedy = study_command(study, point.workers, policy, needed or 2 * turns)
    return Check(what=what, answer="inconclusive", words=words, numbers=numbers, power=power, runs_needed=needed,
                 needed_of="measurements of each size", remedy=remedy)  # fmt: skip


def _judged(measured: Estimate) -> Estimate:
    """The efficiency with interval ends SUCCESSIVE times as far away, in logarithms."""
    value = measured.value
    low, high = (value * (end / value) ** SUCCESSIVE for end in (measured.low, measured.high))
    return Estimate(value, low, high)


def _power(noise: Runs, limit: float) -> float:
    """Probability that the lower end of the interval is above the limit for this many measurements."""
    if noise.stdev == 0:
        return float(noise.mean > math.log(limit))
    contrast = Contrast(noise.stdev / math.sqrt(noise.number), noise.number - 1, 0.0, are_successive=True)
    return contrast.power(noise.mean - math.log(limit), BEYOND)


def _turns_needed(noise: Runs, limit: float) -> int | None:
    """Smallest number of measurements with which the check passes 9 times out of 10; None if there is none."""
    if noise.mean <= math.log(limit):
        return None
    return runs_needed(lambda turns: turns > 1 and _power(noise.repeated(turns), limit) >= POWER)


def _noise(found: CurvePoint) -> Runs:
    """Logarithm of the efficiency as if each measurement gave a value, with noise derived from the lower end of its
    interval."""
    value, turns = found.efficiency.value, len(found.point.turns)
    half = math.log(value / found.efficiency.low)
    return Runs(math.log(value), half / float(stdtrit(turns - 1, 1 - BEYOND)) * math.sqrt(turns), turns)
