"""Check whether a strategy equals the training of one process: run both through the real loop and compare them.

Works in any group of workers: under Ray Train, in plain gloo processes, or alone. Rank 0 compares and decides which
runs are needed; every rank then takes part in them."""

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

from scaleray.common.fingerprint import hardware
from scaleray.data import Sources
from scaleray.errors import CheckpointError, InitialisationError, NonFiniteLossError, UsageError, WorkloadError
from scaleray.records.certificate import Comparison, Divergence, Outcome
from scaleray.training import loop
from scaleray.training.setup.rank_context import RankContext
from scaleray.verification.causes.cause_classes import Cause, Finding, Layout, from_traces
from scaleray.verification.own_resume import resumed_wrongly
from scaleray.verification.repeatable.dropout_masks import masks_broken
from scaleray.verification.repeatable.repeatable_workload import Quieted
from scaleray.verification.runs.compared_job import short_job
from scaleray.verification.runs.compared_runs import (
    EXACT,
    OWN,
    Key,
    References,
    Runs,
    Variant,
    Watched,
    partition_of,
    shared_folder,
)
from scaleray.verification.runs.rank0_decisions import Failures, on_first
from scaleray.verification.runs.trace_probe import TraceProbe
from scaleray.verification.traces.compare_traces import compare, divergences, restored_differences
from scaleray.verification.traces.run_trace import Trace
from scaleray.verification.verdicts.explanation import Explanation
from scaleray.verification.verdicts.grown_rounding import GrownRounding
from scaleray.verification.verdicts.guarantees import GUARANTEES, Guarantee
from scaleray.verification.verdicts.own_precision import Excess, excess
from scaleray.verification.verdicts.verdict_texts import (
    Found,
    beyond_rounding,
    failure,
    handed_on_wrongly,
    judged,
    mean_of,
    mismatch_of,
    own_gradients,
    promised,
    rounding_of,
    unkept,
    with_norms_of,
    without_statistics,
)

__all__ = ["GUARANTEES", "Assignment", "Guarantee", "References", "Variant", "loop", "short_job", "verify_group"]

UNSAVED = "the state of the"
"""Prefix of errors that name a part of a training's state that cannot be saved."""

Tell = Callable[["Outcome | None"], None]
"""Function that receives each outcome as it arrives, and None once the reference has run."""


@dataclass(frozen=True)
class Assignment:
    """Variants that a group of workers verifies. reference: one process with one micro-batch. folder: for checkpoints,
    visible to all workers of all groups that share references; None: a folder on this machine, for this group alone."""

    reference: Variant
    variants: tuple[Variant, ...]
    bound: float
    folder: str | None = None


def verify_group(
    place: RankContext,
    assignment: Assignment,
    references: References,
    *,
    sources: Sources,
    tell: Tell = lambda outcome: None,
) -> tuple[list[Outcome], References]:
    """Compare every variant with one process. Collective over the place's group. Rank 0 adds new references to the
    given ones.

    tell: called on rank 0, see `Tell`. Raises UsageError when the reference itself cannot run."""
    return _Group(place, assignment, references, sources, tell).run()


class _Group:
    def __init__(
        self, place: RankContext, assignment: Assignment, references: References, sources: Sources, tell: Tell
    ) -> None:
        self.place, self.assignment, self.sources, self.tell = place, assignment, sources, tell
        self.references, self.bound = references, assignment.bound
        self.unsaved, self.failures = "", Failures(place)

    def run(self) -> tuple[list[Outcome], References]:
        everyone = self.place.gathered({"device": str(self.place.device), **hardware()})
        self.workers = [kind for number, kind in enumerate(everyone) if kind not in everyone[:number]]
        with shared_folder(self.place, self.assignment.folder) as folder:
            self.runs = Runs(self.place, self.assignment.reference, self.references, self.sources, folder)
            self.explanation = Explanation(self.runs, self.bound)
            self.rounding = GrownRounding(self.runs, self.bound)
            try:
                self.quiet, self.has_statistics = on_first(self.place, self._choose_quiet)
            except WorkloadError as exc:
                if not exc.what.startswith(UNSAVED):
                    raise
                self.runs.resumes, self.unsaved = (
                    False,
                    f"without a resume: {exc.what} {exc.allowed.rpartition(':')[0]}",
                )
                self.quiet, self.has_statistics = on_first(self.place, self._choose_quiet)
            self.outcomes: list[Outcome] = []
            if self.place.rank == 0:
                self.tell(None)
            for _, alike in groupby(self.assignment.variants, lambda variant: (variant.strategy, variant.job.degrees)):
                with self.runs.same_groups():
                    for variant in alike:
                        self._judge(variant)
        return self.outcomes, self.runs.references

    def _judge(self, variant: Variant) -> None:
        self.outcomes.append(self._outcome(variant))
        if self.place.rank == 0:
            self.runs.forget(variant)
            self.tell(self.outcomes[-1])

    def _choose_quiet(self) -> tuple[str, bool]:
        """Run the reference, and return the parts to disable so that several workers can repeat one process, and
        whether the model takes statistics over batches that they can repeat."""
        trace = self.runs.reference(Key(Quieted.MODULES))
        if not any(step.draws_random_numbers for step in trace.steps):
            has_statistics = "BatchNorm" in trace.quieted and "SyncBatchNorm" not in trace.quieted
            return Quieted.MODULES, has_statistics
        everything = self.runs.reference(Key(Quieted.EVERYTHING))
        still_draws = any(step.draws_random_numbers for step in everything.steps)
        return (Quieted.MODULES if still_draws else Quieted.EVERYTHING), False

    def _key(self, variant: Variant) -> Key:
        """Key of a variant's reference."""
        if not self.has_statistics:
            return Key(self.quiet, self.has_statistics)
        later = partition_of(variant.later) if variant.later is not None else None
        return Key(self.quiet, True, partition_of(variant.job), later)

    def _outcome(self, variant: Variant) -> Outcome:
        started = time.perf_counter()
        outcome = dataclasses.replace(variant.outcome, workers=self.workers)
        probes: list[TraceProbe] = []
        key, guarantee = self._key(variant), promised(variant)
        if key.partition is not None and (why := without_statistics(variant)):
            return dataclasses.replace(outcome, verdict="refused", words=why)
        on_first(self.place, lambda: bool(self.runs.reference(key)))  # the variant goes on from its checkpoint
        take_apart_at = None if guarantee.is_exact else self._partial_step(variant)
        try:
            watched = self.runs.compared(
                variant, key, keeps=not guarantee.is_exact, take_apart_at=take_apart_at, saves=True, began=probes.append
            )
            trace = watched.trace
            outcome = (self._judge_exact if guarantee.is_exact else self._judge_promise)(variant, outcome, watched)
            outcome = self._resumed_here(variant, key, outcome, watched)
            if outcome.mismatch is None and self.runs.resumes_after(variant) is not None:
                bound = outcome.bound or self.bound
                found = on_first(self.place, lambda: self._saved_wrongly(variant, key, guarantee, trace, bound))
                outcome = self._with(outcome, found)
            outcome = self._in_own_precision(variant, outcome)
        except (UsageError, InitialisationError, NonFiniteLossError, CheckpointError) as exc:
            if not self.failures.is_shared():
                raise  # the others are in a collective, which ends with this process's part in it
            self.runs.leave_groups()  # a message of the failed training may still be under way in them
            # the workload is refused, or the layout, which the model may do with its first rows
            if isinstance(exc, UsageError) and (
                exc.what.startswith("parallel.") or not any(probe.has_begun for probe in probes)
            ):
                return dataclasses.replace(outcome, verdict="refused", words=" ".join(str(exc).split()))
            before = on_first(self.place, lambda: self._before_failure(variant, key, guarantee, probes))
            mismatch = mismatch_of(*before) if before is not None else failure(exc, variant, probes)
            outcome = dataclasses.replace(outcome, verdict="differs", mismatch=mismatch)
        words = "; ".join(text for text in (outcome.words, self.unsaved) if text)
        return dataclasses.replace(outcome, words=words, duration_s=time.perf_counter() - started)

    def _before_failure(
        self, variant: Variant, key: Key, guarantee: Guarantee, probes: list[TraceProbe]
    ) -> Found | None:
        """Divergence that a failed run's traces show before the failure, possibly its reason. On rank 0."""
        done = [probe.trace() for probe in probes if probe.has_begun]
        if not done:
            return None
        reference, trace = self.runs.reference(key), done[0] if len(done) == 1 else done[0].continued_by(done[-1])
        last = trace.steps[-1].step if trace.steps else 0
        for found in divergences(reference, trace, self.bound):
            if found.step > last or found.quantity in ("steps", "final values", "evaluation"):
                return None
            if guarantee.is_exact or not guarantee.is_kept_by(found, variant.job.config, variant.resumes_after):
                finding = from_traces(reference, trace, found, self._layout(variant))
                return None if finding is None else (found, finding)
        return None

    def _resumed_here(self, variant: Variant, key: Key, outcome: Outcome, watched: Watched) -> Outcome:
        """The outcome with the verdict on a resume on the same number of workers, which takes precedence over a
        divergence after a resume on another number. Collective."""
        half = self.runs.resumes_after(variant)
        is_apart = outcome.mismatch is not None and outcome.mismatch.step <= (half or 0)
        if half is None or self.place.world_size == 1 or is_apart:
            return outcome
        found = resumed_wrongly(self.runs, variant, key, watched, outcome.bound or self.bound)
        return self._with(outcome, found)

    def _partial_step(self, variant: Variant) -> int:
        """Number of the first step that is not full, in which workers may have unequal counts."""
        last = self.runs.resumes_after(variant) or variant.job.recipe.total_steps
        return max(1, min(last, variant.job.train_plan().steps_per_epoch))

    def _judge_exact(self, variant: Variant, outcome: Outcome, watched: Watched) -> Outcome:
        key, trace = self._key(variant), watched.trace
        comparison, bound, grown = on_first(self.place, lambda: self._compared(key, trace))
        words = "; ".join(filter(None, (judged(trace, key), grown)))
        outcome = dataclasses.replace(outcome, comparison=comparison, words=words, bound=bound)
        if comparison.divergence is not None:
            finding = self.explanation.of(variant, key, trace, comparison.divergence, self._layout(variant))
            return self._with(outcome, (comparison.divergence, finding))
        return self._with(outcome, on_first(self.place, lambda: self._masks_broken(variant, trace)))

    def _compared(self, key: Key, trace: Trace) -> tuple[Comparison, float, str]:
        """Comparison of a run that must be equal, its bound, and the reason for a wider bound. On rank 0."""
        reference = self.runs.reference(key)
        comparison = compare(reference, trace, bound=self.bound)
        if comparison.divergence is None:
            return comparison, self.bound, ""
        bound = self.rounding.bound_for(comparison.divergence, key)
        if bound > self.bound:
            comparison = compare(reference, trace, bound=bound)
        return comparison, bound, self.rounding.to_text(bound)

    def _judge_promise(self, variant: Variant, outcome: Outcome, watched: Watched) -> Outcome:
        guarantee, config, key, trace = promised(variant), variant.job.config, self._key(variant), watched.trace

        def first_broken() -> tuple[Comparison, Found | None]:
            reference = self.runs.reference(key)
            resumed = variant.resumes_after

            def unkept_by(bound: float) -> Divergence | None:
                found = divergences(reference, trace, bound)
                return next((d for d in found if not guarantee.is_kept_by(d, config, resumed)), None)

            broken = unkept_by(self.bound)
            if broken is not None and (bound := self.rounding.bound_for(broken, key)) > self.bound:
                broken = unkept_by(bound)
            broken = broken or guarantee.disagreement(trace, config, self.bound)
            comparison = compare(reference, trace, bound=self.bound)
            if broken is not None:
                finding = self.explanation.unrepeatable(key, broken) or from_traces(
                    reference, trace, broken, self._layout(variant)
                )
                return comparison, (broken, finding or unkept(broken, config))
            return comparison, (
                own_gradients(variant, watched, config, self.bound)
                or self._evaluated_wrongly(variant, key, watched)
                or handed_on_wrongly(trace, guarantee, config, self.bound)
                or self._masks_broken(variant, trace)
            )

        comparison, found = on_first(self.place, first_broken)
        outcome = dataclasses.replace(outcome, verdict="as promised", comparison=comparison, words=guarantee.words)
        return self._with(outcome, found)

    def _masks_broken(self, variant: Variant, trace: Trace) -> Found | None:
        # one worker goes on with the generator in the checkpoint of the reference, which draws no masks
        after = self.runs.resumes_after(variant) if self.place.world_size == 1 else None
        return masks_broken(trace, variant.job.degrees, generators_of_others_after=after)

    def _evaluated_wrongly(self, variant: Variant, key: Key, watched: Watched) -> Found | None:
        """First evaluation that differs from an evaluation of the replicas' mean. On rank 0."""
        trace, guarantee, config = watched.trace, promised(variant), variant.job.config
        if not variant.job.evaluation_splits():
            return None
        for step, everyone in watched.values.items():
            if guarantee.is_under_way(config, step):
                continue
            mean = mean_of(everyone)
            due, found = self.runs.measured_alone(mean, key), trace.evaluations.get(step, {})
            for name in dict.fromkeys((*due, *found)):
                apart = abs(due.get(name, math.inf) - found.get(name, math.inf))
                if not apart <= self.bound * max(1.0, abs(due.get(name, 0.0))):
                    why = f"{name} is {found.get(name)}, but the mean of all replicas has {due.get(name)}"
                    return Divergence(step, "evaluation", apart, name), Finding(Cause.EVALUATION, why)
        return None

    def _saved_wrongly(
        self, variant: Variant, key: Key, guarantee: Guarantee, trace: Trace, bound: float
    ) -> Found | None:
        """Difference between a variant and one process that has loaded its checkpoint, if any. On rank 0."""
        reference = self.runs.reference(key)
        continued = self.runs.restored_alone(variant, key)
        restored = continued.restored
        assert restored is not None and variant.resumes_after is not None
        saved = reference.saved
        if not guarantee.is_exact:
            saved = trace.saved  # that of every rank where a strategy has no replicas, which is not that of one process
            if variant.strategy in GUARANTEES and saved is not None:
                saved = with_norms_of(restored, saved, guarantee.mean(trace, variant.job.config, variant.resumes_after))
        broken = next(restored_differences(saved, restored, reference.names, bound), None)
        if broken is not None:
            finding = from_traces(reference, trace, broken, self._layout(variant))
            assert finding is not None
            why = finding.why.replace("on another number of workers", "on one worker")
            return broken, dataclasses.replace(finding, why=why)
        if not continued.steps:
            why = "one process that continues from this checkpoint treats it as the end of the training"
            return Divergence(restored.step + 1, "rows", math.inf), Finding(Cause.DATA_ORDER, why)
        return self._goes_on_wrongly(reference, continued, guarantee, bound)

    def _goes_on_wrongly(self, reference: Trace, continued: Trace, guarantee: Guarantee, bound: float) -> Found | None:
        """Difference in the first step that one process takes from a variant's checkpoint."""
        step = continued.steps[0].step
        due, found = (
            dataclasses.replace(t, steps=(t.step(step),), final={}, exported={}, evaluations={}, restored=None)
            for t in (reference, continued)
        )
        found = dataclasses.replace(found, initial=due.initial, quieted=due.quieted)
        kept = ("rows", "count", "learning rate")  # replicas' mean is not the model of one process
        broken = next((d for d in divergences(due, found, bound) if guarantee.is_exact or d.quantity in kept), None)
        if broken is None:
            return None
        finding = from_traces(due, found, broken, Layout(1, 1)) if broken.quantity in kept else None
        why = f"one process that continues from this checkpoint has a different {broken.quantity} in its first step"
        if finding is not None:
            why = f"{why}: {finding.why}"
        return broken, Finding(Cause.RESUME if finding is None else finding.cause, why, broken.parameter)

    def _in_own_precision(self, variant: Variant, outcome: Outcome) -> Outcome:
        """The outcome with the difference in the run's own precision, and the verdict on it."""
        if variant.own is None or variant.own.config.precision.dtype == variant.job.config.precision.dtype:
            return outcome
        key = dataclasses.replace(self._key(variant), own=OWN)
        trace = self.runs.standing_still(variant, key)

        def judge() -> tuple[Comparison, Excess | None]:
            exact, reference = (self.runs.reference(dataclasses.replace(key, own=own)) for own in (EXACT, OWN))
            return compare(reference, trace, bound=math.inf), excess(exact, reference, trace, rounding_of(variant))

        comparison, found = on_first(self.place, judge)
        outcome = dataclasses.replace(outcome, own=comparison)
        if found is None or outcome.mismatch is not None:
            return outcome
        return self._with(outcome, (found.divergence, beyond_rounding(found, variant)))

    def _layout(self, variant: Variant) -> Layout:
        is_right = any(
            o.verdict == "equal" and o.accumulation == 1
            for o in self.outcomes
            if (o.strategy, o.layout) == (variant.strategy, variant.outcome.layout)
        )
        return Layout(
            variant.world_size,
            variant.accumulation,
            is_right_without_accumulation=is_right,
            draws_by_itself=variant.own is not None and variant.own.config.has_stages,
        )

    def _with(self, outcome: Outcome, found: Found | None) -> Outcome:
        return (
            outcome if found is None else dataclasses.replace(outcome, verdict="differs", mismatch=mismatch_of(*found))
        )
