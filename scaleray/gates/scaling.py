"""The gate `scaling`: the efficiency of a number of workers, by a scaling study, is above what the policy asks for.

The lower end of its 95 % interval counts, so that one lucky turn does not pass.
"""

from __future__ import annotations

from scaleray.gates.answer import Check, GateResult, gate_of
from scaleray.gates.policy import ScalingPolicy
from scaleray.records.study import CurvePoint, StudyRecord

GATE = "scaling"
UNREAL = {"emulated": "its compute was a timed sleep", "oversubscribed": "its workers shared processors"}
"""Marks of a point whose speed says nothing about real devices, and why."""


def scaling_gate(study: StudyRecord | None, *, workers: int, policy: ScalingPolicy) -> GateResult:
    """The gate's check. workers: number of workers of the candidate."""
    if workers == 1:
        return gate_of(
            GATE, [Check(what="efficiency", answer="pass", words="one worker is what others are compared with")]
        )
    what = f"efficiency of {workers} workers ({policy.mode}) above {policy.min_efficiency:g}"
    ask = f"scaleray study -c FILE --world-sizes 1,{workers}"
    if study is None:
        words = "there is no scaling study"
        return gate_of(GATE, [Check(what=what, answer="inconclusive", words=words, remedy=f"{ask}, then --study NAME")])
    points = [one for curve in study.curves if curve.mode == policy.mode for one in curve.points]
    found = next((one for one in points if one.point.workers == workers), None)
    if found is None:
        sizes = ", ".join(str(one.point.workers) for one in points) or "none"
        words = f"study {study.name} measured {sizes} workers ({policy.mode})"
        return gate_of(GATE, [Check(what=what, answer="inconclusive", words=words, remedy=ask)])
    if min(one.point.workers for one in points) == workers:
        words = f"study {study.name} begins with {workers}: its efficiency is 1 by definition"
        return gate_of(GATE, [Check(what=what, answer="inconclusive", words=words, remedy=ask)])
    return gate_of(GATE, [_check(what, found, study, policy)])


def _check(what: str, found: CurvePoint, study: StudyRecord, policy: ScalingPolicy) -> Check:
    efficiency, point = found.efficiency, found.point
    numbers = {"efficiency": efficiency.value, "low": efficiency.low, "high": efficiency.high,
               "turns": float(len(point.turns))}  # fmt: skip
    shown = f"{efficiency} in study {study.name}, {len(point.turns)} turns"
    if marks := [mark for mark in point.marks if mark in UNREAL]:
        why = "; ".join(UNREAL[mark] for mark in marks)
        return Check(what=what, answer="inconclusive", words=f"{shown}; {why}", numbers=numbers)
    if len(point.turns) < policy.min_launches:
        words = f"{shown}; the policy asks for {policy.min_launches}"
        remedy = f"scaleray study -c FILE --repeats {policy.min_launches}"
        return Check(
            what=what,
            answer="inconclusive",
            words=words,
            numbers=numbers,
            runs_needed=policy.min_launches,
            remedy=remedy,
        )
    if efficiency.low > policy.min_efficiency:
        return Check(what=what, answer="pass", words=shown, numbers=numbers)
    if efficiency.high < policy.min_efficiency:
        remedy = "scaleray profile RUN says what the workers wait for"
        return Check(what=what, answer="fail", words=shown, numbers=numbers, remedy=remedy)
    words = f"{shown}; the interval holds {policy.min_efficiency:g}"
    return Check(what=what, answer="inconclusive", words=words, numbers=numbers, remedy="more rounds of the study")
