"""The training loop of one worker. It does not depend on Ray or MLflow: records are passed to a callable.

Runs in this process, in plain gloo processes and inside Ray Train."""

import contextlib
import dataclasses
from collections import deque
from functools import partial
from typing import Any

from scaleray.common.watchers import Watcher
from scaleray.config.recipe.values import Recipe
from scaleray.data import TRAIN, Input, Part, RankBatch, Sources, StepStream
from scaleray.errors import LeftEarly
from scaleray.records.phases import Phase
from scaleray.records.run_record import Emit, EvaluationRecord, EventRecord, StepRecord, WorkerSummary
from scaleray.records.start import FIRST_BATCH, MODEL
from scaleray.strategies.contract.later import steps_ahead
from scaleray.training.callbacks import Callbacks
from scaleray.training.health.clock import Clock
from scaleray.training.health.fixed_model import FixedModel
from scaleray.training.health.group_watch import CollectiveLimits
from scaleray.training.health.memory_report import MemoryReport
from scaleray.training.health.reporter import Reporter
from scaleray.training.health.stray_runs import StrayRuns
from scaleray.training.health.summary import summary_of
from scaleray.training.health.worker_errors import locating
from scaleray.training.health.worker_progress import Progress
from scaleray.training.noise.noise_watch import NoiseWatch
from scaleray.training.observer import Observer, Observers
from scaleray.training.profile.profiler import Profile
from scaleray.training.setup.compilation import eagerly
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.model_setup import Setup, prepare
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.setup.weighted_losses import losses_of
from scaleray.training.state.checkpointing import Checkpointing
from scaleray.training.state.end_of_training import SaveWeights, hand_on_weights
from scaleray.training.state.items import PROGRESS
from scaleray.training.state.loop_state import LoopCheckpoint, LoopState
from scaleray.training.state.training_state import TrainState
from scaleray.training.step.evaluation import Evaluations
from scaleray.training.step.first_batch import check_first_batch
from scaleray.training.step.launched import Launched
from scaleray.training.step.micro_batches import collate_ahead, cuts_of
from scaleray.training.step.micro_sizes import MicroSizes
from scaleray.training.step.several_losses import OptimizerStep, train_step
from scaleray.training.step.step import Probe
from scaleray.training.step.worker_shares import WorkerShares


class CompilationWatch(Observer):
    """Observes the compilation of a model; does nothing if there is nothing to compile."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self._is_checked = False

    def begin(self, setup: Setup) -> None:
        """Store the parts that are to be compiled."""
        self._compilation = setup.compilation

    def after_step(self, taken: StepRecord) -> None:
        """Report the parts that were not compiled, which nothing else would show. Raises ConfigError if
        `compilation.must_succeed` is set."""
        if self._compilation is None or self._is_checked:
            return
        self._is_checked = True
        for text in self._compilation.check():
            self.reporter.say(text, is_warning=True, step=taken.step)

    def report(self) -> dict[str, Any]:
        """The compiled parts, for the summary."""
        if self._compilation is None:
            return {}
        return self.reporter.guard(Watcher.NOTES, self._compilation.report, {}, part="compilation")


def run(
    job: TrainJob,
    place: RankContext,
    *,
    sources: Sources,
    emit: Emit,
    save_weights: SaveWeights | None = None,
    probe: Probe | None = None,
    checkpointing: Checkpointing | None = None,
    progress: Progress | None = None,
) -> WorkerSummary:
    """Train one worker's share to the end. Collective: every worker of the group calls it with the same job.

    save_weights: called on every rank with that rank's part of the final weights. probe: observes every step.
    checkpointing: saves the state and decides where to start; without it, a run starts at its first step. Raises
    RunFailedError naming rank, node and step; UsageErrors are raised unchanged."""
    progress = progress or Progress()
    place = dataclasses.replace(place, degrees=job.degrees)
    CollectiveLimits(progress, job.config.scale.collective_timeout_s).apply()
    first_step = 0
    if checkpointing is not None:
        with locating(lambda: (job, 0), place, progress):
            first_step = checkpointing.find()
            job = checkpointing.job
    training = _Run(job, place, sources, emit, save_weights, probe, checkpointing, progress, first_step)
    try:
        return training.train()
    finally:
        if checkpointing is not None:
            checkpointing.leave()
        vars(training).clear()  # its parts know it: the model would stay until Python looks for circles


class _Run:
    def __init__(
        self,
        job: TrainJob,
        place: RankContext,
        sources: Sources,
        emit: Emit,
        save_weights: SaveWeights | None,
        probe: Probe | None,
        checkpointing: Checkpointing | None,
        progress: Progress,
        first_step: int,
    ) -> None:
        self.place, self.progress, self.first_step = place, progress, first_step
        self.save_weights, self.probe, self.checkpointing = save_weights, probe, checkpointing
        self.state = LoopState(job, first_step)
        self.located = partial(locating, lambda: (self.job, self.state.step), place, progress)
        self.reporter = Reporter(job, place, emit, step=lambda: self.state.step, figures=lambda: self.noise.figures())
        self.profile = Profile(job, place, first_step, progress, self.reporter, checkpointing)
        self.clock = Clock(job.started_at, job.start_ends, self.profile)
        self.noise = NoiseWatch(self.reporter.guard)
        self.memory = MemoryReport(place.device, self.reporter.guard)
        self.compilation = CompilationWatch(self.reporter)
        stray_runs = StrayRuns(self.reporter, job.mlflow_runs)
        with self.located():
            self.plan = job.train_plan()
            self.callbacks = Callbacks(job.workload, place, self.reporter.emit)
        self.observers = Observers(*self.profile.observers, self.memory, self.noise, self.compilation, stray_runs)
        self.micro_sizes = MicroSizes(job.config, place, self.reporter)
        self.limits = CollectiveLimits(progress, job.config.scale.collective_timeout_s)
        self.input = Input(
            sources,
            job.config.data,
            may_draw=job.config.deterministic,
            others_wait_s=lambda: self.limits.others_wait_s(place.world_size),
            warn=lambda text: emit(EventRecord(text, kind="warning")),
        )
        # a probe looks between steps, and the step that ends a training must not be followed by updates of the average
        self.live = checkpointing.live if checkpointing is not None else None
        is_known_first = (
            probe is not None
            or self.live is not None
            or (job.config.averaging.decay is not None and job.config.on_nonfinite == "stop")
        )
        self.attributes: dict[str, Any] = {}
        self.ahead = self.callbacks.steps_ahead = 0 if is_known_first else steps_ahead(place.device)
        self.under_way: deque[tuple[Launched, dict[str, Any]]] = deque()
        """Steps that the device has been given and the host has not read yet, in order, each with the loop's facts
        about it; at most `ahead` of them between two steps."""
        self.evaluations = Evaluations(place, self.input, progress.enter, job.config)
        resumed_from = checkpointing.resumed_from if checkpointing is not None else None
        before = resumed_from.values[PROGRESS].get("shares") if resumed_from is not None else None
        self.shares = WorkerShares(job.config, job.recipe, place, before)
        for text, warns in self.shares.first_words(deterministic=job.config.deterministic):
            self.reporter.say(text, is_warning=warns, step=None if warns else first_step)

    @property
    def job(self) -> TrainJob:
        """The training. Its recipe uses smaller micro-batches once memory requires it."""
        return self.state.job

    def train(self) -> WorkerSummary:
        """Run everything from the set-up to the final weights."""
        job, place, plan = self.job, self.place, self.plan
        part = Part(
            plan, place.data_rank, place.data_parallel_size, self.first_step, job.recipe.total_steps, self.shares.now
        )
        split, may_draw = job.splits[TRAIN], job.config.deterministic
        cuts = lambda batch: cuts_of(batch, self.job.recipe.micro_batch_size)  # which may become smaller
        # before the model: its first batch takes seconds on a cold cluster, and the model is built meanwhile
        stream = self.input.open(split, part, collate_ahead(job.workload, split, cuts, may_draw=may_draw))
        setup: Setup | None = None
        try:
            with self.located():
                self.progress.enter(Phase.MODEL)
                setup = prepare(
                    job.workload, job.config, job.recipe, place, is_resumed=self.first_step > 0, varied=job.varied
                )
                self.limits.apply()  # the groups that the strategy has made are among them
                self.observers.begin(setup)
                self.reporter.begin(setup)
                self.callbacks.begin(setup)
                self.shares.watch(setup.parallel.module)
                self.fixed = FixedModel(setup, place)
                step = self._train_step(setup)
                self.clock.begin.end(MODEL)
                if self.checkpointing is not None:
                    self.checkpointing.begin(self._train_state(setup, step))
                    self.reporter.notes()
                if (verdict := self._steps(setup, step, stream)) is None:
                    setup.let_go()
                    raise LeftEarly(f"left cleanly after step {self.state.step}, whose checkpoint is complete")
                compiled = self._end(setup)
        finally:
            stream.close()
            self.shares.close()
            self.observers.close()
            if setup is not None:
                setup.undo.close()  # after an error: torch's switches are the process's
        summary = summary_of(
            self.state,
            place,
            setup,
            self.clock,
            self.reporter.guard,
            first_step=self.first_step,
            verdict=verdict,
            compilation=compiled,
            memory={**self.memory.found, **self.micro_sizes.search},
            noise=self.noise.values(),
            best=self.evaluations.best.values(),
            profile=self.profile.measurements,
            attributes=self.attributes,
        )
        self.reporter.emit(summary)
        return summary

    def _steps(self, setup: Setup, step: OptimizerStep, stream: StepStream) -> str | None:
        """Train to the end and return the verdict, or None if the run was asked to stop early."""
        state = self.state
        if self.probe is not None:
            self.probe.on_setup(setup)
        self.evaluations.prepare(self.job, setup)
        if verdict := state.verdict or self.evaluations.target_reached(state.step):
            return verdict
        if self.live is not None:
            self.live.report(self.reporter.emit, self.place, state.step)
        if self.live is not None and (half := self.live.unfinished()) is not None:
            is_over, verdict = self._finish_step(setup, half, stream, ends_epoch=self._is_between_epochs())
            if is_over:
                return verdict
        self.progress.enter(Phase.INPUT)
        first = next(stream, None)
        self.progress.enter(Phase.START)
        if first is None:  # resumed after its last step
            return "done"
        self._settle(setup, step, first)
        self.callbacks.started(state.step, self.plan.epochs(state.step), self.evaluations.metrics)
        self.clock.begin.end(FIRST_BATCH)
        self.clock.start(stream.waited_s)
        batch: RankBatch | None = first
        while batch is not None:
            if self._is_between_epochs():  # after a checkpoint that was taken there
                self.callbacks.epoch_starts(self.plan.epochs(state.step), self.evaluations.metrics)
            self._take(step, batch, setup, stream)
            is_meeting = setup.parallel.replicas_differ and setup.parallel.synchronises(state.step)
            ends_epoch = self._is_between_epochs()
            signals = self._know(is_meeting or ends_epoch or self.job.recipe.decides_after(state.step))
            state.verdict = state.verdict or self.callbacks.verdict(signals)
            self._keep(signals, is_complete=False)
            ends_epoch = ends_epoch and self._is_between_epochs()  # else steps were taken back
            is_over, verdict = self._finish_step(setup, signals, stream, ends_epoch=ends_epoch)
            if is_over:
                return verdict
            self.progress.enter(Phase.INPUT)
            batch = next(stream, None)
        return "done"

    def _finish_step(
        self, setup: Setup, signals: tuple[float, ...], stream: StepStream, *, ends_epoch: bool
    ) -> tuple[bool, str | None]:
        """Complete the last step: evaluate, call callbacks, save a checkpoint. Returns whether the training ends here,
        and its verdict, which is None if it was asked to stop early."""
        state, saves, verdict = self.state, self.checkpointing, self.state.verdict
        has_evaluated = verdict is None and self._evaluate_if_due(setup)
        if has_evaluated:
            self.clock.start(stream.waited_s)
            self.evaluations.check_target()
            verdict = self.evaluations.target_reached(state.step) or state.verdict
        if ends_epoch:
            self.callbacks.epoch_ended(self.plan.epochs(state.step), self.evaluations.metrics)
        if verdict is not None:
            return True, verdict
        self.progress.enter(Phase.CHECKPOINT)
        self._check_after_callbacks()
        before = saves.saved_at if saves is not None else 0.0
        if saves is not None and signals and saves.after_step(state.step, signals):
            return True, None
        if has_evaluated or ends_epoch or (saves is not None and saves.saved_at != before):
            self._keep(signals, is_complete=True)
        return False, None

    def _keep(self, signals: tuple[float, ...], *, is_complete: bool) -> None:
        """Keep the state in memory in case another worker is lost."""
        if self.live is not None and self.checkpointing is not None and self.checkpointing.state is not None:
            self.live.keep(self.checkpointing.state, self.job, self.state.step, signals, is_complete=is_complete)

    def _is_between_epochs(self) -> bool:
        """Whether the last step completed an epoch, for callbacks."""
        return self.callbacks.follows_epochs and self.plan.place(self.state.step)[1] == 0

    def _take(self, step: OptimizerStep, batch: RankBatch, setup: Setup, stream: StepStream) -> None:
        """Take one optimizer step and prepare the next: its learning rate and its share of the input."""
        number, num_rows = batch.step + 1, self.plan.num_rows(batch.step)
        setup.rate_scale.begin_step(number)
        learning_rate = float(setup.schedule.get_last_lr()[0]) * setup.rate_scale.factor
        self.shares.begin_step(number)
        with self.observers.during_step(number), setup.rate_scale.in_use(setup.optimizer):
            launched = step.launch(
                batch,
                num_rows=num_rows,
                want_norm=number % self.job.config.tracking.every_steps == 0,
                # whatever is decided together needs the sums of all ranks
                synchronises=setup.parallel.synchronises(number) or self.job.recipe.decides_after(number),
            )
        self.fixed.check(number)
        self.progress.enter(Phase.OTHER)
        self.observers.after_launch()
        sent_bytes = self.reporter.after_launch()
        setup.after_step(number)
        self.state.step = number
        self.progress.finish_step(number)
        if self.progress.steps_done == 1:
            self.limits.apply()
        if changed := self.shares.end_step(number, batch.num_rows):
            self.progress.enter(Phase.INPUT)
            stream.cut(number, self.shares.now)
            self.reporter.say(changed, step=number)
        self.progress.enter(Phase.COMMUNICATION)
        if len(self.under_way) >= self.ahead > 0:  # steps take the time that the device needs for them
            self.under_way[-self.ahead][0].wait()
        step_s, waited_s = self.clock.tick(stream.waited_s)
        self.progress.enter(Phase.OTHER)
        facts = {
            "step": number,
            "num_samples": num_rows,
            "learning_rate": learning_rate,
            "epoch": self.plan.epochs(number),
            "step_time_s": step_s,
            "input_wait_s": waited_s,
            "world_size": self.place.world_size,
            "sent_bytes": sent_bytes,
        }
        self.under_way.append((launched, facts))

    def _know(self, knows_all: bool) -> tuple[float, ...]:
        """Process the results of finished steps, in order, and return the sum of their signals. knows_all: wait for all
        steps. A step that ends the training sets the verdict."""
        signals: tuple[float, ...] = ()
        while len(self.under_way) > (0 if knows_all else self.ahead):
            launched, facts = self.under_way.popleft()
            taken = launched.result(**facts)
            self.observers.after_step(taken)
            self.reporter.after_step(taken)  # with the measurements of the observers
            if self.live is not None:
                self.live.add(taken)
            self.callbacks.after_step(taken)
            if self.state.ends_with(taken, partial(self.input.look_at_step, self.job.splits[TRAIN], self.plan)):
                self.under_way.clear()  # they changed nothing
            reported = self.callbacks.check_rates(self.fixed.check_shapes(taken.signals))
            signals = tuple(map(sum, zip(signals, reported, strict=True))) if signals else reported
            # whoever leaves, or saves by the clock, does so with what is known of every step
            knows_all = knows_all or any(signals)
        return signals

    def _evaluate_if_due(self, setup: Setup, *, at_end: bool = False) -> bool:
        evaluators = self.evaluations.due(self.state.step, at_end=at_end)
        if not evaluators:
            return False
        self.progress.enter(Phase.COMMUNICATION)
        if self.checkpointing is not None and (setup.parallel.replicas_differ or setup.averaging.is_on):
            self.checkpointing.before_update()  # a mean takes the place of the weights while it is evaluated
        self.callbacks.evaluation_starts(self.evaluations.metrics)
        record = self.evaluations.run(self.state.step, evaluators)
        if self.place.rank == 0:
            self.reporter.emit(record)
        if self.live is not None:
            self.live.add(record)
        if not at_end and (moved := self.evaluations.follow()):  # a longer training may have none at its end
            self.reporter.say(moved, step=self.state.step)
        self.state.verdict = self.callbacks.evaluated(record, at_end=at_end) or self.state.verdict
        if self.checkpointing is not None:
            is_last = self.state.step >= self.job.recipe.total_steps
            self.checkpointing.evaluated(self.state.step, self.evaluations.metrics, is_last=at_end or is_last)
        return True

    def _check_after_callbacks(self) -> None:
        """Raise an error if a callback has made a change that the checkpoint about to be taken would not contain."""
        if self.callbacks.callbacks:
            self.fixed.check(self.state.step + 1)

    def _train_state(self, setup: Setup, step: OptimizerStep) -> TrainState:
        """The complete state of the training, for its checkpoints."""
        kept = LoopCheckpoint(self.state, step, self.evaluations, self.clock, self.noise, self.shares, self.micro_sizes)
        seed, workload = self.job.config.seed, self.job.workload
        has_state = callable(getattr(workload, "state_dict", None)) or self.callbacks.have_state
        unsaved = str if has_state else self.fixed.unsaved
        return TrainState(setup, self.place, workload, seed, kept.values, kept.restore, self.callbacks, unsaved)

    def _train_step(self, setup: Setup) -> OptimizerStep:
        saves, live = self.checkpointing, self.live

        def signals() -> tuple[float, ...]:
            if live is not None:
                live.after_forward(self.place, self.state.step + 1)
            return (*(saves.signals() if saves else ()), *self.callbacks.signals(), *self.fixed.signals())

        def before_update() -> None:
            if saves is not None:
                saves.before_update()
            if live is not None:
                live.before_update(setup.parallel.module)

        step = train_step(
            self.job.workload,
            setup,
            self.job.config,
            self.job.recipe,
            self.place,
            gives_tuples=self.job.splits[TRAIN].gives_tuples,
            probe=self.probe,
            signals=signals,
            before_update=before_update,
            enter=self.progress.enter,
            on_halved=lambda recipe: self._use(recipe, setup, was_halved=True),
            ahead=self.ahead,
        )
        step.num_updates = self.state.step
        return step

    def _settle(self, setup: Setup, step: OptimizerStep, first: RankBatch) -> None:
        """Inspect the first batch, then settle everything that depends on it: micro-batches and how noise is
        measured."""
        job, gives_tuples = self.job, self.job.splits[TRAIN].gives_tuples
        counted = None
        # members of an earlier group have checked this workload; several losses are also put in order by the check
        is_checked = self.live is not None and self.live.follows and self.first_step > 0
        with eagerly() if setup.compilation else contextlib.nullcontext():
            if not is_checked or losses_of(job.workload) is not None:
                counted = check_first_batch(
                    job.workload,
                    job.config,
                    first,
                    setup,
                    self.place,
                    gives_tuples=gives_tuples,
                    micro_batch_size=self.micro_sizes.most_before_search(self.job.recipe),
                    evaluated=[e.name for e in self.evaluations.evaluators],
                )
        if self.first_step == 0 and counted is not None:
            # the loss scale of fp16 is meant for a mean: over a sum of many tokens the first steps would overflow
            step.count_per_row = counted
        found = self.micro_sizes.settle(
            self.job.recipe, job.workload, setup, first, gives_tuples=gives_tuples, enter=self.progress.enter
        )
        if found is not None:
            self._use(found, setup)
        step.recipe = self.job.recipe
        step.noise = self.noise.start(job.config, self.job.recipe, setup, self.place, self.reporter.say)

    def _use(self, recipe: Recipe, setup: Setup, *, was_halved: bool = False) -> None:
        """Continue with smaller micro-batches, also in evaluations."""
        if was_halved:
            self.micro_sizes.say_halved(self.job.recipe, recipe, step=self.state.step)
        self.micro_sizes.now = recipe.micro_batch_size
        self.state.job = self.job.changed(recipe=recipe)
        self.evaluations.prepare(self.job, setup)

    def _end(self, setup: Setup) -> dict[str, Any]:
        """Evaluate and save for the last time. Returns the compiled parts."""
        is_new = self._evaluate_if_due(setup, at_end=True)
        if not is_new and self.evaluations.step == self.state.step == self.first_step and self.place.rank == 0:
            self.reporter.emit(EvaluationRecord(self.state.step, dict(self.evaluations.metrics), 0.0))  # after its end
        self._check_after_callbacks()
        if self.checkpointing is not None:
            self.checkpointing.finish(self.state.step)
        self.callbacks.ended(self.evaluations.metrics)
        compiled = self.compilation.report()
        if attributes := self.fixed.attributes():
            self.attributes = attributes
            text = ", ".join(f"{name.replace('/', '.')} = {value}" for name, value in list(attributes.items())[:5])
            self.reporter.say(f"attributes changed during training: {text}; load, evaluate and predict set them again")
        self.progress.enter(Phase.END)
        hand_on_weights(setup, self.save_weights, self.job.config, reporter=self.reporter, step=self.state.step)
        return compiled
