"""Metrics over all workers, from sums and counts, for one split and for all splits that are due."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from scaleray.config import RunConfig
from scaleray.data import Input, Part, RankBatch, Split
from scaleray.data.source_interface import rows_in
from scaleray.errors import ConfigError, WorkloadError
from scaleray.parallel.context import whole_sequences
from scaleray.records.phases import Phase
from scaleray.records.run_record import EvaluationRecord
from scaleray.strategies.contract.later import Later
from scaleray.strategies.contract.parallel import Run
from scaleray.training.health.live_memory import is_out_of_memory
from scaleray.training.health.worker_errors import is_lost_peer
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.model_setup import Setup
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.setup.weighted_losses import has_batch_loss, has_loss
from scaleray.training.step.metric_objects import MetricObjects
from scaleray.training.step.micro_batches import collate_ahead, user_batch
from scaleray.training.step.one_pass import OnePass
from scaleray.training.step.sum_and_count import check_sum_and_count
from scaleray.training.step.whole_batch import EvaluatedBatchLoss
from scaleray.training.step.whole_copy import WholeCopy
from scaleray.workload import call_user_code, outputs_go_to, own_method


class NamedSums:
    """Adds up sums and counts over all workers. Takes one all-reduce, unless a name appears for the first time."""

    def __init__(self, place: RankContext) -> None:
        self.place = place
        self._known: tuple[str, ...] = ()  # the same on all workers

    def __call__(self, own: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        """(sum, count) over all workers, for every name that at least one of them has now. Collective."""
        if self.place.world_size == 1:
            return {name: own[name] for name in sorted(own)}
        while True:
            has_new = bool(own.keys() - set(self._known))
            values = [(*own[name], 1.0) if name in own else (0.0, 0.0, 0.0) for name in self._known]
            any_new, *summed = self.place.all_reduce([float(has_new), *(value for three in values for value in three)])
            if not any_new:
                break
            everyone = self.place.gathered(sorted(own))
            self._known = tuple(sorted({*self._known, *(name for theirs in everyone for name in theirs)}))
        three = zip(self._known, summed[::3], summed[1::3], summed[2::3], strict=True)
        return {name: (total, count) for name, total, count, holders in three if holders}


class OwnEvaluation:
    """Calls a workload's `evaluate`, if it has one, in which each worker may run any number of passes.

    If passes communicate, workers use whole copies of the model, and the workers of one replica, which have the same
    rows, divide its batches among them. Raises ConfigError or WorkloadError if there is not enough memory for copies.
    """

    def __init__(self, job: TrainJob, setup: Setup, place: RankContext) -> None:
        self.setup, self.place = setup, place
        self._evaluate = own_method(job.workload, "evaluate")
        self._whole: WholeCopy | None = None
        self._run: Run = setup.parallel.run_alone
        if self._evaluate is not None and setup.parallel.forward_is_collective and place.world_size > 1:
            self._whole = WholeCopy(job, setup, place)
            self._whole.check_fits("evaluate()")

    @contextlib.contextmanager
    def with_weights(self) -> Iterator[None]:
        """Context of an evaluation that uses the weights at its beginning. Collective."""
        if self._whole is None:
            yield
            return
        with self._whole.filled() as model:
            self._run = lambda computation: computation(model)
            yield

    def sums(self, split: str, batches: Iterable[Any]) -> dict[str, Any]:
        """Sums and counts of this rank by name; empty for a workload without `evaluate`. batches: those of this rank,
        without placeholders."""
        if self._evaluate is None:
            return {}
        evaluate, place = self._evaluate, self.place
        replica = place.mesh.replica(place.data_rank)
        used = itertools.islice(batches, replica.index(place.rank), None, len(replica))

        def measure(model: nn.Module) -> Any:
            return evaluate(model, used, split=split, rank=place.rank, world_size=place.world_size)

        with self.setup.precision.autocast(), whole_sequences():
            given = call_user_code(lambda: self._run(measure), what="evaluate()", doing=f"evaluating {split}")
        found = {}
        for name, pair in dict(given or {}).items():
            if isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], (int, float)):
                pair = (torch.tensor(float(pair[0]), dtype=torch.float64), pair[1])  # counted, or without rows
            found[str(name)] = check_sum_and_count(pair, what=f"evaluate()[{name!r}]")
        return found


class Best:
    """Best value of an evaluated metric, `stop.watch` or else `checkpoint.best`; does nothing without either.

    value, step: the best value so far, and its step. num_since: number of evaluations since then."""

    def __init__(self, config: RunConfig) -> None:
        watched = config.stop.watch or config.checkpoint.best
        self.metric, _, direction = (watched or "").partition(" ")
        self.sign = 1.0 if direction == "max" else -1.0
        self.key = "stop.watch" if config.stop.watch else "checkpoint.best"
        self.patience = config.stop.patience
        self.value, self.step, self.num_since = math.nan, -1, 0

    def take(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the evaluation after `step`. One without the metric, or with NaN, is not an improvement."""
        if not self.metric:
            return
        value = metrics.get(self.metric, math.nan)
        if self.sign * value > self.sign * self.value or (math.isnan(self.value) and not math.isnan(value)):
            self.value, self.step, self.num_since = value, step, 0
        else:
            self.num_since += 1

    def verdict(self) -> str | None:
        """Reason for ending the training if patience is exhausted."""
        if self.patience is None or self.num_since < self.patience:
            return None
        was = f"{self.value:g} after step {self.step}" if self.step >= 0 else "not measured"
        return f"no better {self.metric} in {self.num_since} evaluations: the best was {was}"

    def values(self) -> dict[str, Any]:
        """The best evaluation, for the record; empty before the first one."""
        return {"metric": self.metric, "value": self.value, "step": self.step} if self.step >= 0 else {}

    def state(self) -> dict[str, Any] | None:
        """State for a checkpoint."""
        if not self.metric:
            return None
        value = None if math.isnan(self.value) else self.value
        return {"metric": self.metric, "value": value, "step": self.step, "num_since": self.num_since}

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Continue from `state`, unless the metric is a different one."""
        if state and state["metric"] == self.metric:
            self.value = math.nan if state["value"] is None else state["value"]
            self.step, self.num_since = state["step"], state["num_since"]


KEPT_BYTES = 2**26  # a split up to this size per worker is read once and kept, as an execution costs 0.3 s


class Evaluations:
    """A run's evaluations.

    metrics: results of the last one. step: number of the step before it; -1 before the first evaluation."""

    def __init__(self, place: RankContext, input: Input, enter: Callable[[Phase], object], config: RunConfig) -> None:
        self.place, self.input, self.enter, self.best = place, input, enter, Best(config)
        self.metrics: dict[str, float] = {}
        self.step = -1
        self._own: OwnEvaluation | None = None
        self._followed: str | None = None

    def prepare(self, job: TrainJob, setup: Setup) -> None:
        """Use this job and its micro-batch size for all further evaluations. Collective.

        Raises ConfigError for a split that does not exist, and for an `evaluate` that has no room under the strategy.
        """
        if self._own is None:
            self._own = OwnEvaluation(job, setup, self.place)
        self.setup, self.target, self.every = setup, job.config.stop.at, job.recipe.evaluate_every_steps
        self.only_at_end = job.config.evaluation.only_at_end
        self.evaluators = [self._evaluator(job, split) for split in job.evaluation_splits()]
        if self.only_at_end is not None and self.only_at_end not in (evaluator.name for evaluator in self.evaluators):
            raise ConfigError("evaluation.test", "at_end", "the workload has no such split", "leave it out")
        if self.best.patience is not None:
            check_split(self.best.key, self.best.metric, job)
        if self.target is not None:
            check_split("stop.at", str(self.target), job)
        self._followed = _followed_metric(job, setup.schedule)

    def due(self, step: int, *, at_end: bool) -> list[Evaluator]:
        """Evaluators of the splits to evaluate after `step`, without those already evaluated after it."""
        if not at_end and (self.every is None or step % self.every != 0):
            return []
        measured = {metric.partition("/")[0] for metric in self.metrics} if self.step == step else set()
        return [
            evaluator
            for evaluator in self.evaluators
            if evaluator.name not in measured and (at_end or evaluator.name != self.only_at_end)
        ]

    def run(self, step: int, evaluators: Sequence[Evaluator]) -> EvaluationRecord:
        """Run these evaluators, on the mean of the parameters if replicas differ. Collective."""
        assert self._own is not None
        started = time.perf_counter()
        parallel = self.setup.parallel
        with parallel.averaged(False), self.setup.averaging.in_place(), self._own.with_weights():
            parallel.before_evaluation()
            found: dict[str, float] = {}
            for evaluator in evaluators:
                self.enter(Phase.INPUT)
                found.update(evaluator.run())
        if self.step != step:
            self.best.take(step, found)
            self.metrics = {}  # nothing of older evaluations: a metric belongs to its step
        self.metrics, self.step = {**self.metrics, **found}, step
        return EvaluationRecord(step, dict(self.metrics), time.perf_counter() - started)

    def follow(self) -> str | None:
        """Update a learning rate that follows evaluations, using the last one. Returns the new rate if it changed.
        Raises ConfigError if the evaluation lacks the metric."""
        if self._followed is None:
            return None
        if self._followed not in self.metrics:
            raise unknown_metric("schedule.watch", self._followed, self.metrics)
        schedule: Any = self.setup.schedule
        before = float(schedule.get_last_lr()[0])
        schedule.follow_evaluation(self.metrics[self._followed])
        now = float(schedule.get_last_lr()[0])
        return None if now == before else f"{self._followed} is on a plateau: learning rate {before:g} -> {now:g}"

    def check_target(self) -> None:
        """Raise ConfigError if the target's metric was not measured."""
        if self.target is not None and self.target.metric not in self.metrics:
            raise unknown_metric("stop.at", str(self.target), self.metrics)
        if self.best.patience is not None and self.best.metric not in self.metrics:
            raise unknown_metric(self.best.key, self.best.metric, self.metrics)

    def target_reached(self, step: int) -> str | None:
        """Verdict of a run if its evaluation after `step` has reached the target or exhausted the patience."""
        if self.step != step:
            return None
        if self.target is not None and self.target.is_reached(self.metrics):
            return f"target reached: {self.target}"
        return self.best.verdict()

    def _evaluator(self, job: TrainJob, split: Split) -> Evaluator:
        plan = job.evaluation_plan(split)
        part = Part(plan, self.place.data_rank, self.place.data_parallel_size, 0, plan.steps_per_epoch)
        rank_bytes = split.num_rows * split.row_bytes // self.place.data_parallel_size
        ahead = collate_ahead(job.workload, split, whole, may_draw=job.config.deterministic)
        if rank_bytes <= KEPT_BYTES:
            ahead = None  # kept batches are made again each time, as a metric may change what it is given
        return Evaluator(
            split.name,
            job.workload,
            self.setup,
            self.place,
            lambda: self.input.open(split, part, ahead),
            gives_tuples=split.gives_tuples,
            rank_bytes=rank_bytes,
            own=self._own,
            enter=self.enter,
            global_batch_size=job.recipe.global_batch_size,
        )


class Evaluator:
    """Evaluates one split. `open_stream` returns this worker's batches of it, in file order. global_batch_size: number
    of rows over which a loss over the whole batch is computed."""

    def __init__(
        self,
        name: str,
        workload: Any,
        setup: Setup,
        place: RankContext,
        open_stream: Callable[[], Iterable[RankBatch]],
        *,
        gives_tuples: bool,
        rank_bytes: int,
        own: OwnEvaluation | None = None,
        enter: Callable[[Phase], object] = lambda phase: None,
        global_batch_size: int = 1,
    ) -> None:
        self.name, self.workload, self.setup, self.place = name, workload, setup, place
        self.gives_tuples, self.enter = gives_tuples, enter
        self._open_stream, self._own = open_stream, own
        self._sums = NamedSums(place)
        self._objects = MetricObjects(workload, place, name)
        self._needs_gradients = False
        self._whole = EvaluatedBatchLoss(workload, place, global_batch_size) if has_batch_loss(workload) else None
        self._keeps = rank_bytes <= KEPT_BYTES
        self._kept: list[RankBatch] | None = None

    def run(self) -> dict[str, float]:
        """Compute `name/loss` and the workload's metrics, over every row of the split once. Collective."""
        module = self.setup.parallel.module
        totals: dict[str, torch.Tensor] = {}  # sum and count on the device, which is read once
        self._objects.reset()
        with evaluation_mode(module):
            for batch in self._batches():
                self.enter(Phase.EVALUATION)  # with every batch, or a long evaluation would look like a hang
                with self._aside() if not batch.num_rows else contextlib.nullcontext():
                    measured = self._measure(batch)
                for name, (total, count) in measured.items():
                    if name not in totals:
                        totals[name] = torch.zeros(2, dtype=torch.float64, device=self.place.device)
                    if batch.num_rows:  # else a placeholder row
                        totals[name][0] += total.detach()
                        totals[name][1] += count
                self.enter(Phase.INPUT)
            if self._whole is not None and "loss" in totals:
                totals["loss"] += self._whole.rest()
            own = self._own.sums(self.name, self._with_rows()) if self._own is not None else {}
            if taken := own.keys() & (totals.keys() | self._objects.names):
                raise WorkloadError.problem(
                    f"evaluate()[{min(taken)!r}]", "has the same name as a result of metrics()", "use another"
                )
            self.enter(Phase.COMMUNICATION)
            own.update((own_method(self.workload, "end_of_split") or dict)())
        for name, (total, count) in own.items():
            totals[name] = torch.tensor([float(total), float(count)], dtype=torch.float64, device=self.place.device)
        result = {f"{self.name}/{name}": value for name, value in self._objects.values().items()}
        numbers = iter(Later(torch.cat(list(totals.values()))).read() if totals else [])
        for name, (total, count) in self._sums({name: (next(numbers), next(numbers)) for name in totals}).items():
            if count <= 0:
                raise WorkloadError(
                    f"the count of {self.name}/{name}", count, "it must be above 0 over the whole split"
                )
            result[f"{self.name}/{name}"] = total / count
        return result

    def _aside(self) -> contextlib.AbstractContextManager[Any]:
        """Context for passing a placeholder through the model, for workloads that accumulate their own measurements."""
        aside = own_method(self.workload, "aside")
        return aside() if aside is not None else contextlib.nullcontext()

    def _measure(self, batch: RankBatch) -> dict[str, Any]:
        rows = self._rows(batch)
        once = OnePass([rows] if not self.setup.parallel.forward_is_collective else ())

        def run(measure: Callable[[nn.Module, Any], Any]) -> Any:
            def on_model(model: nn.Module) -> Any:
                with once.of(model):
                    return measure(model, rows)

            return self.setup.parallel.run_alone(on_model)

        with self.setup.precision.autocast():
            metrics = getattr(self.workload, "metrics", None)
            given = dict(run(metrics)) if callable(metrics) else {}
            if "loss" not in given and has_loss(self.workload):
                if self._whole is not None:
                    with outputs_go_to(self._whole.of_batch(batch.num_rows)):
                        given["loss"] = run(self.workload.loss)
                else:
                    given["loss"] = self._with_gradients_if_needed(lambda: run(self.workload.loss))
            for name in self._objects.names & given.keys():
                self._objects.update(name, given.pop(name), counts=batch.num_rows > 0)
            return {name: check_sum_and_count(pair, what=f"metrics()[{name!r}]") for name, pair in given.items()}

    def _rows(self, batch: RankBatch) -> Any:
        rows, dtype = batch.take(*whole(batch)[0]) or batch.columns, self.setup.precision.input_dtype
        return user_batch(self.workload, rows, self.place.device, dtype, gives_tuples=self.gives_tuples)

    def _with_rows(self) -> Iterator[Any]:
        """This rank's batches in the workload's form, without placeholders."""
        for batch in self._batches():
            self.enter(Phase.EVALUATION)
            if batch.num_rows:
                yield self._rows(batch)

    def _with_gradients_if_needed(self, measure: Callable[[], Any]) -> Any:
        """Loss of a micro-batch, computed with gradients only if it fails without them, as a gradient penalty does."""

        if not self._needs_gradients:
            try:
                return measure()
            except Exception as exc:
                if is_lost_peer(exc) or is_out_of_memory(exc):
                    raise
                failed = exc
        with torch.enable_grad():
            try:
                found = measure()
            except Exception as exc:
                if self._needs_gradients or is_lost_peer(exc):
                    raise
                raise failed from None  # it was not for want of gradients
        self._needs_gradients = True
        return found

    def _batches(self) -> Iterable[RankBatch]:
        if self._kept is not None:
            return self._kept
        if not self._keeps:
            return self._open_stream()
        self._kept = list(self._open_stream())
        return self._kept


def whole(batch: RankBatch) -> list[tuple[int, int]]:
    """Bounds of the single micro-batch of an evaluation batch, also for a placeholder."""
    return [(0, rows_in(batch.columns))]


def _followed_metric(job: TrainJob, schedule: Any) -> str | None:
    """Metric that the learning rate follows; None if it follows none. Raises ConfigError or WorkloadError if
    impossible."""
    if not hasattr(schedule, "follow_evaluation") or not schedule.plateaus:
        return None
    names = decisive_splits(job)
    text = job.config.followed or f"{names[0] if names else 'val'}/loss min"
    metric, _, direction = text.partition(" ")
    if job.is_only_measured and metric.partition("/")[0] not in names:
        return None
    if job.config.evaluation.every is None and not job.is_only_measured:
        allowed = "it follows evaluations, but evaluation.every is not set"
        raise WorkloadError("schedule()", "ReduceLROnPlateau", allowed, "set it: --evaluation.every '1 epoch'")
    check_split("schedule.watch", text, job)
    if wrong := [plateau.mode for plateau in schedule.plateaus if plateau.mode != direction]:
        allowed = f"it follows {text}"
        hint = f"name another metric, such as --schedule.watch 'val/accuracy {wrong[0]}', or mode='{direction}'"
        raise WorkloadError("schedule()", f"ReduceLROnPlateau with mode='{wrong[0]}'", allowed, hint)
    return metric


def decisive_splits(job: TrainJob) -> list[str]:
    """Names of the splits that are evaluated during the training."""
    return [split.name for split in job.evaluation_splits() if split.name != job.config.evaluation.only_at_end]


def check_split(key: str, text: str, job: TrainJob) -> None:
    """Raise ConfigError if `text`, the value of `key`, names a metric of a split that is not evaluated."""
    names = decisive_splits(job)
    if text.partition("/")[0] not in names:
        raise unknown_metric(key, text, [f"{name}/loss" for name in names])


def unknown_metric(key: str, text: str, known: Iterable[str]) -> ConfigError:
    """Error for a setting that names a metric other than these."""
    there_are = ", ".join(sorted(known)) or "no splits to evaluate"
    return ConfigError(key, text, "no evaluation measures this metric", f"there are: {there_are}")


@contextlib.contextmanager
def evaluation_mode(module: nn.Module, *, with_gradients: bool = False) -> Iterator[None]:
    """Evaluation mode, usually without gradients.

    Afterwards each module returns to its own mode, since a workload may leave frozen parts in evaluation mode."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        # no_grad, not inference_mode: DDP's hooks may meet the same buffers again in training
        with torch.set_grad_enabled(with_gradients):
            yield
    finally:
        for part, was_training in modes:
            part.training = was_training
