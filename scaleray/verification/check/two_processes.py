"""Check whether two processes train like one, for two steps in float64."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from scaleray.config import RunConfig
from scaleray.data.source_interface import TRAIN, Source
from scaleray.errors import WorkloadError
from scaleray.launch.workers.gloo import TELL, UserCode, gloo_processes
from scaleray.records.certificate import Outcome
from scaleray.records.check_record import DOUBTFUL, GOOD, WRONG, Finding
from scaleray.records.hangs import HANGS
from scaleray.verification.causes.cause_classes import Cause
from scaleray.verification.variants import Assignment
from scaleray.verification.verification_plan import make_plan
from scaleray.verification.verify import verify_here
from scaleray.verification.verify_options import VerifyOptions

STEPS = 2
ROWS = 4
"""Samples of a global batch here: two for each process, as batch normalisation needs."""
SUBJECT = "two processes"
PRECISIONS = {"fp64": "float64", "fp32": "float32"}


def two_processes(config: RunConfig, workload: Any, sources: Mapping[str, Source], code: UserCode) -> Finding:
    """The verdict on the first steps of ddp on two gloo processes compared with one process. Raises UsageError."""
    try:
        return _compared(config, workload, sources, code, precision="fp64")
    except WorkloadError as exc:
        # it trains in its own precision: a part that the workload makes in float32 does not meet weights in float64
        try:
            found = _compared(config, workload, sources, code, precision="fp32")
        except WorkloadError:
            raise exc from None
        return replace(found, text=f"{found.text}; the workload does not run in float64")


def _compared(
    config: RunConfig,
    workload: Any,
    sources: Mapping[str, Source],
    code: UserCode,
    *,
    precision: Literal["fp64", "fp32"],
) -> Finding:
    options = VerifyOptions(strategies=("ddp",), world_sizes=(2,), accumulation=(1,), steps=STEPS, precision=precision)
    train = {TRAIN: sources[TRAIN]}  # an evaluation of all rows may take longer than everything else
    config = config.changed({"stop.at": None})
    if config.batch.unit == "samples" and config.batch.global_size > ROWS:
        config = config.changed({"batch.global_size": ROWS, "batch.micro_size": None})
    plan = make_plan(config, options, workload, train)
    variants = [variant for group in plan.groups.values() for variant in group]
    if not variants:
        why = plan.refused[0].words if plan.refused else "no variant runs"
        return Finding(SUBJECT, DOUBTFUL, f"not compared: {why}")
    outcomes: list[Outcome] = []
    folder = tempfile.mkdtemp(prefix="scaleray-check-")  # stays where an error says to look into it
    timeout_s = config.scale.collective_timeout_s
    with gloo_processes(2, code, timeout_s=timeout_s, watched_in=folder) as processes:
        assignment = Assignment(plan.reference, tuple(variants), options.allowed)
        try:
            outcomes, _ = processes.run(2, verify_here, assignment, {}, train, TELL, workload=workload)
        finally:
            if not os.path.isdir(f"{folder}/{HANGS}"):
                shutil.rmtree(folder, ignore_errors=True)
    return judged(outcomes, precision=precision)


def judged(outcomes: list[Outcome], *, precision: str = "fp64") -> Finding:
    """The finding for a comparison."""
    [outcome] = outcomes
    if outcome.verdict == "refused":
        return Finding(SUBJECT, DOUBTFUL, f"not compared: {outcome.words}")
    if (found := outcome.mismatch) is not None:
        where = f"step {found.step}: {found.quantity}{f' of {found.parameter}' if found.parameter else ''}"
        if found.cause == Cause.CUT:
            return Finding(SUBJECT, DOUBTFUL, f"they differ from one process because of the loss itself: {found.why}")
        text = f"they differ from one process: {where} is {found.difference:.1e} apart; {found.cause}: {found.why}"
        return Finding(SUBJECT, WRONG, f"{text}\n  scaleray verify --local gives details")
    largest = outcome.comparison.largest
    text = f"equal one process within {largest:.1e} over {STEPS} steps in {PRECISIONS[precision]}"
    return Finding(SUBJECT, GOOD, f"{text}; {outcome.words}" if outcome.words else text)
