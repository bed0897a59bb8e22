"""The training loop of one worker. It knows neither Ray nor MLflow: records go to a callable.

Runs in this process, under plain gloo processes and inside Ray Train alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from scaleray.config.idle import idle_settings
from scaleray.data import Part, PartStream, RankBatch, StepPlan, StepStream
from scaleray.emulation import is_emulated
from scaleray.errors import LeftEarly
from scaleray.records import (
    DerivedRecord,
    EvaluationRecord,
    EventRecord,
    StepRecord,
    SystemRecord,
    WorkerMessage,
    WorkerSummary,
)
from scaleray.reproducibility.fingerprint import accelerators, cpu_model
from scaleray.scaling.lr_rules import MOVED_BY_RULES
from scaleray.scaling.recipe import Recipe, with_micro_size
from scaleray.scaling.shares import described
from scaleray.strategies.weight_shares import WeightShare
from scaleray.training import memory_report, micro_batch_finder
from scaleray.training.checkpointing import Checkpointing
from scaleray.training.clock import Clock
from scaleray.training.collective_limits import limit_collectives
from scaleray.training.compilation import eagerly
from scaleray.training.evaluation import Evaluations
from scaleray.training.failures import located
from scaleray.training.fine_tuning import merged_share
from scaleray.training.first_batch import check_first_batch
from scaleray.training.job import TRAIN, OpenStream, Split, TrainJob
from scaleray.training.model_setup import Setup, prepare
from scaleray.training.noise_scale import NoiseMeter, find_way
from scaleray.training.nonfinite import stops_at, what_was_nonfinite
from scaleray.training.place import Place
from scaleray.training.progress import WATCHDOG_SHARE, Progress
from scaleray.training.shares import WorkerShares
from scaleray.training.state import PROGRESS, TrainState
from scaleray.training.step import Probe, TrainStep
from scaleray.training.system_metrics import SystemMetrics
from scaleray.watchers import Guard, Watcher
from scaleray.workload import brings_optimizer, no_exit

Emit = Callable[[WorkerMessage], None]


def run(
    job: TrainJob, place: Place, *, open_stream: OpenStream, emit: Emit, save_weights: Callable[[WeightShare], None] | None = None,
    probe: Probe | None = None, checkpointing: Checkpointing | None = None,
    progress: Progress | None = None,
) -> WorkerSummary:  # fmt: skip
    """Train one worker's share to the end. Collective: every worker of the group calls it with the same job.

    save_weights: called on every rank with what it has of the final weights, when no other rank waits for this one any more.
    probe: looks at every step. checkpointing: saves the state and says where to start; without it a run starts at its first
    step. A sharded model stays in shards. Raises RunFailedError naming rank, node and step; errors
    that the user can mend (UsageError) come as they are.
    """
    return _Run(job, place, open_stream, emit, save_weights, probe, checkpointing, progress or Progress()).train()


class _Run:
    def __init__(
        self, job: TrainJob, place: Place, open_stream: OpenStream, emit: Emit, save_weights: Any, probe: Probe | None,
        checkpointing: Checkpointing | None, progress: Progress,
    ) -> None:  # fmt: skip
        self.job = job
        self.guard = Guard(lambda text: emit(EventRecord(text, kind="warning", step=self.step or None)))
        self.emit = self.guard.wrapped(Watcher.MESSAGES, emit)
        self.place = dataclasses.replace(place, model_parallel_size=job.config.model_parallel_size)
        self.save_weights, self.probe, self.checkpointing = save_weights, probe, checkpointing
        self.config, self.recipe = job.config, job.recipe
        self.step = self.first_step = 0
        self.count_per_row = 1.0
        self.progress = progress
        self.open_stream = self._in_time(open_stream)
        self.clock = Clock()
        self.nonfinite_steps = self.nonfinite_in_a_row = 0
        self.evaluations = Evaluations(self.place, self.open_stream, self.progress.enter)
        self.verdict: str | None = None
        self.train_step: TrainStep | None = None
        self.first_step_s = math.nan
        self.sent_bytes = 0.0
        self.said = 0
        self.compiled: dict[str, Any] = {}
        self.memory: dict[str, Any] = {}
        self.search: dict[str, Any] = {}
        self.noise: NoiseMeter | None = None
        self.noise_state: dict[str, Any] | None = None
        self.micro_batch_size: int | None = None  # where it is not the config's
        is_sampled = self.config.tracking.system_metrics and place.local_rank == 0
        self.system = (
            self.guard(Watcher.SYSTEM_METRICS, lambda: SystemMetrics(self.guard), None) if is_sampled else None
        )
        self.sampled_at = time.monotonic()

    def train(self) -> WorkerSummary:
        self._limit_collectives()
        with self._located():
            if self.checkpointing is not None:
                self.first_step = self.step = self.checkpointing.find()
                self._adopt(self.checkpointing.job)
            plan = self.job.train_plan()
        self.shares = self._worker_shares()
        part = Part(
            plan, self.place.data_rank, self.place.data_size, self.first_step, self.recipe.total_steps, self.shares.now
        )
        # before the model: its first batch takes seconds on a cold cluster, and the model is built meanwhile
        split = self.job.splits[TRAIN]
        stream = PartStream(lambda part: self.open_stream(split, part), part, timeout_s=self.config.data.timeout_s)
        setup: Setup | None = None
        try:
            with self._located():
                setup = prepare(
                    self.job.workload, self.config, self.recipe, self.place, is_resumed=self.first_step > 0,
                    varied=self.job.varied,
                )  # fmt: skip
                self._limit_collectives()  # of the groups that the strategy has made, too
                self._say_notes(setup)
                if self.place.rank == 0:
                    self._say_what_is_in_use(setup)
                self._say_first_notes(setup)
                for text in self.job.data_warnings() if self.place.rank == 0 else ():
                    self.emit(EventRecord(text, kind="warning"))
                self.shares.watch(setup.parallel.module)
                if self.checkpointing is not None:
                    self.checkpointing.begin(self.state(setup))
                    self._say_notes(setup)
                verdict = self._steps(setup, stream, plan)
                if verdict is None:
                    setup.let_go()
                    raise LeftEarly(f"left in good order after step {self.step}, whose checkpoint is complete")
                has_evaluated = self._evaluate_if_due(setup, at_end=True)
                if not has_evaluated and self.evaluations.step == self.step == self.first_step and self.place.rank == 0:
                    self.emit(EvaluationRecord(self.step, dict(self.evaluations.metrics), 0.0))  # resumed after its end
                if self.checkpointing is not None:
                    self.checkpointing.finish(self.step)
                if (compilation := setup.compilation) is not None:
                    self.compiled = self.guard(Watcher.NOTES, compilation.report, {}, part="compilation")
                self.progress.enter("end")
                share = setup.parallel.weights() if self._saves_weights else WeightShare()
                # nothing below this line communicates: a slow disk costs the rank that has it, and nobody's time limit
                setup.let_go()
                self._save(share)
        finally:
            stream.close()
            self.shares.close()
            if self.noise is not None:
                self.noise.close()
            if setup is not None:
                setup.undo.close()  # after an error: torch's switches are the process's
        summary = self._summary(setup, plan, stream, verdict)
        self.emit(summary)
        return summary

    def _limit_collectives(self) -> None:
        """Before the first step for long, as a worker may compile while others wait for it; then as the config says."""
        limit_collectives(self.progress.others_wait_s(self.config.scale.collective_timeout_s))

    def _in_time(self, open_stream: OpenStream) -> OpenStream:
        """Streams on which a worker waits less long than the others wait for it, so that it is the one that says why."""

        def others_wait_s() -> float:
            return WATCHDOG_SHARE * self.progress.others_wait_s(self.config.scale.collective_timeout_s)

        def open_in_time(split: Split, part: Part) -> StepStream:
            stream = open_stream(split, part)
            if self.place.world_size > 1:
                stream.others_wait_s = others_wait_s
            return stream

        return open_in_time

    @property
    def _saves_weights(self) -> bool:
        return self.save_weights is not None and self.config.checkpoint.save_final

    def _save(self, share: WeightShare) -> None:
        """Hand on what this rank has of the final weights. Not collective."""
        if share.left_out and self.place.rank == 0:
            names = ", ".join(share.left_out[:5])
            text = f"the final weights are tensors alone: {names} of the model's extra state are in checkpoints only"
            self.emit(EventRecord(text, kind="warning", step=self.step))
        if self.save_weights is not None and self._saves_weights:
            self.save_weights(merged_share(share, self.config.fine_tuning))

    def state(self, setup: Setup) -> TrainState:
        """Everything that the training is made of."""
        return TrainState(setup, self.place, self.job.workload, self.config.seed, self._progress, self._continue_from)

    def _adopt(self, job: TrainJob) -> None:
        """The job as its checkpoint left it."""
        self.job, self.config, self.recipe = job, job.config, job.recipe

    def _progress(self) -> dict[str, Any]:
        epoch, sample = self.job.train_plan().place(self.step)
        return {
            "step": self.step, "epoch": epoch, "sample_in_epoch": sample, "global_batch_size": self.recipe.global_batch_size,
            "origin": dataclasses.asdict(self.job.origin) if self.job.origin else None,
            "count_per_row": self.train_step.count_per_row if self.train_step else self.count_per_row,
            "nonfinite_steps": self.nonfinite_steps,
            "nonfinite_in_a_row": self.train_step.nonfinite_in_a_row if self.train_step else self.nonfinite_in_a_row,
            "metrics": self.evaluations.metrics, "evaluated_at": self.evaluations.step, "verdict": self.verdict,
            "noise_scale": self._noise_state(),
            "training_time_s": self.clock.total_s, "shares": self.shares.state(), "micro_batch_size": self.micro_batch_size,
        }  # fmt: skip

    def _worker_shares(self) -> WorkerShares:
        """Those of the checkpoint that the run goes on from, or those of the config."""
        resumed_from = self.checkpointing.resumed_from if self.checkpointing is not None else None
        before = resumed_from.values[PROGRESS].get("shares") if resumed_from is not None else None
        shares = WorkerShares(self.config, self.recipe, self.place, before)
        if shares.now is not None and self.place.rank == 0:
            self.emit(EventRecord(described(shares.now, shares.speeds), step=self.first_step))
        if self.config.deterministic and self.recipe.measure_shares_every_steps is not None and self.place.rank == 0:
            text = "shares follow measured times, so that another run sums the same samples in other groups: equal to rounding, not to the bit"
            self.emit(EventRecord(text, kind="warning"))
        return shares

    def _continue_from(self, progress: dict[str, Any]) -> None:
        self.step = progress["step"]
        self.count_per_row = progress["count_per_row"]
        self.nonfinite_steps, self.nonfinite_in_a_row = (
            progress["nonfinite_steps"],
            progress.get("nonfinite_in_a_row", 0),
        )
        self.evaluations.step = progress["evaluated_at"]
        self.evaluations.metrics = dict(progress["metrics"])
        self.verdict = progress.get("verdict")
        self.clock.total_s = progress.get("training_time_s", 0.0)
        self.micro_batch_size = progress.get("micro_batch_size")
        self.noise_state = progress.get("noise_scale")

    def _steps(self, setup: Setup, stream: PartStream, plan: StepPlan) -> str | None:
        """Train to the end and give the verdict; None when the run was asked to leave."""
        split = self.job.splits[TRAIN]
        saves = self.checkpointing
        step = TrainStep(
            self.job.workload, setup, self.config, self.recipe, self.place, gives_tuples=split.gives_tuples,
            probe=self.probe, signals=saves.signals if saves else tuple, before_update=saves.before_update if saves else lambda: None,
            enter=self.progress.enter, on_halved=self._after_halving,
        )  # fmt: skip
        step.count_per_row, step.num_updates = self.count_per_row, self.step
        step.nonfinite_in_a_row = self.nonfinite_in_a_row
        self.train_step = step
        if self.probe is not None:
            self.probe.on_setup(setup)
        self.evaluations.prepare(self.job, setup)
        if self.verdict is not None:
            return self.verdict  # it had stopped for good before it was interrupted
        if verdict := self.evaluations.target_reached(self.step):
            return verdict
        self.progress.enter("input")
        first = next(stream, None)
        self.progress.enter("start")
        if first is None:
            return "done"  # resumed after its last step
        # while the size is still to be found, two rows: the config's may be more than fits
        most = 2 if self.config.memory.find_micro_size else self.recipe.micro_batch_size
        with eagerly() if setup.compilation else contextlib.nullcontext():
            counted = check_first_batch(
                self.job.workload, self.config, first, setup, self.place, gives_tuples=split.gives_tuples,
                micro_batch_size=min(most, self.micro_batch_size or most), evaluated=[e.name for e in self.evaluations.evaluators],
            )  # fmt: skip
        if self.first_step == 0 and counted is not None:
            # the loss scale of fp16 is meant for a mean: over a sum of many tokens the first steps would overflow
            step.count_per_row = counted
        step.recipe = self._find_micro_size(setup, first, gives_tuples=split.gives_tuples)
        step.noise = self.noise = self._noise_meter(setup)
        scaler = setup.precision.scaler
        self.clock.start(stream.waited_s)
        for batch in self._batches(first, stream):
            learning_rate = setup.schedule.get_last_lr()[0]
            want_norm = (batch.step + 1) % self.config.tracking.every_steps == 0
            self.shares.begin_step(batch.step + 1)
            with self._measured(setup):
                result = step(
                    batch,
                    num_rows=plan.num_rows(batch.step),
                    want_norm=want_norm,
                    meets=self._meets(setup, batch.step + 1),
                )
            with warnings.catch_warnings():  # torch warns when the first step was skipped, which is no mistake here
                warnings.simplefilter("ignore", UserWarning)
                setup.schedule.step()
            self.step = batch.step + 1
            self.progress.finish_step(self.step)
            if self.progress.steps_done == 1:
                self._limit_collectives()
            if self.noise is not None:
                self.noise.count_samples(plan.num_rows(batch.step))
            if changed := self.shares.end_step(self.step, batch.num_rows):
                self.progress.enter("input")
                stream.cut(self.step, self.shares.now)
                if self.place.rank == 0:
                    self.emit(EventRecord(changed, step=self.step))
            step_s, waited_s = self.clock.tick(stream.waited_s)
            if self.step == self.first_step + 1:
                self.first_step_s = time.time() - self.job.started_at
                self._check_compilation(setup)
            sent_bytes = self.guard(Watcher.FIGURES, setup.parallel.bytes_sent, self.sent_bytes, part="bytes sent")
            if self.place.rank == 0:
                self.emit(
                    StepRecord(
                        step=self.step, loss=result.loss, count=result.count, num_samples=plan.num_rows(batch.step),
                        learning_rate=float(learning_rate), grad_norm=result.grad_norm, step_time_s=step_s, input_wait_s=waited_s,
                        epoch=plan.epochs(self.step), is_finite=result.is_finite,
                        loss_scale=scaler.get_scale() if scaler.is_enabled() else None, world_size=self.place.world_size,
                        sent_bytes=sent_bytes - self.sent_bytes,
                        more=self._figures(setup),
                    )
                )  # fmt: skip
            self.sent_bytes = sent_bytes
            self._say_notes(setup)
            self._sample_system()
            self.nonfinite_steps += result.nonfinite_steps
            if result.nonfinite_steps and stops_at(self.step, result, self.config.on_nonfinite):
                self.verdict = f"stopped: {what_was_nonfinite(self.step, result)}"
                return self.verdict
            if self._evaluate_if_due(setup):
                self.clock.start(stream.waited_s)
                self.evaluations.check_target()
                if verdict := self.evaluations.target_reached(self.step):
                    return verdict
            self.progress.enter("checkpoint")
            if saves and result.signals and saves.after_step(self.step, result.signals):
                return None
        return "done"

    def _noise_meter(self, setup: Setup) -> NoiseMeter | None:
        """What measures gradient noise, if anything does. Once micro-batches are known."""
        if self.config.noise_scale.measure is False:
            return None
        way = find_way(self.config, self.recipe, self.place)
        if self.place.rank == 0:
            self.emit(EventRecord(str(way)))
        if way.way is None:
            return None
        meter = self.guard(Watcher.NOISE, lambda: NoiseMeter(self.config, setup, self.place, way, self.guard), None)
        if self.place.all_reduce([float(meter is None)])[0] > 0 or meter is None:
            return None  # it sums over all ranks, so that all have one or none
        if (state := self.noise_state) is not None:
            self.guard(Watcher.NOISE, lambda: meter.load_state(state), None)
        return meter

    def _noise_state(self) -> dict[str, Any] | None:
        return self.guard(Watcher.NOISE, self.noise.state, self.noise_state) if self.noise else self.noise_state

    def _figures(self, setup: Setup) -> dict[str, float]:
        """What strategy, pruning and measurements add to the record of a step."""
        look = partial(self.guard, Watcher.FIGURES)
        return {
            **look(setup.parallel.metrics, {}, part=self.recipe.strategy),
            **(look(setup.pruning.metrics, {}, part="pruning") if setup.pruning else {}),
            **(look(self.noise.metrics, {}, part="noise") if self.noise else {}),
        }

    def _say_first_notes(self, setup: Setup) -> None:
        idle = self.guard(Watcher.NOTES, lambda: idle_settings(self.config, self.recipe.strategy), [], part="settings")
        compilation = setup.compilation.notes if setup.compilation is not None else []
        for note in [*idle, *compilation] if self.place.rank == 0 else ():
            self.emit(EventRecord(note))

    def _say_what_is_in_use(self, setup: Setup) -> None:
        """What became of the derived values in an optimizer of the workload's own."""
        if brings_optimizer(self.job.workload):
            derived = {name: getattr(self.recipe, name) for name in MOVED_BY_RULES}
            self.emit(DerivedRecord({**derived, **setup.in_use.values}))
        for text in setup.in_use.warnings:
            self.emit(EventRecord(text, kind="warning"))

    def _say_notes(self, setup: Setup) -> None:
        """Emit what the strategy has noted since the last time."""
        new = setup.parallel.notes[self.said :]
        self.said += len(new)
        for note in new if self.place.rank == 0 else ():
            self.emit(EventRecord(note, step=self.step or None))

    def _check_compilation(self, setup: Setup) -> None:
        """Once a step has run: say what was not compiled, as nothing else would."""
        if setup.compilation is None:
            return
        for text in setup.compilation.check():  # decides, too: `must_succeed` ends the run
            if self.place.rank == 0:
                self.emit(EventRecord(text, kind="warning", step=self.step))

    def _find_micro_size(self, setup: Setup, first: RankBatch, *, gives_tuples: bool) -> Recipe:
        """The recipe with the micro-batches to train with: found before, or now, or those of the config."""
        self._setup = setup
        share = self.recipe.per_worker_batch_size
        known = self.micro_batch_size
        if known is not None and share % known == 0 and known <= self.recipe.micro_batch_size:
            self._use(with_micro_size(self.recipe, known, why="as before the interruption"))
        elif self.config.memory.find_micro_size:
            with self._eagerly_on_cpu(setup):
                found = micro_batch_finder.find(
                    self.job.workload, setup, self.config, self.recipe, self.place, first, gives_tuples=gives_tuples,
                    enter=self.progress.enter,
                )  # fmt: skip
            self.search = found.values()
            self.sent_bytes = setup.parallel.bytes_sent()
            if self.place.rank == 0:
                self.emit(EventRecord(str(found)))
            self._use(with_micro_size(self.recipe, found.micro_batch_size, why="found before the first step"))
        return self.recipe

    def _after_halving(self, recipe: Recipe) -> None:
        if self.place.rank == 0:
            text = (
                f"out of memory with micro-batches of {self.recipe.micro_batch_size} rows: repeating step {self.step + 1} with "
                f"{recipe.micro_batch_size}, {recipe.accumulation_steps} accumulated; the global batch stays"
            )
            self.emit(EventRecord(text, kind="warning", step=self.step))
        self._use(recipe)

    def _use(self, recipe: Recipe) -> None:
        """Go on with smaller micro-batches, in evaluations too."""
        self.micro_batch_size = recipe.micro_batch_size
        self.recipe, self.job = recipe, dataclasses.replace(self.job, recipe=recipe)
        self.evaluations.prepare(self.job, self._setup)

    def _eagerly_on_cpu(self, setup: Setup) -> contextlib.AbstractContextManager[Any]:
        # tensors inside compiled code cannot be counted
        return eagerly() if setup.compilation and self.place.device.type == "cpu" else contextlib.nullcontext()

    @contextlib.contextmanager
    def _measured(self, setup: Setup) -> Iterator[None]:
        """Look at the memory of the second step, the first that begins with the optimizer's state."""
        if self.memory or self.step != self.first_step + 1:
            yield
            return
        with memory_report.watching(setup, self.place.device, self.guard) as memory:
            yield
        self.memory = memory

    def _meets(self, setup: Setup, step: int) -> bool:
        """Whether all ranks sum losses and signals in this step, which whatever is decided together needs."""
        recipe = self.recipe
        every = (recipe.evaluate_every_steps, recipe.checkpoint_every_steps)
        return setup.parallel.meets(step) or step == recipe.total_steps or any(n and step % n == 0 for n in every)

    def _batches(self, first: RankBatch, rest: PartStream) -> Iterator[RankBatch]:
        batch: RankBatch | None = first
        while batch is not None:
            yield batch
            self.progress.enter("input")
            batch = next(rest, None)

    def _evaluate_if_due(self, setup: Setup, *, at_end: bool = False) -> bool:
        if not self.evaluations.are_due(self.step, at_end=at_end):
            return False
        self.progress.enter("synchronise")
        if self.checkpointing is not None and setup.parallel.replicas_differ:
            self.checkpointing.before_update()  # the mean takes the replica's place while it is evaluated
        record = self.evaluations.run(self.step)
        if self.place.rank == 0:
            self.emit(record)
        if self.checkpointing is not None:
            is_last = self.step >= self.recipe.total_steps
            self.checkpointing.evaluated(self.step, self.evaluations.metrics, is_last=at_end or is_last)
        return True

    def _sample_system(self) -> None:
        if self.system is None or time.monotonic() - self.sampled_at < max(5.0, self.config.tracking.interval_s):
            return
        self.sampled_at = time.monotonic()
        if found := self.guard(Watcher.SYSTEM_METRICS, self.system.sample, {}):
            self.emit(SystemRecord(self.place.node, self.step, found))

    @contextlib.contextmanager
    def _located(self) -> Iterator[None]:
        try:
            with no_exit("the workload's code"):
                yield
        except Exception as exc:
            steps_done = self.progress.steps_done
            error = located(exc, self.place, self.config, self.recipe, step=self.step, steps_done=steps_done)
            if error is exc:
                raise
            raise error from exc

    def _summary(self, setup: Setup, plan: StepPlan, stream: PartStream, verdict: str) -> WorkerSummary:
        look = partial(self.guard, Watcher.SUMMARY)
        steady = look(self.clock.steady_state, None, part="steady state")
        samples_per_s = None
        if steady is not None:
            samples = sum(plan.num_rows(step) for step in range(self.first_step + steady.first, self.step))
            samples_per_s = samples / steady.total_s
        tokens = self.job.splits[TRAIN].tokens_per_row
        return WorkerSummary(
            rank=self.place.rank,
            node=self.place.node,
            steps=self.step,
            verdict=verdict,
            samples_per_s=samples_per_s,
            tokens_per_s=samples_per_s * tokens if samples_per_s and tokens else None,
            step_time_s=steady.median_s if steady else None,
            input_wait_share=steady.wait_share if steady else None,
            time_to_first_step_s=self.first_step_s,
            training_time_s=self.clock.total_s,
            peak_memory_bytes=look(lambda: memory_report.peak_memory_bytes(self.place.device), 0, part="memory"),
            nonfinite_steps=self.nonfinite_steps,
            sample_order=self.job.sample_order,
            strategy=self.recipe.strategy,
            device=str(self.place.device),
            model={
                "num_parameters": setup.num_parameters,
                "initial_hash": setup.initial_hash,
                "is_emulated": is_emulated(setup.parallel.module),
            },
            hardware=look(lambda: {"cpu": cpu_model(), "accelerators": accelerators()}, {}, part="hardware"),
            compilation=self.compiled,
            memory={**self.memory, **({"micro_batch": self.search} if self.search else {})},
            noise=look(self.noise.values, {}, part="noise") if self.noise else {},
        )
