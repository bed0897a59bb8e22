"""Runs that `verify` compares: through the real loop, as one process or as a group, uninterrupted or resumed midway.

The loop, the step and the strategies are unaware of being compared."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from scaleray.checkpoints.catalog import Catalog
from scaleray.checkpoints.storage import Store
from scaleray.common.seeding import same_switches
from scaleray.data import TRAIN, Sources, Split
from scaleray.records.certificate import Outcome
from scaleray.training import loop
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.model_setup import Setup, meshes_kept
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.state.checkpointing import Checkpointing
from scaleray.training.state.items import PROGRESS
from scaleray.training.state.training_state import TrainState
from scaleray.verification.causes.cause_experiments import NO_CLIPPING
from scaleray.verification.repeatable.repeatable_workload import Masks, Partition, Quieted
from scaleray.verification.runs.compared_job import (
    OWN_STEPS,
    DueRates,
    first_part,
    later_part,
    position_after,
    steps_before_resume,
    steps_gone_on,
)
from scaleray.verification.runs.trace_probe import TraceProbe
from scaleray.verification.traces.run_trace import Trace

EXACT, OWN = "own steps in float64", "own steps"
"""Values of `Key.own` for single steps of one process, in the precision of the check and in the run's own."""


@dataclass(frozen=True)
class Variant:
    """One way to run the training. job: in the precision of the check; own: in the run's own precision.

    later: job of the second half of the steps, which resumes from one process; None: no resume. with_statistics:
    training data for a model with statistics over a worker's rows."""

    strategy: str
    world_size: int
    accumulation: int
    job: TrainJob
    own: TrainJob | None = None
    later: TrainJob | None = None
    with_statistics: Split | None = None

    @property
    def outcome(self) -> Outcome:
        """The variant's outcome, still without its verdict."""
        axes = [axis for axis, degree in dataclasses.asdict(self.job.degrees).items() if degree > 1]
        layout = self.job.degrees.text() if len(axes) > 1 or axes == ["context"] else ""
        return Outcome(self.strategy, self.world_size, self.accumulation, "equal", layout=layout)

    @property
    def label(self) -> str:
        """Name of the variant, as in its outcome."""
        return self.outcome.label

    @property
    def resumes_after(self) -> int | None:
        """Number of steps before the resume; None without one."""
        return (steps_before_resume(self.job.recipe.total_steps) or None) if self.later is not None else None

    def mapped(self, change: Callable[[TrainJob], TrainJob]) -> Variant:
        """The variant with every job changed by `change`."""
        own, later = (change(job) if job is not None else None for job in (self.own, self.later))
        return dataclasses.replace(self, job=change(self.job), own=own, later=later)

    def on_rows_with_statistics(self) -> Variant:
        """The variant on enough rows for a model with statistics over a worker's rows."""
        split = self.with_statistics
        if split is None:
            return self
        return self.mapped(lambda job: job.changed(splits={**job.splits, TRAIN: split}))


def partition_of(job: TrainJob) -> Partition:
    """The partition by which the job's workers divide a batch."""
    return Partition(job.data_parallel_size, job.recipe.micro_batch_size, job.recipe.worker_shares)


@dataclass(frozen=True)
class Key:
    """Key of a reference. quiet: parts removed from the model; has_statistics: whether it runs on enough rows for
    statistics over a worker's rows; partition, later_partition: how workers divide its batches before and after the
    resume, if each part has its own statistics; leaves_out: NO_CLIPPING; own: EXACT or OWN, if its parameters never
    change."""

    quiet: str
    has_statistics: bool = False
    partition: Partition | None = None
    later_partition: Partition | None = None
    leaves_out: str = ""
    own: str = ""

    @property
    def folder(self) -> str:
        """Folder of the reference's checkpoints, with a unique name."""
        rows = "-statistics" if self.has_statistics else ""
        cuts = "".join(f"-{p.name}" for p in (self.partition, self.later_partition) if p is not None)
        return f"reference-{self.quiet}{rows}{cuts}{'-unclipped' if self.leaves_out else ''}"


References = dict[Key, Trace]
"""Traces of the references, for use by later groups too."""


@dataclass(frozen=True)
class Watched:
    """Result of a run: its trace, and the probes of all its parts. uninterrupted: trace of the steps before the resume
    and of some that follow without it."""

    trace: Trace
    probes: tuple[TraceProbe, ...]
    uninterrupted: Trace | None = None

    @property
    def values(self) -> dict[int, list[dict[str, torch.Tensor]]]:
        """Parameters and buffers of every rank after the requested steps; on rank 0."""
        return {step: values for probe in self.probes for step, values in probe.values.items()}


class Runs:
    """Runs of one group of workers. folder: for checkpoints, visible to all. reference: the run of one process."""

    def __init__(
        self, place: RankContext, reference: Variant, references: References, sources: Sources, folder: str
    ) -> None:
        self.place, self.variant, self.sources, self.folder = place, reference, sources, folder
        self.references = dict(references)
        self.resumes = True
        """Whether runs resume midway; False for a training whose state cannot be saved."""

    @contextlib.contextmanager
    def same_groups(self) -> Iterator[None]:
        """Context in which trainings of one layout share process groups. Collective."""
        before = list(_world.pg_map)
        with meshes_kept() as self.leave_groups:
            yield
        if self.place.world_size > 1:
            _end_groups_but(before)

    def resumes_after(self, variant: Variant) -> int | None:
        """Number of steps before the resume; None without one."""
        return variant.resumes_after if self.resumes else None

    def reference(self, key: Key) -> Trace:
        """Trace of one process; on rank 0, which runs it alone unless it has run already and the others can read its
        checkpoint."""
        if key not in self.references:
            alone = RankContext(device=self.place.device)
            variant = self.variant
            if key.own:
                self.references[key] = self._standing_still(variant, alone, key, in_float64=key.own == EXACT).trace
            else:
                self.references[key] = self.compared(variant, key, place=alone, saves=True).trace
        return self.references[key]

    def again(self, key: Key, *, watched_by: type[TraceProbe] = TraceProbe) -> Trace:
        """Run the reference again. On rank 0."""
        return self.compared(
            self.variant, key, place=RankContext(device=self.place.device), watched_by=watched_by
        ).trace

    def compared(
        self,
        variant: Variant,
        key: Key,
        *,
        place: RankContext | None = None,
        take_apart_at: int | None = None,
        keeps: bool = False,
        saves: bool = False,
        only_its_part: bool = False,
        watched_by: type[TraceProbe] = TraceProbe,
        began: Callable[[TraceProbe], None] = lambda probe: None,
    ) -> Watched:
        """Run the compared steps, uninterrupted or resumed midway from the state of one process.

        saves: leave the checkpoint at the interruption. only_its_part: run only the part with the decomposed step.
        watched_by: class of the probes; began: receives each probe before its run."""
        is_reference, place = place is not None, place or self.place
        variant = self._changed(variant, key)
        half, job, total = self.resumes_after(variant), variant.job, variant.job.recipe.total_steps
        masks = self._masks(key, job) if not is_reference else None

        def run(
            job: TrainJob, due: DueRates, catalog: str | None, *, last: int, **options: Any
        ) -> tuple[Trace, TraceProbe]:
            partition = key.later_partition if due.first else key.partition
            workload = self._workload(job.workload, key.quiet, partition, masks, is_reference=is_reference)
            job = job.changed(workload=workload)
            probe = watched_by(place, job, masks=masks, due=due, take_apart_at=take_apart_at, last=last, **options)
            began(probe)
            return self._run(job, place, probe, folder=catalog, hands_on=last == total), probe

        if half is None or variant.later is None:
            trace, probe = run(job, DueRates(job), None, last=total, keeps=(total,) if keeps else ())
            return Watched(trace, (probe,))
        own_folder = self._folder(key.folder if is_reference else _name(variant)) if saves else None
        later, due = _resumed(variant, half, last=total)
        options: dict[str, Any] = {"keeps": (half, total) if keeps else ()}
        parts: list[tuple[Trace, TraceProbe]] = []
        uninterrupted = None
        if not only_its_part or (take_apart_at or 0) <= half:
            goes_on_for = steps_gone_on(half) if saves and not is_reference else 0
            first = first_part(job, half, goes_on_for=goes_on_for)
            uninterrupted, probe = run(first, DueRates(job), own_folder, last=half, **options)
            parts.append((uninterrupted.between(0, half), probe))
        if not only_its_part or (take_apart_at or 0) > half:
            parts.append(run(later, due, self._folder(key.folder), last=total, **options))
        traces = [trace for trace, _ in parts]
        whole = traces[0].continued_by(traces[1]) if len(traces) > 1 else traces[0]
        return Watched(whole, tuple(probe for _, probe in parts), uninterrupted)

    def standing_still(self, variant: Variant, key: Key) -> Trace:
        """Trace of a few steps in the run's own precision, which all start from the initial parameters. Collective."""
        return self._standing_still(variant, self.place, key, in_float64=False).trace

    def restored_alone(self, variant: Variant, key: Key) -> Trace:
        """Trace of one process that loads a variant's checkpoint and takes the next step. On rank 0."""
        reference = self._changed(self.variant, key)
        half = reference.resumes_after
        assert half is not None
        job, due = _resumed(reference, half, last=half + 1)
        workload = self._workload(job.workload, key.quiet, key.later_partition, None, is_reference=True)
        job = job.changed(splits={TRAIN: job.splits[TRAIN]}, workload=workload)
        alone = RankContext(device=self.place.device)
        probe = TraceProbe(alone, job, due=due, last=half + 1)
        return self._run(job, alone, probe, folder=self._folder(_name(variant)))

    def resumed_here(self, variant: Variant, key: Key) -> Trace:
        """Trace of some steps of a variant that loads its own checkpoint on the same number of workers. Collective."""
        variant = self._changed(variant, key)
        half, masks = variant.resumes_after, self._masks(key, variant.job)
        assert half is not None
        job = first_part(variant.job, half, goes_on_for=steps_gone_on(half))
        workload = self._workload(job.workload, key.quiet, key.partition, masks, is_reference=False)
        job = job.changed(workload=workload)
        probe = TraceProbe(self.place, job, masks=masks, due=DueRates(job, half, half))
        return self._run(job, self.place, probe, folder=self._folder(_name(variant)))

    def measured_alone(self, values: dict[str, torch.Tensor], key: Key) -> dict[str, float]:
        """Metrics that one process measures for a model with these values. On rank 0."""
        job, alone = self._changed(self.variant, key).job, RankContext(device=self.place.device)
        workload = self._workload(job.workload, key.quiet, key.partition, None, is_reference=True)
        job = job.changed(values={"total_steps": 0}, workload=workload)
        probe = _Given(alone, job, values)
        return dict(self._run(job, alone, probe, folder=None).evaluations.get(0, {}))

    def forget(self, variant: Variant) -> None:
        """Delete a variant's checkpoint. On rank 0."""
        with contextlib.suppress(OSError):  # a folder that stays does no harm
            Store(self.folder).delete_folder(_name(variant))

    def _changed(self, variant: Variant, key: Key) -> Variant:
        if key.leaves_out == NO_CLIPPING:
            variant = variant.mapped(_without_clipping)
        return variant.on_rows_with_statistics() if key.has_statistics else variant

    def _standing_still(self, variant: Variant, place: RankContext, key: Key, *, in_float64: bool) -> Watched:
        variant = self._changed(variant, key)
        job = variant.job if in_float64 else variant.own or variant.job
        steps = min(OWN_STEPS, job.recipe.total_steps)
        is_alone = place.world_size == 1
        workload = self._workload(job.workload, key.quiet, key.partition, None, is_reference=is_alone)
        splits = {TRAIN: job.splits[TRAIN]}
        job = job.changed(values={"total_steps": steps}, splits=splits, workload=workload)
        probe = TraceProbe(place, job, stands_still=True)
        return Watched(self._run(job, place, probe, folder=None), (probe,))

    def _workload(
        self, workload: Any, quiet: str, partition: Partition | None, masks: Masks | None, *, is_reference: bool
    ) -> Quieted:
        quieted = Quieted(workload, quiet, masks=masks, partition=partition)
        return quieted if is_reference or partition is None else quieted.with_statistics

    def _masks(self, key: Key, job: TrainJob) -> Masks | None:
        # compiled code draws by itself, if at all
        if key.quiet == Quieted.NOTHING or job.config.compilation.what != "nothing":
            return None
        return Masks(self.place.device, by_step=key.quiet == Quieted.EVERYTHING)

    def _folder(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def _run(
        self, job: TrainJob, place: RankContext, probe: TraceProbe, *, folder: str | None, hands_on: bool = False
    ) -> Trace:
        """Run a job. hands_on: whether to export its final weights, as at the end of a training."""
        options = dict[str, Any]()
        if hands_on:
            job = job.changed({"checkpoint.save_final": True})
            options["save_weights"] = probe.take_weights
        if folder is not None:
            options["checkpointing"] = _Watched(probe, job, place, Catalog.of_run(folder), emit=lambda message: None)
        try:
            with same_switches():
                loop.run(job, place, sources=self.sources, emit=probe.on_message, probe=probe, **options)
            if hands_on:
                probe.gather_weights()
        finally:
            probe.let_go()
        return probe.trace(loss_dtype=job.workload.loss_dtype, quieted=tuple(job.workload.found))


def _end_groups_but(kept: Collection[dist.ProcessGroup]) -> None:
    """Destroy the process groups that trainings have created. Collective. Each has threads and open files, of which a
    process may have 1024 by default, enough for twenty layouts of 8 workers."""
    dist.barrier()  # a rank that is behind still receives over them
    for group in [group for group in _world.pg_map if group not in kept]:
        dist.destroy_process_group(group)


class _Watched(Checkpointing):
    """Checkpoints of a run whose probe records the state in the only checkpoint, and the run's initial state."""

    def __init__(self, probe: TraceProbe, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.probe = probe

    def begin(self, state: TrainState) -> None:
        super().begin(state)
        if self.resumed_from is not None:
            state.setup.parallel.before_evaluation()  # as a checkpoint does: buffers follow rank 0
            self.probe.restored_items = state.digests()

    def save(self, step: int) -> None:
        if self.probe.has_saved or self.resumed_from is not None:
            return
        super().save(step)
        assert self.state is not None
        self.probe.on_saved(step, self.state.digests())

    def finish(self, step: int) -> None:
        state = self.state
        super().finish(step)
        if state is not None and self.saver.last_saved == step:
            self.probe.on_restated(state.digests()[PROGRESS])


class _Given(TraceProbe):
    """Probe that sets the model's values before the run."""

    def __init__(self, place: RankContext, job: TrainJob, values: dict[str, torch.Tensor]) -> None:
        super().__init__(place, job)
        self.given = values

    def on_setup(self, setup: Setup) -> None:
        module = setup.parallel.module
        with torch.no_grad():
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                tensor.copy_(self.given[name])
        super().on_setup(setup)


@contextlib.contextmanager
def shared_folder(place: RankContext, given: str | None) -> Iterator[str]:
    """A folder for checkpoints that is visible to every worker: the given one, or a temporary one on this machine."""
    if given is not None:
        yield given
        return
    box: list[Any] = [tempfile.mkdtemp(prefix="scaleray-verify-") if place.rank == 0 else None]
    if place.world_size > 1:
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    try:
        yield str(Path(box[0]))
    finally:
        if place.rank == 0:
            shutil.rmtree(box[0], ignore_errors=True)


def _resumed(variant: Variant, half: int, *, last: int) -> tuple[TrainJob, DueRates]:
    """The job of the steps from the resume up to `last`, and the right learning rates."""
    assert variant.later is not None
    job, later = variant.job, variant.later
    has_same_size = later.recipe.global_batch_size == job.recipe.global_batch_size
    position = half if has_same_size else position_after(job, half, in_steps_of=later)
    later = later_part(later, job, first=half, last=last)
    return later, DueRates(later, half, position)


def _name(variant: Variant) -> str:
    """Name of the folder of a variant's checkpoints."""
    return variant.label.replace(" ", "-").replace(",", "")


def _without_clipping(job: TrainJob) -> TrainJob:
    return job.changed({"optimizer.clip_norm": None})
