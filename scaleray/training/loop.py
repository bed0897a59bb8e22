"""The training loop of one worker. It knows neither Ray nor MLflow: records go to a callable.

Runs in this process, under plain gloo processes and inside Ray Train alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import resource
import statistics
import time
import traceback
import warnings
from array import array
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from scaleray.data import Part, PartStream, RankBatch, StepPlan, StepStream
from scaleray.errors import (
    ConfigError,
    LeftEarly,
    NonFiniteLossError,
    PeerLostError,
    RunFailedError,
    ScaleRayError,
    StepFailedError,
)
from scaleray.records import EvaluationRecord, EventRecord, StepRecord, SystemRecord, WorkerMessage, WorkerSummary
from scaleray.reproducibility.fingerprint import accelerators, cpu_model
from scaleray.scaling.recipe import Recipe, with_micro_size
from scaleray.scaling.shares import described
from scaleray.training import memory_report, micro_batch_finder
from scaleray.training.checkpointing import Checkpointing
from scaleray.training.compilation import compile_error, eagerly
from scaleray.training.evaluation import Evaluator
from scaleray.training.fine_tuning import merged
from scaleray.training.job import TRAIN, Split, TrainJob
from scaleray.training.live_memory import is_out_of_memory
from scaleray.training.model_setup import Setup, prepare
from scaleray.training.place import Place
from scaleray.training.progress import COLLECTIVES, Progress
from scaleray.training.shares import WorkerShares
from scaleray.training.state import PROGRESS, TrainState
from scaleray.training.step import Probe, StepResult, TrainStep, check_first_batch, explained
from scaleray.training.system_metrics import SystemMetrics
from scaleray.workload import user_traceback

Emit = Callable[[WorkerMessage], None]
MAX_SKIPPED_IN_A_ROW = 10  # with `skip`: a run that only skips is not training any more


class OpenStream(Protocol):
    """Opens this worker's batches of a split."""

    def __call__(self, split: Split, part: Part) -> StepStream: ...


def run(
    job: TrainJob, place: Place, *, open_stream: OpenStream, emit: Emit, save_weights: Callable[[dict[str, Any]], None] | None = None,
    probe: Probe | None = None, checkpointing: Checkpointing | None = None,
    progress: Progress | None = None,
) -> WorkerSummary:  # fmt: skip
    """Train one worker's share to the end. Collective: every worker of the group calls it with the same job.

    save_weights: called on rank 0 with the final weights. probe: looks at every step. checkpointing: saves
    the state and says where to start; without it a run starts at its first step. Raises RunFailedError naming rank, node and step; errors
    that the user can mend (UsageError) come as they are.
    """
    return _Run(job, place, open_stream, emit, save_weights, probe, checkpointing, progress or Progress()).train()


class _Run:
    def __init__(
        self, job: TrainJob, place: Place, open_stream: OpenStream, emit: Emit, save_weights: Any, probe: Probe | None,
        checkpointing: Checkpointing | None, progress: Progress,
    ) -> None:  # fmt: skip
        self.job, self.open_stream, self.emit = job, open_stream, emit
        self.place = dataclasses.replace(place, model_parallel_size=job.config.model_parallel_size)
        self.save_weights, self.probe, self.checkpointing = save_weights, probe, checkpointing
        self.config, self.recipe = job.config, job.recipe
        self.step = self.first_step = 0
        self.count_per_row = 1.0
        self.progress = progress
        self.clock = _Clock()
        self.nonfinite_steps = self.nonfinite_in_a_row = 0
        self.metrics: dict[str, float] = {}
        self.evaluated_at = -1
        self.verdict: str | None = None
        self.train_step: TrainStep | None = None
        self.first_step_s = math.nan
        self.sent_bytes = 0.0
        self.said = 0
        self.compiled: dict[str, Any] = {}
        self.memory: dict[str, Any] = {}
        self.search: dict[str, Any] = {}
        self.micro_batch_size: int | None = None  # where it is not the config's
        self.system = SystemMetrics() if self.config.tracking.system_metrics and place.local_rank == 0 else None
        self.sampled_at = time.monotonic()

    def train(self) -> WorkerSummary:
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
                setup = prepare(self.job.workload, self.config, self.recipe, self.place, is_resumed=self.first_step > 0)
                self._say_notes(setup)
                for note in setup.compilation.notes if setup.compilation and self.place.rank == 0 else ():
                    self.emit(EventRecord(note))
                self.shares.watch(setup.parallel.module)
                if self.checkpointing is not None:
                    self.checkpointing.begin(self.state(setup))
                    self._say_notes(setup)
                verdict = self._steps(setup, stream, plan)
                if verdict is None:
                    setup.close()
                    raise LeftEarly(f"left in good order after step {self.step}, whose checkpoint is complete")
                has_evaluated = self._evaluate_if_due(at_end=True)
                if not has_evaluated and self.metrics and self.step == self.first_step and self.place.rank == 0:
                    self.emit(EvaluationRecord(self.step, dict(self.metrics), 0.0))  # resumed after its end
                if self.checkpointing is not None:
                    self.checkpointing.finish(self.step, self.metrics)
                self.compiled = setup.compilation.report() if setup.compilation else {}
                weights = setup.parallel.full_state_dict() if self.config.checkpoint.save_final else {}
                if self.save_weights is not None and self.place.rank == 0 and weights:
                    self.save_weights(merged(weights, self.config.fine_tuning))
                setup.close()
        finally:
            stream.close()
            self.shares.close()
            if setup is not None:
                setup.undo.close()  # after an error: torch's switches are the process's
        summary = self._summary(setup, plan, stream, verdict)
        self.emit(summary)
        return summary

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
            "metrics": self.metrics, "evaluated_at": self.evaluated_at, "verdict": self.verdict,
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
        self.evaluated_at = progress["evaluated_at"]
        self.metrics = dict(progress["metrics"])
        self.verdict = progress.get("verdict")
        self.clock.total_s = progress.get("training_time_s", 0.0)
        self.micro_batch_size = progress.get("micro_batch_size")

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
        self.evaluators = [self._evaluator(s, setup) for s in self.job.evaluation_splits()]
        target = self.config.stop.at
        if target is not None and target.metric.partition("/")[0] not in {e.name for e in self.evaluators}:
            raise _unknown_target(str(target), [f"{e.name}/loss" for e in self.evaluators])
        if self.verdict is not None:
            return self.verdict  # it had stopped for good before it was interrupted
        if target is not None and self.evaluated_at == self.step and target.is_reached(self.metrics):
            return f"target reached: {target}"
        first = next(stream, None)
        if first is None:
            return "done"  # resumed after its last step
        with eagerly() if setup.compilation else contextlib.nullcontext():
            check_first_batch(
                self.job.workload, setup.parallel.module, first, setup, self.place, gives_tuples=split.gives_tuples
            )
        step.recipe = self._find_micro_size(setup, first, gives_tuples=split.gives_tuples)
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
            if changed := self.shares.end_step(self.step, batch.num_rows):
                self.progress.enter("input")
                stream.cut(self.step, self.shares.now)
                if self.place.rank == 0:
                    self.emit(EventRecord(changed, step=self.step))
            step_s, waited_s = self.clock.tick(stream.waited_s)
            if self.step == self.first_step + 1:
                self.first_step_s = time.time() - self.job.started_at
                self._check_compilation(setup)
            sent_bytes = setup.parallel.bytes_sent()
            if self.place.rank == 0:
                self.emit(
                    StepRecord(
                        step=self.step, loss=result.loss, count=result.count, num_samples=plan.num_rows(batch.step),
                        learning_rate=float(learning_rate), grad_norm=result.grad_norm, step_time_s=step_s, input_wait_s=waited_s,
                        epoch=plan.epochs(self.step), is_finite=result.is_finite,
                        loss_scale=scaler.get_scale() if scaler.is_enabled() else None, world_size=self.place.world_size,
                        sent_bytes=sent_bytes - self.sent_bytes,
                        more={**setup.parallel.metrics(), **(setup.pruning.metrics() if setup.pruning else {})},
                    )
                )  # fmt: skip
            self.sent_bytes = sent_bytes
            self._say_notes(setup)
            self._sample_system()
            if result.nonfinite_steps and self._stops_at(result):
                self.verdict = f"stopped: {self._nonfinite(result)}"
                return self.verdict
            if self._evaluate_if_due():
                self.clock.start(stream.waited_s)
            if target is not None and self.evaluated_at == self.step:
                if target.metric not in self.metrics:
                    raise _unknown_target(str(target), sorted(self.metrics))
                if target.is_reached(self.metrics):
                    return f"target reached: {target}"
            self.progress.enter("checkpoint")
            if saves and result.signals and saves.after_step(self.step, result.signals, self.metrics):
                return None
        return "done"

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
        for text in setup.compilation.check():
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
        self.evaluators = [self._evaluator(s, self._setup) for s in self.job.evaluation_splits()]

    def _eagerly_on_cpu(self, setup: Setup) -> contextlib.AbstractContextManager[Any]:
        # tensors inside compiled code cannot be counted
        return eagerly() if setup.compilation and self.place.device.type == "cpu" else contextlib.nullcontext()

    @contextlib.contextmanager
    def _measured(self, setup: Setup) -> Iterator[None]:
        """Look at the memory of the second step, the first that begins with the optimizer's state."""
        if self.memory or self.step != self.first_step + 1:
            yield
            return
        with memory_report.watching(setup, self.place.device) as memory:
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

    def _stops_at(self, result: StepResult) -> bool:
        self.nonfinite_steps += result.nonfinite_steps
        policy = self.config.on_nonfinite
        if policy == "raise":
            raise NonFiniteLossError(
                f"{self._nonfinite(result)}. "
                "Lower the learning rate, clip gradients (optimizer.clip_norm), or set on_nonfinite to skip or stop."
            )
        if policy == "stop":
            return True
        if result.nonfinite_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise NonFiniteLossError(
                f"{result.nonfinite_in_a_row} steps in a row up to step {self.step} were not finite and skipped: the model is lost"
            )
        return False

    def _nonfinite(self, result: StepResult) -> str:
        """What was not finite, and where."""
        if not math.isfinite(result.loss):
            return f"the loss became {result.loss} at step {self.step}"
        if result.grad_norm is not None and not math.isfinite(result.grad_norm):
            return f"the gradient norm became {result.grad_norm} at step {self.step}"
        # replicas that train apart learn of each other's losses only where they meet
        return f"the loss or gradient of a worker was not finite in {result.nonfinite_steps} step(s) up to step {self.step}"

    def _evaluate_if_due(self, *, at_end: bool = False) -> bool:
        every = self.recipe.evaluate_every_steps
        due = at_end or (every is not None and self.step % every == 0)
        if not due or self.evaluated_at == self.step or not self.evaluators:
            return False
        started = time.perf_counter()
        self.progress.enter("synchronise")
        parallel = self._setup.parallel
        if self.checkpointing is not None and parallel.replicas_differ:
            self.checkpointing.before_update()  # the mean takes the replica's place while it is evaluated
        with parallel.averaged(False):
            parallel.before_evaluation()
            for evaluator in self.evaluators:
                self.progress.enter("input")
                self.metrics.update(evaluator.run())
        self.evaluated_at = self.step
        if self.place.rank == 0:
            self.emit(EvaluationRecord(self.step, dict(self.metrics), time.perf_counter() - started))
        return True

    def _evaluator(self, split: Split, setup: Setup) -> Evaluator:
        self._setup = setup
        plan = self.job.evaluation_plan(split)
        part = Part(plan, self.place.data_rank, self.place.data_size, 0, plan.steps_per_epoch)
        return Evaluator(
            split.name, self.job.workload, setup, self.place, lambda: self.open_stream(split, part),
            gives_tuples=split.gives_tuples, rank_bytes=split.num_rows * split.row_bytes // self.place.data_size,
            enter=self.progress.enter,
        )  # fmt: skip

    def _sample_system(self) -> None:
        if self.system is None or time.monotonic() - self.sampled_at < max(5.0, self.config.tracking.interval_s):
            return
        self.sampled_at = time.monotonic()
        self.emit(SystemRecord(self.place.node, self.step, self.system.sample()))

    @contextlib.contextmanager
    def _located(self) -> Iterator[None]:
        where = f"rank {self.place.rank} on {self.place.node}"
        try:
            yield
        except (LeftEarly, PeerLostError):
            raise
        except RunFailedError as exc:
            raise type(exc)(f"{where}: {exc}") from exc
        except ScaleRayError:
            raise
        except Exception as exc:
            if self.place.world_size > 1 and is_lost_peer(exc):
                first = str(exc).strip().splitlines()[0]
                raise PeerLostError(
                    f"{where}, step {self.step + 1}: another worker is gone or did not answer: {first}"
                ) from exc
            text = f"{where}, step {self.step + 1}:\n  {user_traceback(exc)}"
            if is_out_of_memory(exc):
                text += f"\n  {self._memory_advice()}"
            failed = StepFailedError(text, self.progress.steps_done, self.step)
            raise (explained(exc) or compile_error(exc) or failed) from exc

    def _memory_advice(self) -> str:
        size = self.recipe.micro_batch_size
        if size == 1:
            return (
                "Out of memory with single rows: activations.checkpointing full, or a strategy that shards the model."
            )
        backs_off = self.config.memory.on_out_of_memory == "halve"
        why = "Ranks cannot give up a pass in which they communicate. " if backs_off else ""
        more = "" if backs_off else ", --memory.on-out-of-memory halve"
        return (
            f"Out of memory with micro-batches of {size} rows. {why}Use --batch.micro-size {size // 2}, "
            f"--memory.find-micro-size{more}, or activations.checkpointing."
        )

    def _summary(self, setup: Setup, plan: StepPlan, stream: PartStream, verdict: str) -> WorkerSummary:
        steady = self.clock.steady_state()
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
            peak_memory_bytes=peak_memory_bytes(self.place.device),
            nonfinite_steps=self.nonfinite_steps,
            sample_order=plan.promise,
            strategy=self.recipe.strategy,
            device=str(self.place.device),
            model={"num_parameters": setup.num_parameters, "initial_hash": setup.initial_hash},
            hardware={"cpu": cpu_model(), "accelerators": accelerators()},
            compilation=self.compiled,
            memory={**self.memory, **({"micro_batch": self.search} if self.search else {})},
        )


class _SteadyState:
    def __init__(self, first: int, times: array[float], waits: array[float]) -> None:
        self.first, self.total_s, self.median_s = first, sum(times), statistics.median(times)
        self.wait_share = sum(waits) / self.total_s


class _Clock:
    """Times from step to step, records and all, without evaluation. Steps are counted from 0."""

    def __init__(self) -> None:
        self.times, self.waits = array("d"), array("d")
        self.total_s = 0.0

    def start(self, waited_s: float) -> None:
        self._started, self._waited = time.perf_counter(), waited_s

    def tick(self, waited_s: float) -> tuple[float, float]:
        """(time since the last tick or start, of which waiting for input), in seconds."""
        now = time.perf_counter()
        step_s, wait_s = now - self._started, waited_s - self._waited
        self._started, self._waited = now, waited_s
        self.times.append(step_s)
        self.waits.append(wait_s)
        self.total_s += step_s
        return step_s, wait_s

    def steady_state(self) -> _SteadyState | None:
        """Without the first 20 % of the steps, at least 10 and at most half; None for fewer than 2 steps."""
        count = len(self.times)
        first = min(max(10, count // 5), count // 2)
        return _SteadyState(first, self.times[first:], self.waits[first:]) if count >= 2 else None


def is_lost_peer(exc: BaseException) -> bool:
    """Whether torch says that a collective could not be completed."""
    if isinstance(exc, (torch.distributed.DistBackendError, torch.distributed.DistNetworkError)):
        return True
    words = (
        "gloo/transport", "onnection closed", "onnection reset", "Timed out waiting", "NCCL", "Socket closed",
        "caused pair closure",
    )  # fmt: skip
    if not isinstance(exc, RuntimeError) or not any(word in str(exc) for word in words):
        return False
    # the same words may come from the user's own network: what torch says of collectives names its sources, or comes
    # out of a collective (DDP's own in a forward pass included) or a backward pass
    files = [frame.filename for frame in traceback.extract_tb(exc.__traceback__)][-3:]
    return "gloo/transport" in str(exc) or any(
        part in file for part in (*COLLECTIVES, "torch/autograd/") for file in files
    )


def peak_memory_bytes(device: torch.device) -> int:
    """Peak of allocated device memory, or of this process's resident memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def _unknown_target(target: str, known: list[str]) -> ConfigError:
    return ConfigError(
        "stop.at", target, "no evaluation measures that", f"there are: {', '.join(known) or 'no splits'}"
    )
