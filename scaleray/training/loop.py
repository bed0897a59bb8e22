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
from typing import Any

from scaleray.data import Part, PartStream, RankBatch
from scaleray.errors import LeftEarly
from scaleray.records.phases import Phase
from scaleray.records.run import Emit, EvaluationRecord, StepRecord, WorkerSummary
from scaleray.scaling.recipe.values import Recipe
from scaleray.strategies.contract.weight_shares import WeightShare
from scaleray.training.health import memory_report
from scaleray.training.health.clock import Clock
from scaleray.training.health.collective_limits import in_time, limit_collectives
from scaleray.training.health.failures import locating
from scaleray.training.health.progress import Progress
from scaleray.training.health.reporter import Reporter
from scaleray.training.health.summary import summary_of
from scaleray.training.noise.watch import NoiseWatch
from scaleray.training.setup.compilation import eagerly
from scaleray.training.setup.fine_tuning import merged_share
from scaleray.training.setup.job import TRAIN, OpenStream, TrainJob
from scaleray.training.setup.model_setup import Setup, prepare
from scaleray.training.setup.place import Place
from scaleray.training.state.checkpointing import Checkpointing
from scaleray.training.state.state import PROGRESS, TrainState
from scaleray.training.step.evaluation import Evaluations
from scaleray.training.step.first_batch import check_first_batch
from scaleray.training.step.micro_sizes import MicroSizes
from scaleray.training.step.nonfinite import stops_at, what_was_nonfinite
from scaleray.training.step.step import Probe, StepResult, TrainStep
from scaleray.training.step.worker_shares import WorkerShares
from scaleray.watchers import Watcher


def run(
    job: TrainJob,
    place: Place,
    *,
    open_stream: OpenStream,
    emit: Emit,
    save_weights: Callable[[WeightShare], None] | None = None,
    probe: Probe | None = None,
    checkpointing: Checkpointing | None = None,
    progress: Progress | None = None,
) -> WorkerSummary:
    """Train one worker's share to the end. Collective: every worker of the group calls it with the same job.

    save_weights: called on every rank with what it has of the final weights, when no other rank waits for this one any
    more. probe: looks at every step. checkpointing: saves the state and says where to start; without it a run starts at
    its first step. A sharded model stays in shards. Raises RunFailedError naming rank, node and step; errors that the
    user can mend (UsageError) come as they are.
    """
    progress = progress or Progress()
    place = dataclasses.replace(place, model_parallel_size=job.config.model_parallel_size)
    limit_collectives(progress.others_wait_s(job.config.scale.collective_timeout_s))
    first_step = 0
    if checkpointing is not None:
        with locating(lambda: (job, 0), place, progress):
            first_step = checkpointing.find()
            job = checkpointing.job
    return _Run(job, place, open_stream, emit, save_weights, probe, checkpointing, progress, first_step).train()


class _Run:
    def __init__(
        self,
        job: TrainJob,
        place: Place,
        open_stream: OpenStream,
        emit: Emit,
        save_weights: Callable[[WeightShare], None] | None,
        probe: Probe | None,
        checkpointing: Checkpointing | None,
        progress: Progress,
        first_step: int,
    ) -> None:
        self.job, self.place, self.progress = job, place, progress
        self.save_weights, self.probe, self.checkpointing = save_weights, probe, checkpointing
        self.first_step = self.step = first_step
        self.verdict: str | None = None
        self.nonfinite_steps = 0
        self.clock = Clock()
        self.first_step_s = math.nan
        self.memory: dict[str, Any] = {}
        self.reporter = Reporter(job, place, emit, lambda: self.step)
        self.noise = NoiseWatch(self.reporter.guard)
        self.micro_sizes = MicroSizes(job.config, place, self.reporter)
        self.open_stream = in_time(open_stream, place, self._others_wait_s)
        self.evaluations = Evaluations(place, self.open_stream, progress.enter)
        resumed_from = checkpointing.resumed_from if checkpointing is not None else None
        before = resumed_from.values[PROGRESS].get("shares") if resumed_from is not None else None
        with self._located():
            self.plan = job.train_plan()
        self.shares = WorkerShares(job.config, job.recipe, place, before)
        shares, warning = self.shares.first_words(deterministic=job.config.deterministic)
        if shares is not None:
            self.reporter.say(shares, step=first_step)
        if warning is not None:
            self.reporter.say(warning, is_warning=True)

    @property
    def recipe(self) -> Recipe:
        """The job's recipe, which has smaller micro-batches once the memory demands it."""
        return self.job.recipe

    def train(self) -> WorkerSummary:
        """Everything from the set-up to the final weights."""
        job, place = self.job, self.place
        part = Part(
            self.plan, place.data_rank, place.data_size, self.first_step, self.recipe.total_steps, self.shares.now
        )
        # before the model: its first batch takes seconds on a cold cluster, and the model is built meanwhile
        split = job.splits[TRAIN]
        stream = PartStream(lambda part: self.open_stream(split, part), part, timeout_s=job.config.data.timeout_s)
        setup: Setup | None = None
        try:
            with self._located():
                is_resumed = self.first_step > 0
                setup = prepare(job.workload, job.config, self.recipe, place, is_resumed=is_resumed, varied=job.varied)
                self._limit_collectives()  # the groups that the strategy has made are among them
                self.reporter.begin(setup, self.recipe, job.data_warnings() if place.rank == 0 else ())
                self.shares.watch(setup.parallel.module)
                step = self._train_step(setup)
                if self.checkpointing is not None:
                    self.checkpointing.begin(self._state(setup, step))
                    self.reporter.notes(setup)
                verdict = self._steps(setup, step, stream)
                if verdict is None:
                    setup.let_go()
                    raise LeftEarly(f"left in good order after step {self.step}, whose checkpoint is complete")
                compiled = self._end(setup)
        finally:
            stream.close()
            self.shares.close()
            self.noise.close()
            if setup is not None:
                setup.undo.close()  # after an error: torch's switches are the process's
        search = {"micro_batch": self.micro_sizes.search} if self.micro_sizes.search else {}
        summary = summary_of(
            self.job,
            place,
            setup,
            self.plan,
            self.clock,
            self.reporter.guard,
            first_step=self.first_step,
            step=self.step,
            verdict=verdict,
            first_step_s=self.first_step_s,
            nonfinite_steps=self.nonfinite_steps,
            compilation=compiled,
            memory={**self.memory, **search},
            noise=self.noise.values(),
        )
        self.reporter.emit(summary)
        return summary

    # steps

    def _steps(self, setup: Setup, step: TrainStep, stream: PartStream) -> str | None:
        """Train to the end and give the verdict; None when the run was asked to leave."""
        if self.probe is not None:
            self.probe.on_setup(setup)
        self.evaluations.prepare(self.job, setup)
        if self.verdict is not None:
            return self.verdict  # it had stopped for good before it was interrupted
        if verdict := self.evaluations.target_reached(self.step):
            return verdict
        self.progress.enter(Phase.INPUT)
        first = next(stream, None)
        self.progress.enter(Phase.START)
        if first is None:
            return "done"  # resumed after its last step
        self._settle(setup, step, first)
        self.clock.start(stream.waited_s)
        for batch in self._batches(first, stream):
            learning_rate = float(setup.schedule.get_last_lr()[0])
            result = self._take(step, batch, setup)
            self._after_step(batch, stream)
            step_s, waited_s = self.clock.tick(stream.waited_s)
            if self.step == self.first_step + 1:
                self._after_first_step(setup)
            self._report(setup, batch, result, learning_rate=learning_rate, step_s=step_s, waited_s=waited_s)
            self.nonfinite_steps += result.nonfinite_steps
            if result.nonfinite_steps and stops_at(self.step, result, self.job.config.on_nonfinite):
                self.verdict = f"stopped: {what_was_nonfinite(self.step, result)}"
                return self.verdict
            if self._evaluate_if_due(setup):
                self.clock.start(stream.waited_s)
                self.evaluations.check_target()
                if verdict := self.evaluations.target_reached(self.step):
                    return verdict
            self.progress.enter(Phase.CHECKPOINT)
            saves = self.checkpointing
            if saves is not None and result.signals and saves.after_step(self.step, result.signals):
                return None
        return "done"

    def _take(self, step: TrainStep, batch: RankBatch, setup: Setup) -> StepResult:
        """Take one optimizer step, and set the learning rate of the next one."""
        self.shares.begin_step(batch.step + 1)
        with self._measured(setup):
            result = step(
                batch,
                num_rows=self.plan.num_rows(batch.step),
                want_norm=(batch.step + 1) % self.job.config.tracking.every_steps == 0,
                meets=self._meets(setup, batch.step + 1),
            )
        with warnings.catch_warnings():  # torch warns when the first step was skipped, which is no mistake here
            warnings.simplefilter("ignore", UserWarning)
            setup.schedule.step()
        return result

    def _after_step(self, batch: RankBatch, stream: PartStream) -> None:
        """Count the step, and cut the rest of the input by the shares that are in force from now on."""
        self.step = batch.step + 1
        self.progress.finish_step(self.step)
        if self.progress.steps_done == 1:
            self._limit_collectives()
        self.noise.count_samples(self.plan.num_rows(batch.step))
        if changed := self.shares.end_step(self.step, batch.num_rows):
            self.progress.enter(Phase.INPUT)
            stream.cut(self.step, self.shares.now)
            self.reporter.say(changed, step=self.step)

    def _after_first_step(self, setup: Setup) -> None:
        """Say what was not compiled, as nothing else would; `compilation.must_succeed` ends the run here."""
        self.first_step_s = time.time() - self.job.started_at
        for text in setup.compilation.check() if setup.compilation is not None else ():
            self.reporter.say(text, is_warning=True, step=self.step)

    def _report(
        self,
        setup: Setup,
        batch: RankBatch,
        result: StepResult,
        *,
        learning_rate: float,
        step_s: float,
        waited_s: float,
    ) -> None:
        def record(sent_bytes: float) -> StepRecord:
            scaler = setup.precision.scaler
            return StepRecord(
                step=self.step,
                loss=result.loss,
                count=result.count,
                num_samples=self.plan.num_rows(batch.step),
                learning_rate=learning_rate,
                grad_norm=result.grad_norm,
                step_time_s=step_s,
                input_wait_s=waited_s,
                epoch=self.plan.epochs(self.step),
                is_finite=result.is_finite,
                loss_scale=scaler.get_scale() if scaler.is_enabled() else None,
                world_size=self.place.world_size,
                sent_bytes=sent_bytes,
                more={**self.reporter.figures(setup, self.recipe.strategy), **self.noise.figures()},
            )

        self.reporter.step(setup, record)

    def _batches(self, first: RankBatch, rest: PartStream) -> Iterator[RankBatch]:
        batch: RankBatch | None = first
        while batch is not None:
            yield batch
            self.progress.enter(Phase.INPUT)
            batch = next(rest, None)

    def _meets(self, setup: Setup, step: int) -> bool:
        """Whether all ranks sum losses and signals in this step, which whatever is decided together needs."""
        recipe = self.recipe
        every = (recipe.evaluate_every_steps, recipe.checkpoint_every_steps)
        return setup.parallel.meets(step) or step == recipe.total_steps or any(n and step % n == 0 for n in every)

    @contextlib.contextmanager
    def _measured(self, setup: Setup) -> Iterator[None]:
        """Look at the memory of the second step, the first that begins with the optimizer's state."""
        if self.memory or self.step != self.first_step + 1:
            yield
            return
        with memory_report.watching(setup, self.place.device, self.reporter.guard) as memory:
            yield
        self.memory = memory

    def _evaluate_if_due(self, setup: Setup, *, at_end: bool = False) -> bool:
        if not self.evaluations.are_due(self.step, at_end=at_end):
            return False
        self.progress.enter(Phase.SYNCHRONISE)
        if self.checkpointing is not None and setup.parallel.replicas_differ:
            self.checkpointing.before_update()  # the mean takes the replica's place while it is evaluated
        record = self.evaluations.run(self.step)
        if self.place.rank == 0:
            self.reporter.emit(record)
        if self.checkpointing is not None:
            is_last = self.step >= self.recipe.total_steps
            self.checkpointing.evaluated(self.step, self.evaluations.metrics, is_last=at_end or is_last)
        return True

    # before the first step, and after the last one

    def _limit_collectives(self) -> None:
        """Limit collectives: before the first step for long, as a worker may compile while others wait for it; then as
        the config says."""
        limit_collectives(self._others_wait_s())

    def _others_wait_s(self) -> float:
        return self.progress.others_wait_s(self.job.config.scale.collective_timeout_s)

    def _train_step(self, setup: Setup) -> TrainStep:
        saves = self.checkpointing
        step = TrainStep(
            self.job.workload,
            setup,
            self.job.config,
            self.recipe,
            self.place,
            gives_tuples=self.job.splits[TRAIN].gives_tuples,
            probe=self.probe,
            signals=saves.signals if saves else tuple,
            before_update=saves.before_update if saves else lambda: None,
            enter=self.progress.enter,
            on_halved=lambda recipe: self._use(recipe, setup, was_halved=True),
        )
        step.num_updates = self.step
        return step

    def _settle(self, setup: Setup, step: TrainStep, first: RankBatch) -> None:
        """Look at the first batch, then decide what only a batch can tell: micro-batches, and how noise is measured."""
        job, gives_tuples = self.job, self.job.splits[TRAIN].gives_tuples
        with eagerly() if setup.compilation else contextlib.nullcontext():
            counted = check_first_batch(
                job.workload,
                job.config,
                first,
                setup,
                self.place,
                gives_tuples=gives_tuples,
                micro_batch_size=self.micro_sizes.most_before_search(self.recipe),
                evaluated=[e.name for e in self.evaluations.evaluators],
            )
        if self.first_step == 0 and counted is not None:
            # the loss scale of fp16 is meant for a mean: over a sum of many tokens the first steps would overflow
            step.count_per_row = counted
        found = self.micro_sizes.settle(
            self.recipe, job.workload, setup, first, gives_tuples=gives_tuples, enter=self.progress.enter
        )
        if found is not None:
            self._use(found, setup)
        step.recipe = self.recipe
        step.noise = self.noise.start(job.config, self.recipe, setup, self.place, self.reporter.say)

    def _use(self, recipe: Recipe, setup: Setup, *, was_halved: bool = False) -> None:
        """Go on with smaller micro-batches, in evaluations too."""
        if was_halved:
            self.micro_sizes.say_halved(self.recipe, recipe, step=self.step)
        self.micro_sizes.now = recipe.micro_batch_size
        self.job = dataclasses.replace(self.job, recipe=recipe)
        self.evaluations.prepare(self.job, setup)

    def _end(self, setup: Setup) -> dict[str, Any]:
        """Evaluate and save for the last time, and hand on the weights; gives what was compiled."""
        has_evaluated = self._evaluate_if_due(setup, at_end=True)
        if not has_evaluated and self.evaluations.step == self.step == self.first_step and self.place.rank == 0:
            self.reporter.emit(
                EvaluationRecord(self.step, dict(self.evaluations.metrics), 0.0)
            )  # resumed after its end
        if self.checkpointing is not None:
            self.checkpointing.finish(self.step)
        compiled: dict[str, Any] = {}
        if (compilation := setup.compilation) is not None:
            compiled = self.reporter.guard(Watcher.NOTES, compilation.report, {}, part="compilation")
        self.progress.enter(Phase.END)
        save = self.save_weights if self.job.config.checkpoint.save_final else None
        share = setup.parallel.weights() if save is not None else WeightShare()
        # nothing below this line communicates: a slow disk costs the rank that has it, and nobody's time limit
        setup.let_go()
        if share.left_out:
            names = ", ".join(share.left_out[:5])
            text = f"the final weights are tensors alone: {names} of the model's extra state are in checkpoints only"
            self.reporter.say(text, is_warning=True, step=self.step)
        if save is not None:
            save(merged_share(share, self.job.config.fine_tuning))
        return compiled

    def _located(self) -> contextlib.AbstractContextManager[None]:
        return locating(lambda: (self.job, self.step), self.place, self.progress)

    # what a checkpoint keeps of the loop

    def _state(self, setup: Setup, step: TrainStep) -> TrainState:
        """Everything that the training is made of."""

        def progress() -> dict[str, Any]:
            epoch, sample = self.job.train_plan().place(self.step)
            return {
                "step": self.step,
                "epoch": epoch,
                "sample_in_epoch": sample,
                "global_batch_size": self.recipe.global_batch_size,
                "origin": dataclasses.asdict(self.job.origin) if self.job.origin else None,
                "count_per_row": step.count_per_row,
                "nonfinite_steps": self.nonfinite_steps,
                "nonfinite_in_a_row": step.nonfinite_in_a_row,
                "metrics": self.evaluations.metrics,
                "evaluated_at": self.evaluations.step,
                "verdict": self.verdict,
                "noise_scale": self.noise.state(),
                "training_time_s": self.clock.total_s,
                "shares": self.shares.state(),
                "micro_batch_size": self.micro_sizes.now,
            }

        def continue_from(before: dict[str, Any]) -> None:
            self.step = step.num_updates = before["step"]
            step.count_per_row = before["count_per_row"]
            step.nonfinite_in_a_row = before.get("nonfinite_in_a_row", 0)
            self.nonfinite_steps = before["nonfinite_steps"]
            self.evaluations.step = before["evaluated_at"]
            self.evaluations.metrics = dict(before["metrics"])
            self.verdict = before.get("verdict")
            self.clock.total_s = before.get("training_time_s", 0.0)
            self.micro_sizes.now = before.get("micro_batch_size")
            self.noise.kept = before.get("noise_scale")

        return TrainState(setup, self.place, self.job.workload, self.job.config.seed, progress, continue_from)
