"""Is a strategy still the same training? Runs it through the real loop, beside one process, and judges the difference.

Works in any group of workers: under Ray Train, in plain gloo processes, or alone. Rank 0 compares and decides; every
rank then runs what was decided. The loop, the step and the strategies do not know that they are watched.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from scaleray.config import RunConfig
from scaleray.errors import InitialisationError, NonFiniteLossError, UsageError
from scaleray.reproducibility.causes import (
    EVALUATION_MODE,
    NO_CLIPPING,
    Cause,
    Finding,
    Layout,
    from_experiment,
    from_shares,
    from_traces,
    needs_experiments,
    without_experiment,
)
from scaleray.reproducibility.equivalence import Comparison, Divergence, Trace, compare, divergences
from scaleray.reproducibility.seeding import same_switches
from scaleray.training import loop
from scaleray.training.job import TRAIN, OpenStream, TrainJob
from scaleray.training.place import Place
from scaleray.training.trace import NOTHING, Quieted, TraceProbe

Result = TypeVar("Result")


@dataclass(frozen=True)
class Promise:
    """What a strategy promises about the training of one process."""

    is_exact: bool = True
    keeps: frozenset[str] = frozenset()
    """Of a strategy that is not exact: quantities of a Divergence that must be equal all the same."""
    words: str = "equal to one process"
    exact_steps: Callable[[RunConfig], int] | None = None
    """So many first steps are equal in everything, and the loss of the next one too, as it starts from the same parameters."""
    agrees_after: Callable[[RunConfig, int], bool] = lambda config, step: False
    """Whether all ranks hold the same parameters after this step."""

    def is_kept_by(self, divergence: Divergence, config: RunConfig) -> bool:
        """Whether the quantity may differ from one process in this step."""
        first = self.exact_steps(config) if self.exact_steps is not None else -1
        must_be_equal = divergence.quantity in self.keeps or divergence.step <= first
        return not (must_be_equal or (divergence.step == first + 1 and divergence.quantity == "loss"))

    def disagreement(self, trace: Trace, config: RunConfig, bound: float) -> Divergence | None:
        """The first step after which ranks should hold the same parameters and do not."""
        for step in trace.steps:
            spread = float(step.parameter_spread.max(initial=0.0))
            if self.agrees_after(config, step.step) and not spread <= bound:
                name = trace.names[int(np.nanargmax(step.parameter_spread))]
                return Divergence(step.step, "parameters", spread, name)
        return None


def _averages_after(config: RunConfig, step: int) -> bool:
    since = step - config.local_sgd.warmup_steps
    return since <= 0 or since % config.local_sgd.sync_every == 0


_SAME_COURSE = frozenset({"model", "dtype", "initial parameters", "rows", "count", "learning rate", "steps"})
PROMISES = {
    "local_sgd": Promise(
        False, _SAME_COURSE, "replicas train apart between averagings: same start, rows and learning rates",
        lambda config: config.local_sgd.warmup_steps, _averages_after,
    ),
    "diloco": Promise(
        False, _SAME_COURSE, "replicas train apart between outer steps: same start, rows and learning rates",
        lambda config: config.local_sgd.warmup_steps, _averages_after,
    ),
    "gossip": Promise(
        False, _SAME_COURSE, "replicas agree only in the limit: same start, rows and learning rates", lambda config: 0
    ),
    "async_sgd": Promise(
        False, _SAME_COURSE, "updates are late by a bounded number of steps: same start, rows and learning rates",
        lambda config: 0, lambda config, step: step % config.gossip.meet_every == 0,
    ),
    "compression": Promise(False, _SAME_COURSE, "gradients are approximated: same start, rows and learning rates"),
}  # fmt: skip
"""Strategies that do not promise equality. Every other one does."""


@dataclass(frozen=True)
class Variant:
    """One way to run the training. job: in the precision of the check; own: in the run's own."""

    strategy: str
    world_size: int
    accumulation: int
    job: TrainJob
    own: TrainJob | None = None

    @property
    def label(self) -> str:
        """`ddp x 2`, and how often it accumulates where it does."""
        more = f", {self.accumulation} micro-batches" if self.accumulation > 1 else ""
        return f"{self.strategy} x {self.world_size}{more}"


@dataclass(frozen=True)
class Mismatch:
    """Where a variant left the reference, and of which class that is."""

    step: int
    quantity: str
    parameter: str | None
    difference: float
    cause: str
    why: str


@dataclass(frozen=True)
class Outcome:
    """What came of one variant. verdict: equal, as promised, differs, or refused."""

    strategy: str
    world_size: int
    accumulation: int
    verdict: str
    words: str = ""
    """What was judged, where it is less than the whole; the reason of a refusal."""
    comparison: Comparison = field(default_factory=Comparison)
    own: Comparison | None = None
    """In the run's own precision with the model as it is, for information."""
    mismatch: Mismatch | None = None
    duration_s: float = 0.0


@dataclass(frozen=True)
class Assignment:
    """What a group of workers verifies. reference: one process, one micro-batch."""

    reference: Variant
    variants: tuple[Variant, ...]
    bound: float


References = dict[str, Trace]
"""Traces of the reference by what was taken out of it, kept from group to group."""


def verify_group(
    place: Place, assignment: Assignment, references: References, *, open_stream: OpenStream
) -> tuple[list[Outcome], References]:
    """Judge every variant. Collective over the place's group. The references found are added to those given (rank 0).

    Raises UsageError when the reference itself cannot run.
    """
    return _Group(place, assignment, references, open_stream).run()


class _Group:
    def __init__(self, place: Place, assignment: Assignment, references: References, open_stream: OpenStream) -> None:
        self.place, self.assignment, self.open_stream = place, assignment, open_stream
        self.references = dict(references)

    def run(self) -> tuple[list[Outcome], References]:
        self.quiet = self._on_first(self._choose_quiet)
        self.outcomes: list[Outcome] = []
        for variant in self.assignment.variants:
            self.outcomes.append(self._outcome(variant))
        return self.outcomes, self.references

    def _choose_quiet(self) -> str:
        """What to switch off so that one process can be repeated by several; the reference runs on the way."""
        trace = self._reference(Quieted.MODULES)
        if not any(step.draws_random_numbers for step in trace.steps):
            return Quieted.MODULES
        everything = self._reference(Quieted.EVERYTHING)
        still_draws = any(step.draws_random_numbers for step in everything.steps)
        return Quieted.MODULES if still_draws else Quieted.EVERYTHING

    def _outcome(self, variant: Variant) -> Outcome:
        started = time.perf_counter()
        outcome = Outcome(variant.strategy, variant.world_size, variant.accumulation, "equal")
        probe = TraceProbe(self.place, variant.job)
        try:
            trace = self._trace(variant.job, quiet=self.quiet, probe=probe)
        except (UsageError, InitialisationError, NonFiniteLossError) as exc:  # raised on every rank
            if isinstance(exc, UsageError) and not probe.has_begun:  # the strategy does not take this workload
                return dataclasses.replace(outcome, verdict="refused", words=" ".join(str(exc).split()))
            cause = Cause.INITIAL_PARAMETERS if isinstance(exc, InitialisationError) else Cause.FAILED
            mismatch = Mismatch(0, "run", None, math.inf, cause, " ".join(str(exc).split()))
            return dataclasses.replace(outcome, verdict="differs", mismatch=mismatch)
        judge = self._judge_exact if _promise(variant).is_exact else self._judge_promise
        outcome = judge(variant, outcome, trace)
        own = self._own(variant)
        return dataclasses.replace(outcome, own=own, duration_s=time.perf_counter() - started)

    def _judge_exact(self, variant: Variant, outcome: Outcome, trace: Trace) -> Outcome:
        bound = self.assignment.bound
        comparison = self._on_first(lambda: compare(self._reference(self.quiet), trace, bound=bound))
        outcome = dataclasses.replace(outcome, comparison=comparison, words=_judged(trace, self.quiet))
        if comparison.divergence is not None:
            finding = self._explain(variant, trace, comparison.divergence)
            return dataclasses.replace(outcome, verdict="differs", mismatch=_mismatch(comparison.divergence, finding))
        shared = next((s.step for s in trace.steps if s.shares_random_state), None)
        if shared is not None and trace.quieted and "BatchNorm" not in trace.quieted[:1]:
            mismatch = Mismatch(
                shared,
                "random state",
                None,
                math.inf,
                Cause.RANDOMNESS,
                "ranks share one state of the random generators, so that dropout would drop the same units on each",
            )
            return dataclasses.replace(outcome, verdict="differs", mismatch=mismatch)
        return outcome

    def _judge_promise(self, variant: Variant, outcome: Outcome, trace: Trace) -> Outcome:
        promise = _promise(variant)

        def first_broken() -> tuple[Comparison, Divergence | None, Finding | None]:
            reference = self._reference(self.quiet)
            found = divergences(reference, trace, self.assignment.bound)
            config = variant.job.config
            broken = next((d for d in found if not promise.is_kept_by(d, config)), None)
            broken = broken or promise.disagreement(trace, config, self.assignment.bound)
            finding = from_traces(reference, trace, broken, self._layout(variant)) if broken else None
            return compare(reference, trace, bound=self.assignment.bound), broken, finding

        comparison, broken, finding = self._on_first(first_broken)
        outcome = dataclasses.replace(outcome, verdict="as promised", comparison=comparison, words=promise.words)
        if broken is None:
            return outcome
        finding = finding or Finding(Cause.UNKNOWN, f"the {broken.quantity} should be equal even so")
        return dataclasses.replace(outcome, verdict="differs", mismatch=_mismatch(broken, finding))

    def _explain(self, variant: Variant, trace: Trace, divergence: Divergence) -> Finding:
        """The class of a mismatch: from the traces, from runs with something taken out, or from the gradient's parts."""
        layout = self._layout(variant)
        finding: Finding | None = self._on_first(
            lambda: from_traces(self._reference(self.quiet), trace, divergence, layout)
        )
        if finding is not None:
            return finding
        for name in self._on_first(lambda: needs_experiments(self._reference(self.quiet), trace)):
            if self._agrees_without(name, variant):
                return self._on_first(partial(self._finding_without, name, trace))
        shares = self._shares(variant, divergence.step)
        finding = from_shares(*shares, layout) if shares is not None else None
        return finding or self._on_first(
            lambda: (
                without_experiment(self._reference(self.quiet), trace)
                or Finding(Cause.UNKNOWN, "none of the known classes fits")
            )
        )

    def _layout(self, variant: Variant) -> Layout:
        is_right = any(
            o.verdict == "equal" and o.accumulation == 1 for o in self.outcomes if o.strategy == variant.strategy
        )
        return Layout(variant.world_size, variant.accumulation, is_right_without_accumulation=is_right)

    def _agrees_without(self, experiment: str, variant: Variant) -> bool:
        """Whether variant and reference agree once `experiment` is taken out of both."""
        key, quiet, job = experiment, self.quiet, _without_clipping(variant.job)
        if experiment == EVALUATION_MODE:
            key = quiet = Quieted.EVERYTHING
            job = variant.job
        trace = self._trace(job, quiet=quiet)
        return self._on_first(lambda: compare(self._reference(key), trace, bound=self.assignment.bound).is_equal)

    def _finding_without(self, experiment: str, trace: Trace) -> Finding:
        return from_experiment(experiment, self._reference(self.quiet), trace)

    def _shares(self, variant: Variant, step: int) -> tuple[np.ndarray, np.ndarray] | None:
        quieted = dataclasses.replace(variant.job, workload=Quieted(variant.job.workload, self.quiet))
        probe = TraceProbe(self.place, quieted, take_apart_at=step)
        self._trace(variant.job, quiet=self.quiet, probe=probe)
        return probe.shares

    def _own(self, variant: Variant) -> Comparison | None:
        """The distance in the run's own precision, with the model as it is."""
        if variant.own is None:
            return None
        try:
            trace = self._trace(variant.own, quiet=NOTHING)
        except (UsageError, NonFiniteLossError):
            return None
        return self._on_first(lambda: compare(self._reference(NOTHING), trace, bound=math.inf))

    def _reference(self, key: str) -> Trace:
        """One process with `key` taken out. Only on rank 0, which runs it alone if nobody has yet."""
        if key not in self.references:
            variant = self.assignment.reference
            job = variant.own or variant.job if key == NOTHING else variant.job
            if key == NO_CLIPPING:
                job = _without_clipping(job)
            quiet = self.quiet if key == NO_CLIPPING else key
            self.references[key] = self._trace(job, quiet=quiet, place=Place(device=self.place.device))
        return self.references[key]

    def _trace(
        self, job: TrainJob, *, quiet: str, place: Place | None = None, probe: TraceProbe | None = None
    ) -> Trace:
        """Run a job through the loop; the traces of all ranks are the same."""
        place = place or self.place
        workload = Quieted(job.workload, quiet)
        probe = probe or TraceProbe(place, job)
        with same_switches():
            loop.run(
                dataclasses.replace(job, workload=workload), place, open_stream=self.open_stream,
                emit=lambda message: None, probe=probe,
            )  # fmt: skip
        return probe.trace(loss_dtype=workload.loss_dtype, quieted=tuple(workload.found))

    def _on_first(self, decide: Callable[[], Result]) -> Result:
        """What rank 0 decides, on every rank. Collective."""
        if self.place.world_size == 1:
            return decide()
        answer: list[Any] = [None, None]
        if self.place.rank == 0:
            try:
                answer[0] = decide()
            except Exception as exc:  # the others would wait for it
                answer[1] = exc
        dist.broadcast_object_list(answer, src=0, device=torch.device("cpu"))
        if answer[1] is not None:
            raise answer[1]
        return answer[0]


def short_job(job: TrainJob, *, steps: int, precision: str | None = None) -> TrainJob:
    """The first steps of a training, as they are in its full length: neither evaluations nor files."""
    config = job.config
    updates: dict[str, Any] = {
        "stop": config.stop.model_copy(update={"at": None}),
        "evaluation": config.evaluation.model_copy(update={"every": None}),
        "checkpoint": config.checkpoint.model_copy(
            update={"save_final": False, "every": None, "every_minutes": None, "keep_every": None}
        ),
        "tracking": config.tracking.model_copy(update={"system_metrics": False, "every_steps": 1}),
    }
    if precision is not None:
        # float8 is seen in the run's own precision, as bf16 is
        updates["precision"] = config.precision.model_copy(
            update={"dtype": precision, "float8": "none", "float8_leave_out": (), "emulate_float8": False}
        )
    recipe = dataclasses.replace(
        job.recipe, total_steps=min(steps, job.recipe.total_steps), evaluate_every_steps=None,
        checkpoint_every_steps=None, keep_checkpoint_every_steps=None,
    )  # fmt: skip
    splits = {TRAIN: job.splits[TRAIN]}
    return dataclasses.replace(job, config=config.model_copy(update=updates), recipe=recipe, splits=splits)


def _promise(variant: Variant) -> Promise:
    if variant.strategy not in PROMISES and variant.job.config.compression.name != "none" and variant.world_size > 1:
        return PROMISES["compression"]
    return PROMISES.get(variant.strategy, Promise())


def _mismatch(divergence: Divergence, finding: Finding) -> Mismatch:
    return Mismatch(
        divergence.step, divergence.quantity, finding.parameter or divergence.parameter, divergence.difference,
        str(finding.cause), finding.why,
    )  # fmt: skip


def _judged(trace: Trace, quiet: str) -> str:
    """What had to be taken out for a comparison, and why."""
    if quiet == Quieted.EVERYTHING:
        return "in evaluation mode: training draws random numbers, on every rank others by design"
    words = {
        "dropout": "dropout off: masks differ from rank to rank by design",
        "BatchNorm": "BatchNorm frozen: its statistics are those of each micro-batch by design",
    }
    return "; ".join(words[name] for name in trace.quieted)


def _without_clipping(job: TrainJob) -> TrainJob:
    optimizer = job.config.optimizer.model_copy(update={"clip_norm": None})
    return dataclasses.replace(job, config=job.config.model_copy(update={"optimizer": optimizer}))
