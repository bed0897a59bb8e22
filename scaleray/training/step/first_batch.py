"""Check the rows and the loss of the first batch, before training can hide a fault."""

import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from scaleray.common.seeding import same_random_numbers
from scaleray.config import RunConfig
from scaleray.data import RankBatch
from scaleray.data.ragged import flat_values
from scaleray.data.source_interface import rows_in
from scaleray.errors import DataError, WorkloadError
from scaleray.training.health.live_memory import is_out_of_memory
from scaleray.training.health.worker_errors import explained, is_lost_peer
from scaleray.training.setup.model_setup import Setup
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.setup.weighted_losses import OneLoss, has_batch_loss, losses_of
from scaleray.training.step.batch_structure import check_same_structure
from scaleray.training.step.evaluation import evaluation_mode
from scaleray.training.step.micro_batches import user_batch
from scaleray.training.step.on_one_worker import no_gradients_of_gradients, rehearsed
from scaleray.training.step.several_losses import named
from scaleray.training.step.sum_and_count import check_sum_and_count
from scaleray.training.step.unchanged import unchanged_model
from scaleray.workload import call_user_code, own_method

MOST_ROWS = 8
DRAWS = 5
"""Number of times that a loss is computed if it works only in training mode, where dropout and the like vary the
result."""

ROUNDING = {"fp64": 2e-5, "fp32": 2e-5, "tf32": 2e-3}
"""Largest accepted relative difference between a sum and that of its halves, which other kernels may compute; in fp64 a
loss may still compute in float32. Rows have similar losses before training, so a mean over something other than rows
would differ little from one over rows."""

Result = TypeVar("Result")


def check_first_batch(
    workload: Any,
    config: RunConfig,
    batch: RankBatch,
    setup: Setup,
    place: RankContext,
    *,
    gives_tuples: bool,
    micro_batch_size: int,
    evaluated: Sequence[str] = (),
) -> Any:
    """Run a few rows of the first batch as in training, to find faults in the data or the loss.

    Returns the mean count per row over all ranks; None if no row counts. With several losses, returns counts by name,
    without zeros. evaluated: names of the splits whose loss will be needed in evaluation mode. Leaves parameters,
    buffers, random numbers and gradients unchanged. Collective. Raises DataError or WorkloadError."""
    raise_on_all_ranks(place, lambda: _check_finite(batch))
    sizes = {"gives_tuples": gives_tuples, "micro_batch_size": micro_batch_size}
    losses = losses_of(workload)
    if losses is None:
        return _look_at_loss(workload, config, batch, setup, place, evaluated=evaluated, **sizes)
    found = {}
    for name, loss in losses.items():
        with named(name):
            found[name] = _look_at_loss(OneLoss(workload, loss), config, batch, setup, place, evaluated=(), **sizes)
    return {name: count for name, count in found.items() if count is not None}


def _check_finite(batch: RankBatch) -> None:
    flat = {name: flat_values(column) for name, column in batch.columns.items()}
    bad = next((n for n, v in flat.items() if v.dtype.kind == "f" and not np.isfinite(v).all()), None)
    if bad is not None:
        bad_rows = [row for row, values in enumerate(batch.columns[bad]) if not np.isfinite(values).all()]
        raise DataError(
            f"column {bad} of the first batch",
            f"NaN or infinite in {len(bad_rows)} of {len(batch.columns[bad])} rows",
            "inputs must be finite",
            "clean the data, or fill the gaps before training",
        )


def _look_at_loss(
    workload: Any,
    config: RunConfig,
    batch: RankBatch,
    setup: Setup,
    place: RankContext,
    *,
    evaluated: Sequence[str],
    **sizes: Any,
) -> float | None:
    look = _FirstBatchCheck(workload, batch, setup, place, **sizes)
    with unchanged_model(workload, setup.parallel.module), same_random_numbers(place.device):
        if (collate := own_method(workload, "collate")) is not None:
            made = raise_on_all_ranks(place, lambda: look.batch_of(np.arange(look.rows_with_gradients)))
            check_same_structure(made, place, collate)
        # in passes that communicate, a rank that fails has left the others in one
        count = (
            look.at_all(config, evaluated)
            if look.ranks_agree
            else raise_on_all_ranks(place, lambda: look.at_all(config, evaluated))
        )
    counted, looked_at = place.all_reduce([count or 0.0, 0.0 if count is None else float(look.rows_with_gradients)])
    return counted / looked_at if 0 < counted < math.inf else None


class _FirstBatchCheck:
    """Computes and checks the losses of a few rows of the first batch."""

    def __init__(
        self,
        workload: Any,
        batch: RankBatch,
        setup: Setup,
        place: RankContext,
        *,
        gives_tuples: bool,
        micro_batch_size: int,
    ) -> None:
        self.workload, self.columns, self.setup, self.place = workload, batch.columns, setup, place
        self.gives_tuples = gives_tuples
        rows = min(MOST_ROWS, rows_in(batch.columns))
        self.ranks_agree = setup.parallel.forward_is_collective and place.world_size > 1
        if self.ranks_agree:  # all ranks must run equally many passes
            rows = -int(place.all_reduce_max([-rows])[0])
        self.rows = rows
        self.rows_with_gradients = min(rows, micro_batch_size)  # training needs memory for no more
        self.can_be_evaluated = True
        self.model: nn.Module | None = None  # for the user's code, where it is not the one of the set-up

    def at_all(self, config: RunConfig, evaluated: Sequence[str]) -> float | None:
        """Run each computation of the loss. Returns its counts, see `as_in_training`."""
        count = self.as_in_training(config)
        self.whether_it_is_a_sum(config)
        if evaluated:
            self.whether_it_can_be_evaluated(evaluated)
        return count

    def as_in_training(self, config: RunConfig) -> float | None:
        """Run one pass in training mode, with gradients, and return its count, or None if memory ran out.

        Raises errors of the loss; on one worker, also those that the strategy would cause on several."""
        module = self.setup.parallel.module

        def loss() -> tuple[float, float]:
            with contextlib.ExitStack() as stack:
                stack.enter_context(no_gradients_of_gradients(module, config))
                if self.place.world_size > 1:
                    return self._loss(np.arange(self.rows_with_gradients))
                self.model = stack.enter_context(rehearsed(module, config, self.workload))
                stack.callback(lambda: setattr(self, "model", None))
                return self._loss(np.arange(self.rows_with_gradients))

        try:
            total, count = call_user_code(
                lambda: _with_explanation(loss), what="loss()", doing="computing the first loss"
            )
        except WorkloadError as exc:
            if exc.__cause__ is not None and is_out_of_memory(exc.__cause__):
                return None  # smaller micro-batches may be looked for, and training says what to do else
            self._explain_missing_column(exc)
            raise
        if not math.isfinite(total):
            raise DataError(
                "the loss of the first batch",
                total,
                "it must be finite",
                "the inputs are finite: check the initial parameters, and the loss for a log of zero or a division",
            )
        return count

    def _explain_missing_column(self, error: WorkloadError) -> None:
        """Raise an error that lists the existing columns, if the loss failed because one is missing."""
        missing = error.__cause__.args[:1] if isinstance(error.__cause__, KeyError) else ()
        made_elsewhere = self.gives_tuples or own_method(self.workload, "collate") is not None
        if made_elsewhere or not missing or not isinstance(missing[0], str) or missing[0] in self.columns:
            return
        if not self.ranks_agree and not self._asks_for(missing[0]):
            return  # a mapping of the user's own lacks the key; where ranks must do alike, nobody can look again
        allowed = f"the batch has {', '.join(map(repr, self.columns))}"
        raise WorkloadError.problem(
            "loss()", f"reads column {missing[0]!r}: {allowed}", error.hint
        ) from error.__cause__

    def _asks_for(self, name: str) -> bool:
        """Whether the loss, when computed again, reads a column of that name from the batch itself."""
        batch = _Noting(self.batch_of(np.arange(self.rows_with_gradients)))
        with contextlib.suppress(Exception):
            self.setup.parallel.run_alone(lambda model: self.workload.loss(self._model_or(model), batch))
        return name in batch.missed

    def whether_it_is_a_sum(self, config: RunConfig) -> None:
        """Raise WorkloadError if the loss is a mean, or if it depends on how a batch is divided without declaring this.

        Uses evaluation mode if the loss works there, since dropout and batch statistics vary with the rows and from
        pass to pass."""
        module = self.setup.parallel.module
        if has_batch_loss(self.workload):
            return
        for with_gradients in (False, True):  # a penalty on gradients needs them
            with evaluation_mode(module, with_gradients=with_gradients):
                found = self._attempt(partial(self._halves, with_gradients))
                again = (
                    self._attempt(partial(self._halves, with_gradients)) if self._may_differ(found, config) else None
                )
            if found is not None:
                _check_halves(*found)
                if found == again:  # else it draws random numbers, and nobody can tell
                    self._check_cut(
                        found, rounding_of(config), self.rows_with_gradients if with_gradients else self.rows
                    )
                return
        self.can_be_evaluated = False
        for with_gradients in (False, True):
            with torch.set_grad_enabled(with_gradients):
                repeats = self._attempt(partial(self._repeated, with_gradients))
            if repeats is not None:
                _check_repeated(*repeats)
                return

    def _may_differ(self, found: list[tuple[float, float]] | None, config: RunConfig) -> bool:
        """Whether the loss of some rows may differ from the sum over their halves; on any rank, if ranks must act
        alike. Never for a loss that is declared to depend on the division."""
        if getattr(self.workload, "depends_on_micro_batch", False):
            return False
        differs = found is not None and len(found) == 3 and apart(found[0], found[1], found[2], rounding_of(config))
        return bool(self.place.all_reduce_max([float(differs)])[0]) if self.ranks_agree else differs

    def _check_cut(self, found: list[tuple[float, float]], rounding: float, rows: int) -> None:
        """Raise WorkloadError for a loss that depends on how a batch is divided, or the workload's own error if it has
        one."""
        if len(found) < 3 or not apart(found[0], found[1], found[2], rounding):
            return
        whole, first, second = found
        if hasattr(self.workload, "explain_weight"):
            if min(first[1], second[1]) > 0 and (error := self.workload.explain_weight(whole, first, second)):
                raise error
            return
        words = to_text(whole, first, second, (rows, rows // 2, rows - rows // 2)).removeprefix("it ")
        raise WorkloadError.problem(
            "loss()", f"{words}, so the training depends on micro-batches and the number of workers",
            "for a loss over the whole batch, define outputs() and batch_loss() instead of loss(), or compute the loss "
            "of a row from that row alone; depends_on_micro_batch = True in the workload accepts it",
        )  # fmt: skip

    def whether_it_can_be_evaluated(self, splits: Sequence[str]) -> None:
        """Raise WorkloadError for a loss that works only in training mode, if evaluations need it."""
        metrics = getattr(self.workload, "metrics", None)
        if self.can_be_evaluated:
            return
        if callable(metrics):
            with evaluation_mode(self.setup.parallel.module):
                given = self._attempt(lambda: set(self._run(metrics, np.arange(self.rows))))
            if given is None or "loss" in given:  # None: a split may have columns of its own, so let evaluations tell
                return
        raise WorkloadError.problem(
            "loss()",
            f"fails in evaluation mode: the loss of {', '.join(splits)} is needed there",
            "return `loss` from metrics(), which is then used instead, or leave out the split",
        )

    def _halves(self, with_gradients: bool) -> list[tuple[float, float]]:
        """(sum, count) of some rows, and of their first and second halves if there are at least two rows."""
        rows = self.rows_with_gradients if with_gradients else self.rows
        cuts = [(0, rows), (0, rows // 2), (rows // 2, rows)] if rows >= 2 else [(0, rows)]
        return [self._loss(np.arange(*cut)) for cut in cuts]

    def _repeated(self, with_gradients: bool) -> tuple[int, list[tuple[float, float]], list[tuple[float, float]]]:
        """Number of repetitions of one or two rows, and (sum, count) of the rows and of their repetition, computed
        `DRAWS` times.

        Batch statistics are the same for both."""
        most = self.rows_with_gradients if with_gradients else MOST_ROWS
        few = np.arange(min(self.rows, max(1, min(2, most // 4))))
        times = most // len(few)
        drawn = [(self._loss(few), self._loss(np.tile(few, times))) for _ in range(DRAWS if times > 1 else 0)]
        return times, [once for once, _ in drawn], [repeated for _, repeated in drawn]

    def _loss(self, index: np.ndarray) -> tuple[float, float]:
        total, count = check_sum_and_count(self._run(self.workload.loss, index), what="loss()")
        return float(total.detach()), float(count)

    def _run(self, user_code: Callable[[Any, Any], Any], index: np.ndarray) -> Any:
        batch = self.batch_of(index)
        with self.setup.precision.autocast():
            return self.setup.parallel.run_alone(lambda model: user_code(self._model_or(model), batch))

    def _model_or(self, model: Any) -> Any:
        """The model for the user's code; a module may have a length, and so be false."""
        return model if self.model is None else self.model

    def batch_of(self, index: np.ndarray) -> Any:
        """Make a micro-batch of these rows."""
        rows = {n: v[index] for n, v in self.columns.items()}
        dtype = self.setup.precision.input_dtype
        return user_batch(self.workload, rows, self.place.device, dtype, gives_tuples=self.gives_tuples)

    def _attempt(self, measure: Callable[[], Result]) -> Result | None:
        """Result of the measurement. None if the user's code fails on this rank or, if ranks must act alike, on any."""
        found: Result | None = None
        try:
            found = measure()
        except Exception as exc:
            if is_lost_peer(exc):
                raise
        if self.ranks_agree and self.place.all_reduce_max([float(found is None)])[0]:
            return None
        return found


class _Noting(dict[str, Any]):
    """Batch that records which missing columns were read from it."""

    def __init__(self, columns: Any) -> None:
        super().__init__(columns)
        self.missed: list[Any] = []

    def __missing__(self, name: Any) -> Any:
        self.missed.append(name)
        raise KeyError(name)


def apart(whole: tuple[float, float], first: tuple[float, float], second: tuple[float, float], rounding: float) -> bool:
    """Whether the sum or count of some rows differs from that of their halves by more than rounding explains."""
    if not all(map(math.isfinite, (*whole, *first, *second))):
        return False
    least = 1e-2 * rounding * max(1.0, whole[1])  # of a loss near zero
    return any(
        abs(all_ - (a + b)) > max(rounding * max(abs(all_), abs(a) + abs(b)), least)
        for all_, a, b in zip(whole, first, second, strict=True)
    )


def to_text(
    whole: tuple[float, float], first: tuple[float, float], second: tuple[float, float], rows: tuple[int, int, int]
) -> str:
    """Describe how the value of some rows differs from that of their halves."""
    halves = first[0] + second[0], first[1] + second[1]
    one, other = (total / count if count else math.nan for total, count in (whole, halves))
    by = f"{abs(other - one) / abs(one):.2g} of it apart" if one else f"{abs(other - one):.2g} apart"
    words = f"it depends on how a batch is cut: {rows[0]} rows give {one:.6g} each, {rows[1]} and {rows[2]} of them "
    words += f"{other:.6g} ({by})"
    if whole[1] != halves[1]:
        words += f"; the count is {whole[1]:g}, and those of the halves {first[1]:g} and {second[1]:g}"
    return words


def rounding_of(config: RunConfig) -> float:
    """Largest accepted relative difference between a sum and that of its halves, in the precision of a config."""
    return ROUNDING.get("tf32" if config.precision.tf32 else config.precision.dtype, 1e-2)


def _check_halves(
    whole: tuple[float, float], first: tuple[float, float] = (0.0, 0.0), second: tuple[float, float] = (0.0, 0.0)
) -> None:
    (total, count), (one, one_count), (other, other_count) = whole, first, second
    if count <= 1 or min(one_count, other_count) <= 0:
        return
    averaged = (one * one_count + other * other_count) / (one_count + other_count)
    # a mean equals the weighted mean of its halves; a sum does not, unless the loss is zero
    if math.isclose(total, averaged, rel_tol=1e-4) and not math.isclose(total, one + other, rel_tol=1e-2):
        raise _a_mean(f"({total:.6g} for some rows, {one:.6g} and {other:.6g} for their halves)")


def _check_repeated(times: int, once: list[tuple[float, float]], repeated: list[tuple[float, float]]) -> None:
    """Raise WorkloadError if the loss is a mean: a sum grows with the number of rows, a mean does not.

    All draws must show this, since noise could look the same."""
    few, many = [abs(total) for total, _ in once], [abs(total) for total, _ in repeated]
    signs = {math.copysign(1, total) for total, _ in (*once, *repeated)}
    if (
        not few
        or min(count for _, count in repeated) <= 1
        or len(signs) > 1
        or not 0 < min(few) <= max(many) < math.inf
    ):
        return
    # the limit is half-way to what a sum would be, for losses that noise moves; the ranges meet, as those of a mean do
    # and those of a sum with something constant beside it do not
    limit = math.sqrt(times) if times >= 4 else 1 + 1e-4
    if max(many) < limit * min(few) and min(many) <= (1 + 1e-4) * max(few):
        raise _a_mean(f"({once[0][0]:.6g} for some rows, {repeated[0][0]:.6g} for the same rows {times} times)")


def _a_mean(what: str) -> WorkloadError:
    return WorkloadError(
        "loss()",
        f"a mean {what}",
        "it must return the sum over the micro-batch",
        "use reduction='sum': scaleray divides by the count of all workers",
    )


def _with_explanation(call: Any) -> Any:
    try:
        return call()
    except Exception as exc:
        found = explained(exc)
        if found is None:
            raise
        raise found from exc


def raise_on_all_ranks(place: RankContext, look: Callable[[], Result]) -> Result:
    """Return the result of `look` on this rank. If it raises DataError or WorkloadError on any rank, all ranks raise:
    their own error, or that of the first rank that has one. Collective, around code that is not collective."""
    result: list[Result] = []
    error: Exception | None = None
    try:
        result.append(look())
    except (DataError, WorkloadError) as exc:
        error = exc
    everyone: list[Exception | None] = place.gathered(error)
    shared_error = error or next((one for one in everyone if one is not None), None)
    if shared_error is not None:
        raise shared_error
    return result[0]
