"""Saving the state of a run, resuming it, and stopping it safely. Called by the loop, once a step.

All ranks must save after the same step. Facts that only one rank knows (the time, a notice that its node will be
removed, a request to stop) travel with the sums that every step reduces anyway, so that all ranks decide alike without
further communication."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from scaleray.checkpoints import sharded
from scaleray.checkpoints.catalog import Catalog
from scaleray.checkpoints.damage import Damage
from scaleray.checkpoints.manifest import Incomplete, Manifest
from scaleray.checkpoints.retention import Retention
from scaleray.checkpoints.saver import Saver
from scaleray.common.printed import quantity
from scaleray.common.watchers import Guard, Watcher
from scaleray.config.recipe.combinations import is_whole
from scaleray.errors import CheckpointError, RunFailedError, ScaleRayError
from scaleray.records.run_record import CheckpointRecord, EventRecord, RepeatedMessages
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.state.items import PROGRESS, REPLICA, as_json
from scaleray.training.state.live_state import LiveState
from scaleray.training.state.memory_copies import Holders, MemoryCopies
from scaleray.training.state.optimizer_state import Rates
from scaleray.training.state.training_state import TrainState
from scaleray.training.step.evaluation import check_split, unknown_metric

GROUP_TIMEOUT = timedelta(hours=1)  # an upload may take long; a lost peer closes its connections at once
NOTICE_INTERVAL_S = 2.0

SAVE, LEAVE, ASK, LINKS, BUSY = 0, 1, 2, 3, 4
"""Indices into a step's signals: requests for a checkpoint, for leaving, for checking notices and for measuring links;
and whether the last copies in memory are still being made."""


RATE_SECTIONS = ("optimizer", "schedule", "stop", "workload")


@dataclass
class Control:
    """Requests from outside to one worker. wants_leave: save and exit. wants_save: save and continue. wants_links:
    measure the links between the workers and continue. notice: returns the nodes whose workers the cluster will soon
    remove; collective, or None if this cannot be known."""

    wants_leave: threading.Event = field(default_factory=threading.Event)
    wants_save: threading.Event = field(default_factory=threading.Event)
    wants_links: threading.Event = field(default_factory=threading.Event)
    notice: Callable[[], frozenset[str]] | None = None


class Checkpointing:
    """Checkpoints of one worker's run, from the one that it starts from to its last."""

    def __init__(
        self,
        job: TrainJob,
        place: RankContext,
        catalog: Catalog,
        *,
        emit: Callable[[CheckpointRecord | EventRecord | RepeatedMessages], None],
        control: Control | None = None,
        facts: Mapping[str, Any] | None = None,
        before_publishing: Callable[[], Mapping[str, Any]] = dict,
        live: LiveState | None = None,
        holders: Holders | None = None,
    ) -> None:
        """live: state in memory of a run with spares. holders: processes that hold copies in memory."""
        self.job, self.place, self.catalog, self.joined = job, place, catalog, live
        self.live = live if is_whole(job.config, job.recipe.strategy, place.world_size) else None
        self.emit = emit = Guard().wrapped(Watcher.MESSAGES, emit)
        self.control, self.facts = control or Control(), dict(facts or {})
        settings = job.config.checkpoint
        self.group = _new_group(place)
        self.retention = Retention(
            settings.keep_last,
            settings.keep_best,
            settings.best_metric,
            settings.is_higher_better,
            job.recipe.keep_checkpoint_every_steps,
        )
        self.saver = Saver(
            catalog,
            self.group,
            world_size=place.world_size,
            strategy=job.recipe.strategy,
            is_asynchronous=settings.is_asynchronous,
            full_every=settings.full_every,
            emit=emit,
            before_publishing=before_publishing,
            retention=self.retention,
        )
        self.memory: MemoryCopies | None = None
        if holders is not None and settings.memory is not None and (every := job.recipe.memory_every_steps):
            self.memory = MemoryCopies(
                settings.memory,
                place,
                holders,
                strategy=job.recipe.strategy,
                every_steps=every,
                group=_new_group(place),
                emit=emit,
            )
        self._measured: dict[int, Mapping[str, float]] = {}  # on rank 0: of the best so far, by step
        self._best_step: int | None = None  # the last one that was among the best when it was measured
        self._is_ranked = False  # whether an evaluation has had the metric to rank by
        self.resumed_from: Manifest | None = None
        self._source = catalog
        self.saved_at = self.asked_at = time.monotonic()
        self.noticed: frozenset[str] = frozenset()
        self.state: TrainState | None = None

    def leave(self) -> None:
        """Wait for the threads that use this worker's groups, if it may leave the groups before its process ends."""
        for saver in self._savers if self.joined is not None else ():
            saver.wait()

    def find(self) -> int:
        """Return the step to start from: that of the newest complete state, in memory or in storage, or 0. Collective.

        Damaged files are restored from their copy. A checkpoint that cannot be restored is skipped with an event.
        Raises CheckpointError on every rank if a checkpoint has a format that this version cannot read."""
        if self.live is not None and (manifest := self.live.share(self.place)) is not None:
            self.resumed_from, self.job = manifest, self.job.continued(manifest.values[PROGRESS])
            return manifest.step
        held: list[Manifest] = []  # on rank 0

        def candidates() -> list[tuple[int, float, int | None]]:
            held.extend(self.memory.found() if self.memory is not None else [])
            in_memory = [(m.step, m.created_at, number) for number, m in enumerate(held)]
            return [*in_memory, *((step, 0.0, None) for step in self.catalog.steps())]

        for step, _, number in sorted(self._agreed(candidates), key=_newest):
            catalog = self.catalog if number is None or self.memory is None else self.memory.generations
            manifest = self._read(step) if number is None else self._agreed(partial(held.__getitem__, number))
            if manifest is None:
                continue
            names = sorted(manifest.files)[self.place.rank :: self.place.world_size]
            mine = catalog.check(manifest, names)
            mine += catalog.check_manifest(manifest) if self.place.rank == 0 and catalog is self.catalog else []
            damages = [damage for found in sharded.gathered(mine, self.group) for damage in found]
            for damage in damages:
                self._say(_told(damage, step))
            unreadable = next((d for d in damages if d.is_lost and d.is_unreadable), None)
            if (
                unreadable is not None
            ):  # the storage is away, which says nothing about the bytes: try again, lose nothing
                raise RunFailedError(
                    f"the checkpoint of step {step} cannot be read now: {unreadable.file}, {unreadable.problem}"
                )
            if not any(damage.is_lost for damage in damages):
                self.resumed_from, self._source = manifest, catalog
                self.job = self.job.continued(manifest.values[PROGRESS])
                return manifest.step
            self._say(f"the checkpoint of step {step} cannot be used; the run resumes from an older one")
        return 0

    def begin(self, state: TrainState) -> None:
        """Restore the state from the checkpoint chosen by `find`, if any, and save `state` from now on.

        Collective."""
        if self.retention.best is not None and self.retention.keep_best:
            check_split("checkpoint.best", self.retention.best, self.job)
        self.state = state
        state.capture()  # what cannot be saved is better said now than after ten minutes
        if self.resumed_from is not None:
            if self.live is not None and self.live.is_continued:
                state.restore(self.resumed_from, self.live.load)
            else:
                self._resume(self.resumed_from, state)
            self._measured = self._best_until(self.resumed_from.step) if self.place.rank == 0 else {}
        elif self.joined is not None and (why := self.joined.why()):
            self._say(f"{why}; no state was complete yet, so the training starts from the beginning")
        if self.memory is not None:
            self.memory.begin(self.resumed_from.step if self.resumed_from is not None else None)
        self.saved_at = time.monotonic()

    def _resume(self, manifest: Manifest, state: TrainState) -> None:
        """Restore a stored state. Collective."""
        before, own_rates = manifest.values[PROGRESS]["global_batch_size"], Rates.of(state.setup)
        state.restore(manifest, lambda tensors: sharded.load(tensors, self._source.stores, manifest, self.group))
        rate = _first_rate(state)
        if before != self.job.recipe.global_batch_size:
            own_rates.put_back(state.setup, position=self.job.steps_before())
        elif self._has_other_rates(manifest, state):  # a change that was allowed
            own_rates.put_back(state.setup, position=getattr(state.setup.schedule, "last_epoch", manifest.step))
        if self._source is self.catalog:
            self.saver.start_from(manifest)
        if self.place.rank == 0 and self.memory is not None and (last := self.memory.messages(manifest)):
            self.emit(RepeatedMessages(last))
        if self.place.rank == 0:
            text = _resumed(manifest, self.place.world_size, self.job)
            if self.joined is not None and (why := self.joined.why()):
                text = f"{why}; {text}"
            if before == self.job.recipe.global_batch_size and (now := _first_rate(state)) != rate:
                text += f"; the learning rate of the next step is {now:g} instead of {rate:g}"
            self.emit(EventRecord(text, kind="resumed", step=manifest.step))

    def _has_other_rates(self, manifest: Manifest, state: TrainState) -> bool:
        """Whether a section of the config on which the rates and their schedule depend has changed."""
        before, now = manifest.facts.get("config", {}), self.job.config.to_dict()
        changed = {name for name in RATE_SECTIONS if name in before and before[name] != now[name]}
        # rates that follow what was measured do not depend on the length of the training
        schedule = state.setup.schedule
        follows_values = bool(getattr(schedule, "plateaus", ())) and not hasattr(schedule, "follow_evaluation")
        return bool(changed - {"stop"} if follows_values else changed)

    def before_update(self) -> None:
        """Note that the optimizer is about to change parameters."""
        for saver in self._savers:
            saver.wait_staged()

    def signals(self) -> tuple[float, ...]:
        """Requests of this rank after the current step, to be summed over all ranks."""
        now = time.monotonic()
        minutes = self.job.config.checkpoint.every_minutes
        is_time = minutes is not None and now - self.saved_at > minutes * 60
        wants_save = self.place.rank == 0 and (is_time or self.control.wants_save.is_set())
        wants_ask = self.place.rank == 0 and self.control.notice is not None and now - self.asked_at > NOTICE_INTERVAL_S
        wants_links = self.place.rank == 0 and self.control.wants_links.is_set()
        wants_leave, is_busy = self.control.wants_leave.is_set(), self.memory is not None and self.memory.is_busy
        return float(wants_save), float(wants_leave), float(wants_ask), float(wants_links), float(is_busy)

    def asks_for_links(self, signals: Sequence[float]) -> bool:
        """Whether to measure the links between the workers after a step with these signals."""
        asks = len(signals) > LINKS and signals[LINKS] > 0
        if asks:
            self.control.wants_links.clear()
        return asks

    def evaluated(self, step: int, metrics: Mapping[str, float], *, is_last: bool) -> None:
        """Handle an evaluation after `step` steps, marking its state for saving if it is among the best so far.
        Collective. Raises ConfigError if the first evaluation lacks the metric to rank by; if it is also the last
        evaluation, an event reports this instead."""
        name = self.retention.best
        if name is None or not self.retention.keep_best:
            return
        if name not in metrics and not self._is_ranked:
            error = unknown_metric("checkpoint.best", name, metrics)
            if not is_last:
                raise error
            self._say(str(error))
        self._is_ranked = True
        is_best = False
        if self.place.rank == 0:  # it alone knows which checkpoints exist
            stored = {at: values for at, values in self._measured.items() if at not in self.saver.failed}
            self._measured = {**stored, step: dict(metrics)}
            best = self.retention.best_of(self._measured)
            self._measured = {at: self._measured[at] for at in best}
            is_best = step in best
        if self.place.all_reduce([float(is_best)])[0] > 0:
            self._best_step = step

    def after_step(self, step: int, signals: tuple[float, ...]) -> bool:
        """Save if a checkpoint is due after `step` steps. Returns whether the run should, and may, stop now.
        Collective."""
        leaves, asks = signals[LEAVE] > 0, signals[ASK] > 0
        is_new_notice = asks and self._is_notice_new()
        every = self.job.recipe.checkpoint_every_steps
        is_due = signals[SAVE] > 0 or leaves or is_new_notice or (every is not None and step % every == 0)
        if is_due or self._best_step == step:
            self.save(step)
        if self.memory is not None and self.memory.is_due(step) and not signals[BUSY] > 0:
            self._save(step, self.memory.saver)
        if is_new_notice:
            self._say(f"the cluster announced that it will remove a node; saved at step {step}")
        if leaves:
            self.saver.wait()
        return leaves

    def save(self, step: int) -> None:
        """Begin a checkpoint now. Collective."""
        assert self.state is not None
        if self.state.callbacks is not None:
            self.state.callbacks.before_checkpoint()
        if found := self.state.unsaved():
            self._say(found)
        self._save(step, self.saver)
        self.saved_at = time.monotonic()
        self.control.wants_save.clear()

    def _save(self, step: int, saver: Saver) -> None:
        assert self.state is not None
        self.state.setup.parallel.before_evaluation()  # buffers as on rank 0, as the next forward pass would make them
        self.before_update()  # an optimizer with a mode of evaluation gives its average in the place of the weights
        tensors, volatile, values = self.state.capture(is_saved=True)
        if self.memory is None or saver is not self.memory.saver or self.memory.has_room(tensors):
            facts = {**self.facts, **evaluation_facts(values[PROGRESS])}
            combine = partial(self.state.combined, values)
            saver.save(step, tensors, volatile=volatile, values=combine, facts=facts)

    @property
    def _savers(self) -> list[Saver]:
        return [self.saver, *([self.memory.saver] if self.memory is not None else [])]

    def finish(self, step: int) -> None:
        """Save the state after the last step and its evaluation, if checkpoints are requested or it is among the best,
        and wait until it is written. Collective."""
        assert self.state is not None
        if found := self.state.unsaved():
            self._say(found)
        for saver in self._savers:
            saver.wait()
        if (
            self.saver.last_saved == step
        ):  # perhaps before the last evaluation, which changes nothing but what is known of it
            progress = as_json(PROGRESS, self.state.get_progress())
            self.saver.restate({PROGRESS: progress}, evaluation_facts(progress))
        elif self.job.recipe.checkpoint_every_steps is not None or self._best_step == step:
            self.save(step)
            self.saver.wait()
        if self.group is not None:
            # rank 0 may be removing old ones still, for longer than the training's own collectives wait
            dist.barrier(group=self.group)
        # the training knows these checkpoints, and its memory would stay until Python looks for such circles
        self.state = None

    def _best_until(self, step: int) -> dict[int, Mapping[str, float]]:
        """The metrics of the existing best checkpoints up to `step`."""
        try:
            found = {m.step: m.own_metrics for m in self.catalog.complete() if m.step <= step}
        except (OSError, CheckpointError):  # then a next one may be saved that is none of the best
            return {}
        return {at: found[at] for at in self.retention.best_of(found)}

    def _is_notice_new(self) -> bool:
        self.asked_at = time.monotonic()
        found = self.control.notice() if self.control.notice is not None else frozenset()
        is_new = not found <= self.noticed  # Ray goes on naming a node, and may name another one beside it
        self.noticed = found
        return is_new

    def _read(self, step: int) -> Manifest | None:
        def read() -> Manifest | None:
            try:
                return self.catalog.read(step)
            except Incomplete as exc:
                self._say(f"the checkpoint of step {step} is skipped: {exc}")
                return None

        manifest: Manifest | None = self._agreed(read)
        return manifest

    def _agreed(self, decide: Callable[[], Any]) -> Any:
        """Return the result of rank 0, or raise its error, on every rank."""
        box: list[Any] = [None]
        if self.place.rank == 0:
            try:
                box = [decide()]
            except ScaleRayError as exc:
                box = [exc]
            except OSError as exc:
                where = f"the checkpoints at {self.catalog.stores[0].root}"
                box = [CheckpointError.problem(where, f"cannot be read: {exc}")]
        if self.group is not None:
            dist.broadcast_object_list(box, src=0, group=self.group)
        if isinstance(box[0], ScaleRayError):
            raise box[0]
        return box[0]

    def _say(self, text: str) -> None:
        if self.place.rank == 0:
            self.emit(EventRecord(text, kind="warning"))


def _new_group(place: RankContext) -> dist.ProcessGroup | None:
    """A separate group, because its collectives run in another thread than those of the training."""
    return dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT) if place.world_size > 1 else None


def _newest(candidate: tuple[int, float, int | None]) -> tuple[float, float]:
    """Sort key that puts the newest first, and memory before storage."""
    return (-candidate[0], -candidate[1])


def evaluation_facts(progress: Mapping[str, Any]) -> dict[str, Any]:
    """The last evaluation, for a manifest: its metrics and their step."""
    step = progress["evaluated_at"]
    return {"metrics": progress["metrics"], "evaluated_at": step if step >= 0 else None}


def _first_rate(state: TrainState) -> float:
    return float(state.setup.optimizer.param_groups[0]["lr"]) * state.setup.rate_scale.factor


def _told(damage: Damage, step: int) -> str:
    text = f"in the checkpoint of step {step}, {damage.file} is damaged ({damage.problem})"
    return f"{text}; healed from {damage.healed_from}" if damage.healed_from else text


def _resumed(manifest: Manifest, world_size: int, job: TrainJob) -> str:
    text = f"resumed after step {manifest.step}"
    if manifest.world_size != world_size:
        text += f" on {quantity(world_size, 'worker')} instead of {manifest.world_size}"
        if any(name.startswith(f"{REPLICA}.") for name in manifest.tensors):
            text += ", from the mean of its replicas; the strategy's own state starts from scratch"
    before, now = manifest.values[PROGRESS]["global_batch_size"], job.recipe.global_batch_size
    if before != now:
        text += f"; global batch {before} -> {now}"
        rates = manifest.values["schedule"].get("base_lrs")  # a workload's own schedule may have none
        if rates and job.recipe.learning_rate is not None:
            text += f", learning rate {rates[0]:g} -> {job.recipe.learning_rate:g}"
    return text
