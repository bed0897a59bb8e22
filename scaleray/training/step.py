"""One optimizer step: micro-batches, accumulation, one synchronisation, clipping, update.

The gradient is the sum over all micro-batches and workers divided by the total count, whatever each worker counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from scaleray.config import RunConfig
from scaleray.data import RankBatch
from scaleray.errors import DataError, WorkloadError
from scaleray.reproducibility.seeding import same_random_numbers
from scaleray.scaling.recipe import Recipe, largest_divisor, with_micro_size
from scaleray.strategies.parallel import MicroBatch
from scaleray.training.live_memory import free_unused, is_out_of_memory
from scaleray.training.model_setup import Setup
from scaleray.training.place import Place
from scaleray.training.shards import local
from scaleray.workload import call_user_code


@dataclass(frozen=True)
class StepResult:
    """What a step did, over all workers. grad_norm: before clipping; None where nobody asked for it."""

    loss: float
    count: float
    grad_norm: float | None
    is_finite: bool
    is_own: bool = False
    """Loss and count are those of this rank's samples alone: a local step in which the ranks did not meet."""
    nonfinite_steps: int = 0
    """Steps since the last meeting that were not finite, on the rank that had most of them; the same on all ranks. Not 0
    only in a meeting, so that all ranks decide alike what to do about it."""
    nonfinite_in_a_row: int = 0
    """How many of the last steps were not finite, on the rank that had most in a row. In a meeting, like the above."""
    signals: tuple[float, ...] = ()
    """What the ranks told each other with this step, summed."""


class Probe(Protocol):
    """Looks at every step from inside, for checks; changes nothing. All ranks have the same one, so it may communicate."""

    def on_setup(self, setup: Setup) -> None:
        """Everything is built, and nothing has been trained yet."""

    def on_batch(self, batch: RankBatch) -> None:
        """This rank's rows of the step that begins."""

    def on_gradients(self, correction: float) -> None:
        """Gradients are synchronised and unscaled, and not yet clipped; times `correction` they are what is meant."""

    def on_step(self, result: StepResult, learning_rate: float) -> None:
        """The optimizer has taken the step, with this learning rate in its first group."""


class TrainStep:
    """Runs optimizer steps for one worker. `gives_tuples`: the loss receives the columns as a tuple.

    signals: numbers of this rank that are summed over all ranks with each step. before_update: called when the optimizer
    is about to change parameters. on_halved: called with the recipe of smaller micro-batches after memory ran out.
    """

    def __init__(
        self, workload: Any, setup: Setup, config: RunConfig, recipe: Recipe, place: Place, *, gives_tuples: bool,
        probe: Probe | None = None, signals: Callable[[], tuple[float, ...]] = tuple, before_update: Callable[[], None] = lambda: None,
        enter: Callable[[str], None] = lambda phase: None, on_halved: Callable[[Recipe], None] = lambda recipe: None,
    ) -> None:  # fmt: skip
        self.workload, self.setup, self.config, self.recipe, self.place = workload, setup, config, recipe, place
        self.on_halved = on_halved
        self.backs_off = config.memory.on_out_of_memory == "halve"
        self.gives_tuples, self.probe = gives_tuples, probe
        self.signals, self.before_update, self.enter = signals, before_update, enter
        self.parameters = [p for p in setup.parallel.module.parameters() if p.requires_grad]
        self.num_updates = 0  # steps taken; the loop says how many came before
        self.count_per_row = 1.0  # learned from each step; only a guess that saves a pass over the gradients
        self.nonfinite_steps = self.nonfinite_in_a_row = 0  # since the last meeting, and up to now

    def __call__(self, batch: RankBatch, *, num_rows: int, want_norm: bool, meets: bool = True) -> StepResult:
        """Train on one global batch of `num_rows` rows, of which `batch` is this rank's part. Collective.

        meets: whether ranks sum losses and signals; without, loss and count are this rank's and there are no signals.
        """
        setup, parallel = self.setup, self.setup.parallel
        if self.probe is not None:
            self.probe.on_batch(batch)
        number = self.num_updates + 1
        parallel.before_step(number)
        is_local = parallel.is_local(number)
        setup.optimizer.zero_grad(set_to_none=True)
        # Losses are scaled by the expected count before the backward pass, which keeps gradients in range, and
        # corrected by the true count after it. With a constant count per row there is nothing to correct.
        expected = (max(1, batch.num_rows) if is_local else num_rows) * self.count_per_row
        self._scale = (1 if is_local else parallel.gradient_divisor) / expected
        start = [0.0, 0.0, *self.signals()]
        buffers = [(b, b.clone()) for b in parallel.module.buffers()] if self.backs_off else []
        while True:
            self._totals = torch.tensor(start, dtype=torch.float64, device=self.place.device)
            try:
                own_sum, own_count = self._run_micro_batches(batch, num_rows=num_rows, meets=meets)
                break
            except _MemoryRanOut as exc:
                why = str(exc)
            self._halve(why, buffers)
        loss_sum, count, *signals = self._totals.tolist()
        if meets and not 0 < count < math.inf:
            raise WorkloadError(
                "loss()", f"a total count of {count:g}", "at least one sample or token must count in every global batch"
            )
        if meets:  # in a local step too: a value that all ranks have, and a checkpoint
            self.count_per_row = count / num_rows
        if is_local:
            # a rank of which no row counts has no gradient
            correction = expected / own_count if own_count else 0.0
            result = self._update(own_sum, own_count or 1.0, correction=correction, want_norm=want_norm)
            own = dataclasses.replace(result, count=own_count, is_own=True)
            result = self._met(result, loss_sum, count) if meets else own
        else:
            result = self._update(loss_sum, count, correction=expected / count, want_norm=want_norm)
            bad, self.nonfinite_steps = self.nonfinite_steps, 0
            result = dataclasses.replace(result, nonfinite_steps=bad, nonfinite_in_a_row=self.nonfinite_in_a_row)
        result = dataclasses.replace(result, signals=tuple(signals) if meets else ())
        if self.probe is not None:
            self.probe.on_step(result, float(setup.schedule.get_last_lr()[0]))
        return result

    def _met(self, result: StepResult, loss_sum: float, count: float) -> StepResult:
        """The result of a local step in which the ranks met: loss and count of all, and what happened since. Collective."""
        worst = self.place.all_reduce_max([self.nonfinite_steps, self.nonfinite_in_a_row])
        self.nonfinite_steps, self.nonfinite_in_a_row = 0, int(worst[1])
        loss = loss_sum / count
        return dataclasses.replace(
            result, loss=loss, count=count, is_finite=result.is_finite and math.isfinite(loss),
            nonfinite_steps=int(worst[0]), nonfinite_in_a_row=int(worst[1]),
        )  # fmt: skip

    def _run_micro_batches(self, batch: RankBatch, *, num_rows: int, meets: bool) -> tuple[float, float]:
        """Forward and backward of every micro-batch; leaves the totals of all ranks, where they meet, and returns this rank's
        sum of losses and count."""
        setup, parallel = self.setup, self.setup.parallel
        # where passes communicate, a rank with a row less may need a placeholder more
        least = math.ceil(math.ceil(num_rows / self.place.data_size) / self.recipe.micro_batch_size)
        at_least = least if parallel.forward_is_collective else 1
        pieces = list(micro_batches(batch, self.recipe.micro_batch_size, at_least=at_least))
        pending: Any = None
        own = self._totals

        def sum_up() -> None:
            nonlocal pending, own
            own = self._totals.clone()
            if not parallel.counts_loss:
                self._totals[:2] = 0.0
            if meets and self.place.world_size > 1:
                pending = dist.all_reduce(self._totals, async_op=True)

        if parallel.run_micro_batches is not None:
            self.enter("loss")
            parallel.run_micro_batches([self._on_device(*p) for p in pieces], self._objective, setup.precision.autocast)
            sum_up()
        else:
            with self._out_of_memory() as shortage:
                for piece in pieces[:-1]:
                    with parallel.no_sync():
                        self.enter("loss")
                        scaled = self._objective(parallel.model, self._on_device(*piece))
                        self.enter("synchronise")
                        scaled.backward()
                self.enter("loss")
                scaled = self._objective(parallel.model, self._on_device(*pieces[-1]))
            self.enter("synchronise")
            self._agree_on(shortage)
            with self._out_of_memory(here=self.place.world_size == 1) as shortage:
                sum_up()  # beside the backward pass, so that it costs no time of its own
                scaled.backward()
            if shortage:
                raise _MemoryRanOut(shortage[0])
        if pending is not None:
            self.enter("synchronise")
            pending.wait()
        return float(own[0]), float(own[1])

    def _on_device(self, arrays: dict[str, np.ndarray], weight: int) -> MicroBatch:
        """Only when its turn comes, so that one micro-batch's rows are there at a time."""
        columns = to_device(arrays, self.place.device, self.setup.precision.input_dtype)
        return MicroBatch(as_user_batch(columns, self.gives_tuples), weight)

    @contextlib.contextmanager
    def _out_of_memory(self, *, here: bool = True) -> Iterator[list[str]]:
        """Catches a memory error where the step can be repeated; the list then has its text."""
        shortage: list[str] = []
        try:
            yield shortage
        except Exception as exc:
            if not (self.backs_off and here and is_out_of_memory(exc)):
                raise
            shortage.append(
                str(exc).partition("\n")[0] or type(exc).__name__
            )  # the error itself would hold the activations

    def _agree_on(self, shortage: list[str]) -> None:
        """Raise _MemoryRanOut on all ranks if memory ran out on any: no gradient has been communicated yet. Collective."""
        if not self.backs_off:
            return
        is_short = torch.tensor(float(bool(shortage)), device=self.place.device)
        if self.place.world_size > 1:
            dist.all_reduce(is_short, op=dist.ReduceOp.MAX)
        if is_short:
            raise _MemoryRanOut(shortage[0] if shortage else "on another worker")

    def _halve(self, why: str, buffers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Micro-batches of half the size from now on, and everything as it was before the step that failed."""
        size = self.recipe.micro_batch_size
        smaller = largest_divisor(self.recipe.per_worker_batch_size, at_most=size // 2)
        if smaller is None:
            raise OutOfMemory(f"a micro-batch of one row does not fit: {why}")
        assert self.setup.parallel.abandon is not None
        self.setup.parallel.abandon()
        self.setup.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        free_unused(self.place.device)
        self.recipe = with_micro_size(self.recipe, smaller, why=f"halved from {size}, which ran out of memory")
        self.on_halved(self.recipe)

    def _objective(self, model: Any, piece: MicroBatch) -> torch.Tensor:
        """The scaled loss of a micro-batch; its sum and count are added to the totals."""
        with self.setup.precision.autocast():
            result = self.workload.loss(model, piece.batch)
        loss, count = check_sum_and_count(result, what="loss()")
        if piece.weight == 0:  # a placeholder: it must run, as the collectives need every rank, and count nothing
            loss, count = loss * 0.0, count * 0
        self._totals[0] += loss.detach()
        self._totals[1] += count
        return self.setup.precision.scaler.scale(loss * self._scale)

    def _update(self, loss_sum: float, count: float, *, correction: float, want_norm: bool) -> StepResult:
        setup, clip_norm = self.setup, self.config.optimizer.clip_norm
        self.enter("update")
        scaler = setup.precision.scaler
        scaler.unscale_(setup.optimizer)
        if setup.pruning is not None:
            setup.pruning.mask_gradients()  # before anybody looks at them
        if self.probe is not None:
            self.probe.on_gradients(correction)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        grad_norm = None
        factor = correction
        loss_scale = scaler.get_scale()
        is_finite = math.isfinite(loss_sum)
        if (
            clip_norm is not None or want_norm or self.config.on_nonfinite != "raise"
        ):  # these keep the weights, so look first
            norm = setup.parallel.total_norm(gradients) * correction
            grad_norm = norm.item()
            # with loss scaling an infinite gradient is the scaler's business: it skips the step and lowers the scale
            is_finite = is_finite and (math.isfinite(grad_norm) or scaler.is_enabled())
            if clip_norm is not None and grad_norm > clip_norm:
                factor *= clip_norm / (grad_norm + 1e-6)
        if is_finite or setup.parallel.replicas_differ:  # these take part in an averaging all the same
            self.before_update()
        if is_finite:
            if factor != 1.0:
                # their own parts: one call takes neither DTensors beside plain tensors nor those of several meshes
                torch._foreach_mul_([local(gradient) for gradient in gradients], factor)
            scaler.step(setup.optimizer)
        scaler.update()
        self.num_updates += 1
        # a scaler lowers its scale after, and only after, a step that it skipped
        change = scaler.get_scale() / loss_scale
        setup.parallel.carry_over(correction * change, is_finite and change >= 1.0)
        if not is_finite:
            self.nonfinite_steps += 1
        self.nonfinite_in_a_row = 0 if is_finite else self.nonfinite_in_a_row + 1
        self.enter("synchronise")
        setup.parallel.after_update(self.num_updates)
        self._prune(is_finite)
        return StepResult(loss=loss_sum / count, count=count, grad_norm=grad_norm, is_finite=is_finite)

    def _prune(self, has_updated: bool) -> None:
        """After the strategy, which may have fetched parameters from other ranks."""
        pruning = self.setup.pruning
        if pruning is None:
            return
        if pruning.is_due(self.num_updates):
            self.before_update()
            pruning.prune(self.num_updates)
        elif has_updated:
            pruning.apply()


class _MemoryRanOut(Exception):
    """On some rank, before anything was communicated; raised on all."""


class OutOfMemory(MemoryError):
    """No smaller micro-batch is left."""


def micro_batches(batch: RankBatch, size: int, *, at_least: int = 1) -> Iterator[tuple[dict[str, np.ndarray], int]]:
    """Slices of at most `size` rows with the number of rows that count: 0 for a placeholder. Placeholders come first, until
    there are `at_least` so many."""
    for _ in range(at_least - math.ceil(batch.num_rows / size)):
        yield {name: values[:1] for name, values in batch.columns.items()}, 0
    edges = [*range(0, batch.num_rows, size), batch.num_rows]
    if batch.num_rows % size == 1 and len(edges) > 2 and size > 2:
        edges[-2] -= 1  # no micro-batch of a single row beside larger ones: batch normalisation cannot train on it
    for start, stop in itertools.pairwise(edges):
        yield {name: values[start:stop] for name, values in batch.columns.items()}, stop - start


def to_device(
    columns: dict[str, np.ndarray], device: torch.device, dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """Columns as tensors on `device`; floating-point ones converted to `dtype` if it is given."""
    tensors = {}
    for name, values in columns.items():
        tensor = torch.from_numpy(values)
        if device.type == "cuda":
            tensor = tensor.pin_memory().to(device, non_blocking=True)
        tensors[name] = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
    return tensors


def as_user_batch(columns: dict[str, torch.Tensor], gives_tuples: bool) -> Any:
    """The batch as the workload's data gave it: a dict of tensors, or a tuple."""
    return tuple(columns[str(i)] for i in range(len(columns))) if gives_tuples else columns


@contextlib.contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients. Each part gets its own mode back: a workload may keep frozen parts in eval."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        # no_grad, not inference_mode: DDP's hooks may meet the same buffers again in training
        with torch.no_grad():
            yield
    finally:
        for part, was_training in modes:
            part.training = was_training


def check_sum_and_count(result: Any, *, what: str) -> tuple[torch.Tensor, Any]:
    """The pair that a loss or metric must be. Raises WorkloadError with what it was instead."""
    if not isinstance(result, tuple) or len(result) != 2:
        found = f"a tensor of shape {list(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
        raise WorkloadError(
            what,
            found,
            "it must return (sum, count)",
            "sum the loss with reduction='sum' and return it with the number of samples or tokens",
        )
    total, count = result
    if not isinstance(total, torch.Tensor) or total.numel() != 1:
        shape = f"a tensor of shape {list(total.shape)}" if isinstance(total, torch.Tensor) else type(total).__name__
        raise WorkloadError(
            f"the sum returned by {what}", shape, "it must be a tensor with one element", "sum over samples and tokens"
        )
    if isinstance(count, torch.Tensor):
        if count.numel() != 1 or count.requires_grad:
            raise WorkloadError(
                f"the count returned by {what}",
                f"a tensor of shape {list(count.shape)}",
                "it must be one number without gradient",
            )
        count = count.reshape(())
    elif (
        isinstance(count, bool) or not isinstance(count, (int, float, np.number)) or not count >= 0 or math.isinf(count)
    ):
        raise WorkloadError(
            f"the count returned by {what}", count, "it must be a number of samples or tokens, 0 or more"
        )
    return total.reshape(()), count


def check_first_batch(
    workload: Any, module: nn.Module, batch: RankBatch, setup: Setup, place: Place, *, gives_tuples: bool
) -> None:
    """Run a few rows of the first batch and say what is wrong with the data or the loss, before training hides it.

    Changes neither parameters nor buffers nor random numbers. Raises DataError or WorkloadError.
    """
    bad = next((n for n, v in batch.columns.items() if v.dtype.kind == "f" and not np.isfinite(v).all()), None)
    if bad is not None:
        bad_rows = np.flatnonzero(~np.isfinite(batch.columns[bad].reshape(len(batch.columns[bad]), -1)).all(axis=1))
        raise DataError(
            f"column {bad} of the first batch",
            f"NaN or infinite in {len(bad_rows)} of {len(batch.columns[bad])} rows",
            "inputs must be finite",
            "clean the data, or fill the gaps before training",
        )
    rows = min(8, len(next(iter(batch.columns.values()))))
    model = setup.parallel.evaluation_model or module
    if setup.parallel.forward_is_collective and place.world_size > 1:  # all ranks must run equally many passes
        least = torch.tensor(rows, device=place.device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        rows = int(least)

    def loss_of(start: int, stop: int) -> tuple[float, float]:
        columns = to_device(
            {n: v[start:stop] for n, v in batch.columns.items()}, place.device, setup.precision.input_dtype
        )
        with setup.precision.autocast():
            result = workload.loss(model, as_user_batch(columns, gives_tuples))
        total, count = check_sum_and_count(result, what="loss()")
        return float(total), float(count)

    with evaluation_mode(module), same_random_numbers(place.device):
        whole, count = call_user_code(
            lambda: _with_explanation(lambda: loss_of(0, rows)), what="loss()", doing="computing the first loss"
        )
        halves = [loss_of(0, rows // 2), loss_of(rows // 2, rows)] if rows >= 2 else []
    if not math.isfinite(whole):
        raise DataError(
            "the loss of the first batch",
            whole,
            "it must be finite",
            "the inputs are finite: look at the initial parameters, a log of zero or a division in the loss",
        )
    if count > 1 and len(halves) == 2 and min(n for _, n in halves) > 0:
        (first, first_count), (second, second_count) = halves
        added = first + second
        averaged = (first * first_count + second * second_count) / (first_count + second_count)
        # a mean equals the weighted mean of its halves; a sum does not, unless the loss is zero
        if math.isclose(whole, averaged, rel_tol=1e-4) and not math.isclose(whole, added, rel_tol=1e-2):
            raise WorkloadError(
                "loss()",
                f"a mean ({whole:.6g} for {rows} rows, {first:.6g} and {second:.6g} for its halves)",
                "it must return the sum over the micro-batch",
                "use reduction='sum'; scaleray divides by the count of all workers",
            )


def _with_explanation(call: Any) -> Any:
    try:
        return call()
    except Exception as exc:
        found = explained(exc)
        if found is None:
            raise
        raise found from exc


def explained(exc: Exception) -> DataError | None:
    """What an error of torch means for the user, where its text tells; None for any other, such as a list's IndexError."""
    text = str(exc)
    if isinstance(exc, IndexError) and any(words in text for words in ("out of bounds", "index out of range in self")):
        return DataError(
            "a label or token",
            text.rstrip("."),
            "it must be below the number of classes the model knows",
            "check the labels of the data, and the size of the model's last layer or embedding",
        )
    if isinstance(exc, ValueError) and "more than 1 value per channel" in text:
        return DataError(
            "a micro-batch of one worker",
            "a single row",
            "batch normalisation needs two to train on",
            "leave out the partial batch at the end of an epoch with --batch.drop-last, or enlarge batch.micro_size",
        )
    return None
