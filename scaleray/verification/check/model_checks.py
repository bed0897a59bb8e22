"""Checks of a workload's model, loss, gradients and metrics with one batch, as in training."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from scaleray.common.seeding import same_random_numbers, seed_everything, stream_seed
from scaleray.data import TRAIN, RankBatch, Split
from scaleray.data.ragged import Ragged
from scaleray.data.source_interface import Source, rows_in
from scaleray.data.transformed import place_of
from scaleray.errors import DataError, WorkloadError, first_line, text_of
from scaleray.records.check_record import DOUBTFUL, GOOD, WRONG, Finding
from scaleray.records.text.units import memory
from scaleray.training.health.live_memory import LiveTensors, storage_bytes
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.model_setup import prepare
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.setup.weighted_losses import has_batch_loss, has_loss, losses_of
from scaleray.training.step.evaluation import evaluation_mode
from scaleray.training.step.first_batch import apart, check_first_batch, rounding_of, to_text
from scaleray.training.step.metric_objects import MetricObjects
from scaleray.training.step.micro_batches import user_batch
from scaleray.training.step.step import dense_part
from scaleray.training.step.sum_and_count import check_sum_and_count
from scaleray.training.step.unchanged import unchanged_model
from scaleray.verification.check.data_checks import FEW
from scaleray.workload import built_model, call_user_code

CPU = torch.device("cpu")
MOST_NAMED = 4
METRIC_ROUNDING = 1e-2
"""Allowed relative difference of a metric's sum from that of its halves: a threshold may lie between two roundings."""
MOST_ROWS = 100_000
"""Rows of a split that are searched for extreme values."""
DTYPE_WORDS = ("dtype", "expected scalar type", "same type")
"""Parts of torch's message on operands of different types."""


def built_alike(job: TrainJob) -> Finding:
    """Finding on whether the model draws the same parameters from the same seed, as it must on each worker."""
    made = []
    for _ in range(2):
        with same_random_numbers(CPU):
            seed_everything(stream_seed(job.config.seed, "model"))
            made.append(built_model(job.workload))
    first, second = (dict(model.named_parameters()) if isinstance(model, nn.Module) else {} for model in made)
    where = f"build_model() at {place_of(job.workload.build_model)}"
    for name, parameter in first.items():
        if name not in second or not torch.equal(parameter, second[name]):
            text = f"{where} draws a different {name} from the same seed: use torch's, numpy's or Python's generators"
            return Finding("build_model", WRONG, text)
    return Finding("build_model", GOOD, f"{where} draws the same {len(first)} parameters from the same seed")


class ModelCheck:
    """The model of a training on one worker, and one batch."""

    def __init__(self, job: TrainJob, sources: Mapping[str, Source], batch: RankBatch) -> None:
        self.job, self.sources, self.batch = job, sources, batch
        self.place = RankContext()
        size = min(job.recipe.micro_batch_size, batch.num_rows)
        self.rows = {name: values[:size] for name, values in batch.columns.items()}
        self.num_rows = size

    @contextlib.contextmanager
    def opened(self) -> Iterator[Callable[[], bool]]:
        """Context that cleans up the set-up; yields the function that performs it."""
        with contextlib.ExitStack() as stack:

            def begin() -> bool:
                self.setup = prepare(self.job.workload, self.job.config, self.job.recipe, self.place)
                stack.callback(self.setup.close)
                return True

            yield begin

    @property
    def module(self) -> nn.Module:
        """The user's model."""
        return self.setup.parallel.module

    @property
    def losses(self) -> dict[str, Callable[[Any, Any], Any]]:
        """The workload's losses, by the subject of their findings."""
        workload = self.job.workload
        several = losses_of(workload)
        return {"loss": workload.loss} if several is None else {f"loss {n}": loss for n, loss in several.items()}

    def loss(self, figures: dict[str, Any]) -> Iterator[Finding]:
        """Findings on the batch's loss as in training, or on each of several. Raises DataError or WorkloadError."""
        losses = self.losses
        method = losses.get("loss") or self.job.workload.losses
        try:
            check_first_batch(
                self.job.workload,
                self.job.config,
                self.batch,
                self.setup,
                self.place,
                gives_tuples=self.job.splits[TRAIN].gives_tuples,
                micro_batch_size=self.num_rows,
                evaluated=[split.name for split in self.job.evaluation_splits()],
            )
        except WorkloadError as exc:
            raise self._dtype_error(exc) or _placed(exc, method) from exc
        for subject, loss in losses.items():
            total, count = self._loss_of(self.rows, loss)
            each = total / count if count else math.nan
            if "loss" not in figures:  # the record has room for one
                figures |= {"loss_sum": total, "loss_count": count, "loss": each}
            text = f"sum {total:.6g}, count {count:g}, {each:.6g} each, over {self.num_rows} rows; {self._cut(loss)}"
            yield Finding(subject, GOOD if count else WRONG, text)

    def _cut(self, loss: Callable[[Any, Any], Any]) -> str:
        """Text on whether the rows may be divided into micro-batches: compares their loss with that of their halves, in
        evaluation mode, without dropout and batch statistics. Losses that must not be divided are refused earlier.
        """
        if has_batch_loss(self.job.workload):
            return "it is computed over the whole batch"
        rows = {name: values[: max(2, self.num_rows)] for name, values in self.batch.columns.items()}
        size = rows_in(rows)
        if (half := size // 2) == 0:
            return "a single row has no halves to compare"
        cuts = slice(None), slice(half), slice(half, None), slice(None)
        try:
            with (
                unchanged_model(self.job.workload, self.module),
                same_random_numbers(CPU),
                evaluation_mode(self.module, with_gradients=True),
            ):
                found = [self._raw_loss({n: v[cut] for n, v in rows.items()}, loss) for cut in cuts]
                whole, first, second, again = [(float(total.detach()), float(count)) for total, count in found]
        except Exception:  # whatever the user's code raises in a mode that it may not know
            return "halves were not compared, since the loss fails in evaluation mode"
        if again != whole:
            return "halves were not compared, since the loss draws random numbers"
        if not apart(whole, first, second, rounding_of(self.job.config)):
            return "halves add up"
        declared = "count='rows'" if hasattr(self.job.workload, "explain_weight") else "depends_on_micro_batch"
        return f"{to_text(whole, first, second, (size, half, size - half))}, which {declared} accepts"

    def gradients(self, figures: dict[str, Any]) -> Iterator[Finding]:
        """Findings on one micro-batch's gradients, parameters without a gradient, and memory."""
        live = LiveTensors()
        with unchanged_model(self.job.workload, self.module), same_random_numbers(CPU):
            with live:
                for loss in self.losses.values():
                    total, _ = self._raw_loss(self.rows, loss)
                    total.backward()
            trained = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
            gradients = {name: dense_part(p) for name, p in trained.items() if p.grad is not None}
            without = [name for name in trained if name not in gradients]
            broken = [name for name, gradient in gradients.items() if not bool(torch.isfinite(gradient).all())]
            still = [name for name, gradient in gradients.items() if not bool(gradient.any())]
            figures |= self._bytes(live)
            self.module.zero_grad(set_to_none=True)
        if broken:
            text = f"NaN or infinite in {_named(broken)}: look for a logarithm, division or square root of zero"
            yield Finding("gradients", WRONG, text)
        else:
            yield Finding("gradients", GOOD, f"finite for {len(trained) - len(without)} of {len(trained)} parameters")
        if without:
            text = (
                f"{_named(without)} get none: the loss does not depend on them; freeze them (requires_grad_(False)), "
                "or set strategy.find_unused_parameters for ddp"
            )
            yield Finding("unused parameters", DOUBTFUL, text)
        if still and not broken:
            text = f"zero everywhere for {_named(still)}: right only for layers that start at zero, and those behind"
            yield Finding("zero gradients", DOUBTFUL, text)
        text = (
            f"parameters {memory(figures['parameter_bytes'])}, gradients {memory(figures['gradient_bytes'])}, and at "
            f"most {memory(figures['pass_bytes'])} in a pass over {self.num_rows} rows; the optimizer's state is extra"
        )
        yield Finding("memory", GOOD, text)

    def metrics(self) -> Iterator[Finding]:
        """Findings on the metrics of a few rows of each evaluated split, and on whether they are sums."""
        method = getattr(self.job.workload, "metrics", None)
        names: set[str] = set()
        objects: set[str] = set()
        cut: str | None = None
        for split in self.job.evaluation_splits():
            rows = self.sources[split.name].read(np.arange(min(8, split.num_rows)))
            whole = self._metrics_of(rows, split.gives_tuples, split.name)
            again = self._metrics_of(rows, split.gives_tuples, split.name)
            half = split.num_rows and rows_in(rows) // 2
            if half:
                parts = [
                    self._metrics_of({n: v[cut] for n, v in rows.items()}, split.gives_tuples, split.name)
                    for cut in (slice(half), slice(half, None))
                ]
                if (bad := _averaged(whole, *parts)) is not None:
                    where = f"metrics() at {place_of(method)}"
                    text = f"{bad} of {where} is a mean: return the sum and the number of summed items"
                    yield Finding("metrics", WRONG, text)
                    return
                for name, pair in whole.items():
                    if again.get(name) != pair or any(name not in part for part in parts):
                        continue  # it draws random numbers, or knows rows of which it has nothing to say
                    if cut is None and apart(pair, parts[0][name], parts[1][name], METRIC_ROUNDING):
                        counts = (rows_in(rows), half, rows_in(rows) - half)
                        cut = f"{split.name}/{name}: {to_text(pair, parts[0][name], parts[1][name], counts)}"
            names |= {f"{split.name}/{name}" for name in whole}
            objects |= {f"{split.name}/{name}" for name in self._objects(split.name).names}
        if cut is not None:
            advice = "return sums over rows, or return a torchmetrics object from metric_objects()"
            yield Finding("metrics", DOUBTFUL, f"{cut}, so it depends on micro-batches and workers\n  {advice}")
        elif names or objects:
            texts = [f"{', '.join(sorted(names))}: finite, and halves add up"] if names else []
            texts += [f"{', '.join(sorted(objects))}: accepts the result of metrics()"] if objects else []
            yield Finding("metrics", GOOD, "; ".join(texts))

    def evaluated(self) -> None:
        """Compute the loss of a few rows of each evaluated split, if evaluations compute it. Raises WorkloadError."""
        for split in self.job.evaluation_splits():
            rows = self.sources[split.name].read(np.arange(min(8, split.num_rows)))
            if self._asks_for_loss(split.name, rows, gives_tuples=split.gives_tuples):
                call_user_code(
                    lambda: self._loss_of(rows, gives_tuples=split.gives_tuples, evaluates=True),  # noqa: B023
                    what="loss()",
                    doing=f"evaluating {split.name}",
                )

    def _asks_for_loss(self, split: str, rows: Mapping[str, Any], *, gives_tuples: bool) -> bool:
        """Whether an evaluation of a split computes the loss, rather than getting it from the metrics."""
        return has_loss(self.job.workload) and "loss" not in self._metrics_of(rows, gives_tuples, split)

    def extremes(self) -> Iterator[Finding]:
        """Compute the loss of the rows with the smallest and the largest value of each column, which finds a label or
        token out of range."""
        for split in self.job.splits.values():
            source = self.sources[split.name]
            chosen, searched = _extreme_rows(source)
            for column, rows in chosen.items():
                read = source.read(np.array(rows))
                ends = read[column]
                is_single = not isinstance(ends, Ragged) and ends.ndim == 1
                if split.name == TRAIN and is_single and ends[0] == ends[1] and searched >= FEW:
                    text = f"column {column} is {ends[0]} in all of {searched} rows: the model learns nothing from it"
                    yield Finding("extreme rows", DOUBTFUL, text)
                try:
                    with unchanged_model(self.job.workload, self.module):
                        self._pass_over(split, read)
                except Exception as exc:
                    values = [np.asarray(source.read(np.array([row]))[column]).ravel() for row in rows]
                    shown = " and ".join(f"{v.min():g} (row {row})" for v, row in zip(values, rows, strict=True))
                    raise DataError.problem(
                        "the loss",
                        f"fails on the rows with the smallest and largest values of column {column} of {split.name}, "
                        f"{shown}: {_reason(exc)}",
                        "labels and tokens must be below the model's number of classes or tokens: check the data, "
                        "and the size of the last layer or embedding",
                    ) from exc
        yield Finding("extreme rows", GOOD, f"extreme values of {', '.join(chosen) or 'no column'} pass")

    def _pass_over(self, split: Split, rows: Mapping[str, Any]) -> None:
        """Compute everything for these rows that training or an evaluation computes."""
        if split.name == TRAIN:
            for loss in self.losses.values():
                self._loss_of(rows, loss, evaluates=True)
        elif self._asks_for_loss(split.name, rows, gives_tuples=split.gives_tuples):
            self._loss_of(rows, gives_tuples=split.gives_tuples, evaluates=True)

    def _loss_of(
        self,
        rows: Mapping[str, Any],
        loss: Callable[[Any, Any], Any] | None = None,
        *,
        gives_tuples: bool | None = None,
        evaluates: bool = False,
    ) -> tuple[float, float]:
        """Sum and count of some rows, without side effects."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(unchanged_model(self.job.workload, self.module))
            stack.enter_context(same_random_numbers(CPU))
            if evaluates:
                stack.enter_context(evaluation_mode(self.module, with_gradients=True))
            total, count = self._raw_loss(rows, loss, gives_tuples=gives_tuples)
            return float(total.detach()), float(count)

    def _raw_loss(
        self,
        rows: Mapping[str, Any],
        loss: Callable[[Any, Any], Any] | None = None,
        *,
        gives_tuples: bool | None = None,
    ) -> tuple[torch.Tensor, Any]:
        compute = self.job.workload.loss if loss is None else loss
        tuples = self.job.splits[TRAIN].gives_tuples if gives_tuples is None else gives_tuples
        batch = self._batch(rows, tuples)
        with self.setup.precision.autocast():
            found = self.setup.parallel.run_alone(lambda model: compute(model, batch))
        return check_sum_and_count(found, what="loss()")

    def _batch(self, rows: Mapping[str, Any], gives_tuples: bool) -> Any:
        dtype = self.setup.precision.input_dtype
        return user_batch(self.job.workload, dict(rows), CPU, dtype, gives_tuples=gives_tuples)

    def _metrics_of(self, rows: Mapping[str, Any], gives_tuples: bool, split: str) -> dict[str, tuple[float, float]]:
        method = getattr(self.job.workload, "metrics", None)
        if not callable(method):
            return {}
        with evaluation_mode(self.module), self.setup.precision.autocast():
            batch = self._batch(rows, gives_tuples)
            given = call_user_code(
                lambda: self.setup.parallel.run_alone(lambda model: method(model, batch)),
                what="metrics()",
                doing=f"evaluating {split}",
            )
        found, objects = {}, self._objects(split)
        for name, pair in dict(given).items():
            if name in objects.names:  # of these the arguments are given
                objects.update(name, pair, counts=True)
                continue
            total, count = check_sum_and_count(pair, what=f"metrics()[{name!r}]")
            found[name] = float(total), float(count)
            if not math.isfinite(float(total)):
                raise WorkloadError(f"metrics()[{name!r}]", float(total), "it must be finite")
        return found

    def _objects(self, split: str) -> MetricObjects:
        """The metrics that hold their own state."""
        return MetricObjects(self.job.workload, self.place, split)

    def _bytes(self, live: LiveTensors) -> dict[str, int]:
        parameters = list(self.module.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        return {
            "num_parameters": sum(p.numel() for p in parameters),
            "num_trained_parameters": sum(p.numel() for p in parameters if p.requires_grad),
            "parameter_bytes": storage_bytes(parameters),
            "gradient_bytes": storage_bytes(gradients),
            "pass_bytes": live.peak,
        }

    def _dtype_error(self, exc: WorkloadError) -> WorkloadError | None:
        """Error for a loss that mixes types, naming the types of model and data."""
        cause = exc.__cause__
        if not isinstance(cause, RuntimeError) or not any(words in text_of(cause) for words in DTYPE_WORDS):
            return None
        model = {str(p.dtype).removeprefix("torch."): name for name, p in self.module.named_parameters()}
        columns = {str(v.dtype): name for name, v in self.rows.items() if v.dtype.kind == "f"}
        kinds, given = (", ".join(f"{d} ({name})" for d, name in found.items()) for found in (model, columns))
        where = place_of(self.job.workload.build_model)
        return WorkloadError.problem(
            "the model",
            f"has the types {kinds}, and the columns have {given or 'no floating-point type'}: {first_line(cause)}",
            f"build it as float32 at {where} and set precision.dtype, or change the type in datasets()\n  {exc.hint}",
        )


def _placed(exc: WorkloadError, method: Any) -> WorkloadError:
    """The error, with the location of the method unless it already shows a line of the user's code."""
    if exc.__cause__ is not None or 'File "' in exc.hint:
        return exc
    return WorkloadError(f"{exc.what} at {place_of(method)}", exc.found, exc.allowed, exc.hint)


def _averaged(
    whole: Mapping[str, tuple[float, float]],
    one: Mapping[str, tuple[float, float]],
    other: Mapping[str, tuple[float, float]],
) -> str | None:
    """Name of a metric whose sum is really a mean, since the whole's value is the mean of its halves' values."""
    for name, (total, count) in whole.items():
        if name not in one or name not in other or count <= 1:
            continue
        (a, m), (b, n) = one[name], other[name]
        mean = (a * m + b * n) / (m + n) if m + n else math.nan
        if math.isclose(total, mean, rel_tol=1e-4) and not math.isclose(total, a + b, rel_tol=1e-2):
            return name
    return None


def _extreme_rows(source: Source) -> tuple[dict[str, list[int]], int]:
    """Row numbers of the smallest and largest value of each integer column, and the number of rows searched."""
    size = min(source.num_rows, MOST_ROWS)
    if source.group_sizes is not None:
        size = min(size, source.group_sizes[0])
    rows = source.read(np.arange(size))
    found = {}
    for name, values in rows.items():
        if values.dtype.kind not in "iu":
            continue
        if isinstance(values, Ragged):
            each = [(v.min(), v.max()) if len(v) else (0, 0) for v in values]
            low, high = (np.array(side) for side in zip(*each, strict=True))
        else:
            flat = values.reshape(len(values), -1)
            low, high = flat.min(axis=1), flat.max(axis=1)
        found[name] = [int(low.argmin()), int(high.argmax())]
    return found, size


def _reason(exc: BaseException) -> str:
    return first_line(exc.__cause__) if exc.__cause__ is not None else first_line(exc)


def _named(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
