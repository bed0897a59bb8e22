"""Check whether a resumed run equals the uninterrupted one. Both run on the same group of workers and must agree to the
bit.

If they differ, the state at the interruption shows the cause: the resumed run's state after loading is compared item by
item with the uninterrupted run's state after the same step.
"""

import contextlib
import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scaleray.checkpoints.catalog import Catalog
from scaleray.common.seeding import seed_everything
from scaleray.data import Sources
from scaleray.errors import WorkloadError
from scaleray.records.certificate import ResumeOutcome
from scaleray.training import loop
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.state.checkpointing import Checkpointing
from scaleray.training.state.items import IN_WORDS, ITEMS
from scaleray.training.state.training_state import TrainState
from scaleray.verification.runs.rank0_decisions import Failures
from scaleray.verification.runs.trace_probe import TraceProbe
from scaleray.verification.traces.compare_traces import compare
from scaleray.verification.traces.run_trace import Trace
from scaleray.verification.variants import UNSAVED

DATA_POSITION = "data position"


@dataclass(frozen=True)
class Interruption:
    """One interruption to test: the job, its number of steps, and the step after which it is interrupted."""

    label: str
    job: TrainJob
    world_size: int
    interrupt_at: int
    folder: str
    """Folder of the checkpoint, visible to all workers."""


def verify_resume(place: RankContext, interruption: Interruption, *, sources: Sources) -> ResumeOutcome:
    """Run the training without interruption, then interrupt and resume it. Collective over the place's group."""
    started = time.perf_counter()
    at = interruption.interrupt_at
    nothing = Catalog.of_run(f"{interruption.folder}/none")
    catalog = Catalog.of_run(interruption.folder)
    # replicas that train apart meet where a checkpoint is due, and it is saved there alone
    recipe, values = interruption.job.recipe, {"checkpoint_every_steps": at}

    def run(catalog: Catalog, **options: Any) -> tuple[Trace, _Observed]:
        # a copy: a workload may keep state of its own, which must not pass from run to run but by the checkpoint
        job = interruption.job.changed(values=values, workload=copy.deepcopy(interruption.job.workload))
        probe = TraceProbe(place, job)
        observed = _Observed(job, place, catalog, emit=lambda message: None, **options)
        # what came before must not help: a new process starts with whatever state its generators have
        seed_everything(at + place.rank)
        with contextlib.suppress(_Interrupted):
            loop.run(job, place, sources=sources, emit=lambda message: None, probe=probe, checkpointing=observed)
        probe.let_go()
        return probe.trace(), observed

    steps, failures = recipe.total_steps, Failures(place, interruption.folder)
    try:
        whole, before = run(nothing, observe_at=at)
    except WorkloadError as exc:
        if recipe.strategy == "single" or exc.what.startswith(UNSAVED) or not failures.is_shared():
            raise
        return ResumeOutcome(interruption.label, interruption.world_size, at, steps, False, [], not_run=str(exc))
    first, _ = run(catalog, interrupt_at=at)
    rest, after = run(catalog)
    differing = _anywhere(place, [item for item in ITEMS if before.digests.get(item) != after.restored.get(item)])
    comparison = compare(whole, first.continued_by(rest), bound=0.0)
    guilty = [IN_WORDS[item] for item in differing]
    if (
        comparison.divergence is not None and comparison.divergence.quantity in ("rows", "steps")
    ) or not after.restored:
        guilty.insert(0, DATA_POSITION)
    end = _anywhere(place, [item for item in ITEMS if before.final.get(item) != after.final.get(item)])
    is_equal = comparison.is_equal and not guilty and not end
    if not is_equal and not guilty:
        guilty = [f"{IN_WORDS[item]} (only at the end: something outside the state)" for item in end] or ["unknown"]
    return ResumeOutcome(
        interruption.label,
        interruption.world_size,
        at,
        steps,
        is_equal,
        guilty,
        comparison,
        time.perf_counter() - started,
    )


class _Interrupted(BaseException):
    """Exception that ends a run like a kill, since no code catches it."""


class _Observed(Checkpointing):
    """Checkpoints that also record the state after `observe_at` steps, after loading, and at the end."""

    def __init__(
        self, *args: Any, observe_at: int | None = None, interrupt_at: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.observe_at, self.interrupt_at = observe_at, interrupt_at
        self.digests: Mapping[str, str] = {}
        self.restored: Mapping[str, str] = {}
        self.final: Mapping[str, str] = {}

    def begin(self, state: TrainState) -> None:
        super().begin(state)
        if self.resumed_from is not None:
            self.restored = self._digests()

    def after_step(self, step: int, signals: tuple[float, ...]) -> bool:
        if step == self.observe_at:
            self.digests = self._digests()
        if step == self.interrupt_at:
            self.save(step)
            self.saver.wait()
            raise _Interrupted
        return False

    def finish(self, step: int) -> None:
        self.final = self._digests()

    def _digests(self) -> Mapping[str, str]:
        assert self.state is not None
        self.state.setup.parallel.before_evaluation()  # as a checkpoint does: buffers follow rank 0
        return self.state.digests()


def _anywhere(place: RankContext, mine: list[str]) -> list[str]:
    """Items that differ on any rank, in their usual order."""
    everyone = place.gathered(mine)
    return [item for item in ITEMS if any(item in theirs for theirs in everyone)]


def interruption_job(job: TrainJob) -> TrainJob:
    """Make a short job with deterministic algorithms, which bit-identical results require."""
    return job.changed({"deterministic": True})
