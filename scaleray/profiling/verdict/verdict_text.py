"""Text of a verdict: a sentence, the evidence of each finding, and the questions that could not be answered."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from scaleray.common.printed import quantity
from scaleray.profiling.verdict.findings import Finding, Limit, Verdict
from scaleray.profiling.verdict.signals import Facts, Signals
from scaleray.profiling.verdict.stragglers import ALIKE, Stragglers
from scaleray.records.phases import PART_IN_WORDS, Phase
from scaleray.records.text.units import seconds

IS_THE_LIMIT = {
    Limit.INPUT: "the input is the limit",
    Limit.COPY: "copying rows to the device is the limit",
    Limit.COMMUNICATION: "exposed communication is the limit",
    Limit.HOST: "the host is the limit",
    Limit.CHECKPOINT: "saving checkpoints is the limit",
    Limit.EVALUATION: "evaluations are the limit",
    Limit.MEMORY: "memory pressure is the limit",
}
REMOVING = {
    Limit.INPUT: "rows that are ready in time",
    Limit.COPY: "no copying",
    Limit.COMMUNICATION: "overlapping it",
    Limit.HOST: "a host that is always ahead",
    Limit.CHECKPOINT: "no waiting for checkpoints",
    Limit.EVALUATION: "no evaluations",
    Limit.MEMORY: "enough memory",
    Limit.STRAGGLER: "ranks as fast as the others",
}


def sentence_of(verdict: Verdict, facts: Facts) -> str:
    """The verdict as one sentence, and the next measure as another."""
    one, workers = verdict.primary, quantity(facts.workers, "worker")
    if one.limit is Limit.COMPUTE:
        return f"computing is the limit: {one.share:.0%} of the time is the model's own work on {workers}."
    first = f"{_subject(one, facts)}: {one.share:.0%} of a step on {workers}"
    if one.limit is Limit.COMMUNICATION and one.evidence:
        first += f", {one.evidence}"
    gain = f"; {REMOVING[one.limit]} would give at most {one.gain:.2f}x." if one.gain is not None else "."
    return first + gain + (f" Next: {one.advice.text}." if one.advice.text else "")


def _subject(one: Finding, facts: Facts) -> str:
    many = len(one.ranks) > 1
    shown = ", ".join(map(str, one.ranks[:8])) + (" and others" if len(one.ranks) > 8 else "")
    if one.limit is not Limit.STRAGGLER:
        whose = f" on rank{'s' if many else ''} {shown}" if one.ranks else ""
        return IS_THE_LIMIT[one.limit] + whose + (f" ({one.cause})" if one.cause else "")
    where = f" in {PART_IN_WORDS[Phase(one.phase)]}" if one.phase else ""
    layers = f" at {one.layers}" if one.layers else ""
    return f"rank{'s' if many else ''} {shown} {'delay' if many else 'delays'} the others{where}{layers}"


def straggler_place(finding: Finding, stragglers: Stragglers, signals: Signals) -> Finding:
    """Describe the ranks and the phase of a straggler and, in a backward pass, the bucket and the layers."""
    finding = dataclasses.replace(finding, ranks=stragglers.ranks, phase=stragglers.phase)
    at = signals.late_at.get(stragglers.ranks[0])
    if stragglers.phase is Phase.BACKWARD and at is not None:
        return dataclasses.replace(finding, bucket=at.bucket, layers=at.layers)
    return finding


def waiting_ranks(signals: Signals) -> tuple[int, ...]:
    """Ranks that wait much longer for their rows than others do, longest first; empty if all wait about equally."""
    waits = signals.parts[Phase.INPUT].mean(axis=1)
    order = [int(rank) for rank in np.argsort(-waits, kind="stable") if waits[rank] >= ALIKE * waits.max()]
    return tuple(order) if len(order) < len(waits) else ()


def evidence_of(limit: Limit, signals: Signals, stragglers: Stragglers | None, cause: str) -> str:
    """Evidence of a finding as short text; "" if its share is sufficient."""
    if limit is Limit.COMMUNICATION:
        speed = f" at {signals.bus_bandwidth / 1e9:.3g} GB/s" if signals.bus_bandwidth else ""
        return f"{signals.last_operation} comes last{speed}" if signals.last_operation else speed.strip()
    if limit is Limit.STRAGGLER and stragglers is not None:
        words = PART_IN_WORDS[stragglers.phase]
        return f"rank {stragglers.ranks[0]} is {seconds(stragglers.excess_s)} per step behind, mostly in {words}"
    if limit is Limit.HOST and cause and signals.pauses is not None:
        worst = signals.pauses.sum(axis=1).max() / signals.num_columns
        return f"pauses of the garbage collector take {seconds(float(worst))} per step"
    if limit is Limit.MEMORY and signals.retries is not None:
        share = (signals.retries > 0).any(axis=0).mean()
        pieces = f", {signals.stranded_share:.0%} of the memory is fragmented" if signals.stranded_share else ""
        return f"the allocator returned its cache in {share:.0%} of the steps{pieces}"
    if limit is Limit.INPUT:
        waits = signals.parts[Phase.INPUT].mean(axis=1)
        ranks = waiting_ranks(signals)
        who = f"rank {ranks[0]}" if ranks else "a rank"
        others = "; the others wait for it, which hides whether their rows are as late" if ranks else ""
        return f"{who} waits {seconds(float(waits.max()))} per step for its rows{others}"
    return ""


def unanswered(signals: Signals, facts: Facts) -> Iterator[str]:
    """Questions that the signals cannot answer."""
    if facts.workers > 1 and signals.waits is None:
        yield "communication and stragglers: waiting for collectives was not measured"
    elif facts.workers > 1 and signals.num_ranks < facts.workers:
        yield f"stragglers among the {facts.workers - signals.num_ranks} ranks without measurements"
    if facts.device != "cpu" and signals.retries is None:
        yield "memory pressure: the allocator was not observed"
