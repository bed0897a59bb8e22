"""Check that workers that resume from their own checkpoint, on the same number of workers, take the same steps as an
uninterrupted training."""

import dataclasses
import math

from scaleray.records.certificate import Divergence
from scaleray.training.state.items import IN_WORDS, ITEMS, RANDOM, RATE_SCALE, SCHEDULE
from scaleray.verification.causes.cause_classes import Cause, Finding, Layout, from_traces
from scaleray.verification.runs.compared_runs import Key, Runs, Variant, Watched
from scaleray.verification.runs.rank0_decisions import on_first
from scaleray.verification.traces.compare_traces import divergences, restored_differences
from scaleray.verification.traces.run_trace import Trace
from scaleray.verification.verdicts.verdict_texts import Found, promised

CAUSES = {
    RANDOM: Cause.RANDOMNESS, SCHEDULE: Cause.SCHEDULE, RATE_SCALE: Cause.SCHEDULE, "draws": Cause.RANDOMNESS,
    "learning rate": Cause.SCHEDULE, "rows": Cause.DATA_ORDER, "steps": Cause.DATA_ORDER,
}  # fmt: skip
"""Class of cause by the state that differs after a resume; `Cause.RESUME` for any other state."""
RESUMED = "after a resume on the same number of workers"


def resumed_wrongly(runs: Runs, variant: Variant, key: Key, watched: Watched, bound: float) -> Found | None:
    """First difference between a variant resumed from its own checkpoint and the uninterrupted one. Collective."""
    whole, resumed = watched.uninterrupted, runs.resumed_here(variant, key)
    assert whole is not None and whole.saved is not None and resumed.restored is not None
    saved, restored = whole.saved.items, resumed.restored.items
    everyone = runs.place.gathered([item for item in ITEMS if saved.get(item) != restored.get(item)])
    items = [item for item in ITEMS if any(item in theirs for theirs in everyone)]
    return on_first(runs.place, lambda: _first(variant, whole, resumed, items, bound))


def _first(variant: Variant, whole: Trace, resumed: Trace, items: list[str], bound: float) -> Found | None:
    assert whole.saved is not None and resumed.restored is not None
    half = whole.saved.step
    apart = _steps_apart(variant, whole, resumed, bound)
    if apart is not None and apart.quantity in ("rows", "steps"):
        return apart, _finding(apart.quantity, f"{RESUMED}, the training reads different rows")
    state = next(restored_differences(whole.saved, resumed.restored, whole.names, bound), None)
    if state is not None and (finding := from_traces(whole, resumed, state, Layout(1, 1))) is not None:
        why = finding.why.replace("on another number of workers", "on the same number of workers")
        return state, dataclasses.replace(finding, why=why)
    # a rate that belongs to the schedule stands in the optimizer's groups as well
    for item in sorted(items, key=lambda item: item not in CAUSES):
        why = f"{RESUMED}, these values differ from the saved ones: {IN_WORDS[item]}"
        return Divergence(half + 1, "resume", math.inf), _finding(item, why)
    if apart is not None:
        return apart, _finding(apart.quantity, f"{RESUMED}, it continues with a different {apart.quantity}")
    return _law_broken(variant, whole, resumed, bound)


def _finding(what: str, why: str) -> Finding:
    return Finding(CAUSES.get(what, Cause.RESUME), why)


def _steps_apart(variant: Variant, whole: Trace, resumed: Trace, bound: float) -> Divergence | None:
    """First difference in the steps after the checkpoint. If messages arrive in a different order each time, only
    values that do not depend on the order are compared."""
    assert whole.saved is not None
    half, last = whole.saved.step, whole.steps[-1].step
    due, found = (
        dataclasses.replace(t.between(half, last), final={}, exported={}, restored=None, initial=whole.initial)
        for t in (whole, resumed)
    )
    guarantee, config = promised(variant), variant.job.config
    in_any_order = not config.deterministic and any(guarantee.is_under_way(config, step.step) for step in whole.steps)
    for apart in divergences(due, found, bound):
        if not in_any_order or apart.quantity in ("rows", "steps", "count", "learning rate"):
            return apart
    for ours, theirs in zip(due.steps, found.steps, strict=False):
        if ours.draws != theirs.draws:
            return Divergence(ours.step, "draws", math.inf)
    return None


def _law_broken(variant: Variant, whole: Trace, resumed: Trace, bound: float) -> Found | None:
    """First step after the checkpoint that breaks the strategy's guarantee, which holds without interruption."""
    assert whole.saved is not None
    half = whole.saved.step
    joint = dataclasses.replace(whole.between(0, half).continued_by(resumed), restored=None)
    guarantee, config = promised(variant), variant.job.config
    broken = guarantee.disagreement(joint, config, bound)
    if broken is None or broken.step <= half or guarantee.disagreement(whole, config, bound) is not None:
        return None
    return broken, _finding("law", f"{RESUMED}, replicas do not continue from their previous state")
