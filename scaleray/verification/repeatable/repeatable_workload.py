"""A workload that repeats on any number of workers: dropout only draws, and BatchNorm follows the workers' batches."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from scaleray.config.recipe.shares import share_of
from scaleray.data.collation import Rows, collated
from scaleray.training.setup.weighted_losses import has_loss, losses_of
from scaleray.training.step.micro_batches import cuts
from scaleray.verification.repeatable.dropout_masks import WHOLE_STEP
from scaleray.verification.traces.layer_settings import Given, TakenOut
from scaleray.workload import built_model, own_method

Draw = tuple[str, bytes]
"""A layer that drew a mask, and the generator's state before the draw."""


class Masks:
    """Records the generator states from which dropout draws. device: of the model. by_step: record only the state at
    the beginning of each step, for models whose layers cannot be watched."""

    def __init__(self, device: torch.device, *, by_step: bool = False) -> None:
        self.device, self.by_step = device, by_step
        self.draws: list[Draw] = []
        self.is_alone = True
        """Whether only dropout has drawn random numbers since `begin`."""
        self._known: set[bytes] = set()

    def begin(self) -> None:
        """Begin a step."""
        self.draws.clear()
        self.is_alone, state = True, self.state()
        self._known = {state}
        if self.by_step:
            self.draws.append((WHOLE_STEP, state))

    def end(self) -> bool:
        """End the step; returns whether anything other than dropout drew random numbers in it."""
        return not self.is_alone or self.state() not in self._known

    def state(self) -> bytes:
        """A digest of the state of torch's generator."""
        state = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()
        return hashlib.blake2b(state.numpy().tobytes(), digest_size=12).digest()

    def draw(self, layer: str) -> None:
        """Record the generator's state before a layer's draw of a mask, and advance the generator."""
        state = self.state()
        # known, but not the last one: what is computed again in the backward pass begins where it did
        self.is_alone = self.is_alone and state in self._known
        self.draws.append((layer, state))
        torch.rand((), device=self.device)
        self._known.add(self.state())


@dataclass(frozen=True)
class Partition:
    """Division of a global batch over workers into `num_shares` parts, equal or in proportion to `shares`, and of each
    part into micro-batches. BatchNorm uses the statistics of a micro-batch and keeps those of rank 0."""

    num_shares: int
    micro_batch_size: int
    shares: tuple[int, ...] | None = None

    def pieces(self, num_rows: int) -> Iterator[tuple[slice, bool]]:
        """The rows of every micro-batch in turn, and whether they are rank 0's."""
        share, rest = divmod(num_rows, self.num_shares)
        for rank in range(self.num_shares):
            start = rank * share + min(rank, rest)
            part = slice(start, start + share + (rank < rest))
            if self.shares is not None:
                part = share_of(self.shares, rank, num_rows=num_rows)
            for first, last in cuts(part.stop - part.start, self.micro_batch_size):
                yield slice(part.start + first, part.start + last), rank == 0

    @property
    def name(self) -> str:
        """The partition as text, such as `4x16`, with unequal shares if any."""
        return f"{self.num_shares}x{self.micro_batch_size}{''.join(f'-{n}' for n in self.shares or ())}"

    def smallest(self, num_rows: int) -> int:
        """Number of rows of the smallest micro-batch."""
        return min((rows.stop - rows.start for rows, _ in self.pieces(num_rows)), default=0)


class _Parts(tuple[Any, ...]):
    """Collated batches of a step's parts, in order."""

    __slots__ = ()


class Quieted:
    """A workload without the parts that depend by design on the number of workers.

    what: NOTHING leaves the model unchanged; MODULES removes dropout and, without a `partition`, freezes BatchNorm;
    EVERYTHING puts the whole model into evaluation mode. masks: records what dropout would have drawn. partition: parts
    of the batch over which a step computes its loss, each with its own statistics. found: the disabled parts of the
    model; loss_dtype: dtype of the losses; `rows_of_step`: rows in the batch of the current step, 0 outside of steps.
    """

    NOTHING, MODULES, EVERYTHING = "nothing", "modules", "everything"

    def __init__(
        self, workload: Any, what: str, *, masks: Masks | None = None, partition: Partition | None = None
    ) -> None:
        self._workload, self._what, self._masks, self._partition = workload, what, masks, partition
        self._keeps_statistics = partition is not None
        self.collates_ahead = partition is None
        """Whether a batch may be made before its step begins; False, as its parts depend on `rows_of_step`."""
        self.found: list[str] = []
        self.loss_dtype = ""
        self.rows_of_step, self.given = 0, Given()
        self._has_trained = False

    def begin_step(self, num_rows: int) -> None:
        """Begin a step with this many rows on this rank."""
        self.rows_of_step = num_rows
        self.given = Given(evaluates_in_training=self.given.evaluates_in_training)

    def end_step(self) -> None:
        """End the step."""
        self.rows_of_step, self._has_trained = 0, True

    def __getattr__(self, name: str) -> Any:
        if name == "collate" and self._partition is not None and own_method(self._workload, name) is not None:
            return self._collated_parts
        return getattr(self._workload, name)

    @property
    def with_statistics(self) -> Quieted:
        """The same workload, for workers that take statistics per micro-batch anyway."""
        quieted = Quieted(self._workload, self._what, masks=self._masks)
        quieted._keeps_statistics = True
        return quieted

    def build_model(self) -> Any:
        model = built_model(self._workload)
        if isinstance(model, nn.Module) and self._what != self.NOTHING:
            self._quieten(model)
        self._norms = _norms(model) if isinstance(model, nn.Module) else []
        return model

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return self._loss(self._workload.loss, model, batch)

    @property
    def has_loss(self) -> bool:
        """Whether the workload itself has one."""
        return has_loss(self._workload)

    def losses(self) -> Any:
        found = losses_of(self._workload)
        return found and {name: partial(self._loss, loss) for name, loss in found.items()}

    def _loss(self, loss: Callable[[Any, Any], Any], model: nn.Module, batch: Any) -> Any:
        if self._what == self.EVERYTHING:
            for module in model.modules():  # a strategy may have put in others since the model was built
                module.training = False
        self._look(model, batch)
        result = loss(model, batch) if not self._is_cut(batch) else self._loss_of_parts(loss, model, batch)
        if isinstance(result, tuple) and isinstance(result[0], torch.Tensor):
            self.loss_dtype = str(result[0].dtype).removeprefix("torch.")
        return result

    def _look(self, model: nn.Module, batch: Any) -> None:
        if self.rows_of_step == 0:
            self.given.evaluates_in_training |= self._has_trained and getattr(model, "training", False)
        elif own_method(self._workload, "collate") is None:  # else what a batch looks like depends on its size
            self.given.take(batch)

    def _collated_parts(self, rows: Rows) -> Any:
        """Batch of these rows or, for a whole step, batches of its parts, since a collated batch cannot be divided."""
        assert self._partition is not None
        collate, columns, gives_tuples = own_method(self._workload, "collate"), rows.columns, rows.gives_tuples
        if self.rows_of_step == 0 or len(rows) != self.rows_of_step:
            return collated(collate, columns, gives_tuples=gives_tuples)
        parts = [_rows(columns, part) for part, _ in self._partition.pieces(self.rows_of_step)]
        return _Parts(collated(collate, part, gives_tuples=gives_tuples) for part in parts)

    def _is_cut(self, batch: Any) -> bool:
        if isinstance(batch, _Parts):
            return True
        if own_method(self._workload, "collate") is not None:
            return False
        return self._partition is not None and self.rows_of_step > 0 and _num_rows(batch) == self.rows_of_step

    def _loss_of_parts(self, loss: Callable[[Any, Any], Any], model: nn.Module, batch: Any) -> Any:
        assert self._partition is not None
        total: Any = 0.0
        count: Any = 0
        for number, (rows, is_first) in enumerate(self._partition.pieces(self.rows_of_step)):
            with contextlib.nullcontext() if is_first else _untracked(self._norms):
                part = batch[number] if isinstance(batch, _Parts) else _rows(batch, rows)
                part_total, part_count = loss(model, part)
            total, count = total + part_total, count + part_count
        return total, count

    def _quieten(self, model: nn.Module) -> None:
        found = set()
        for name, module in model.named_modules():
            if _take_out_dropout(module, partial(self._masks.draw, name) if self._masks is not None else None):
                found.add("dropout")
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                found.add("SyncBatchNorm" if isinstance(module, nn.SyncBatchNorm) else "BatchNorm")
                if not self._keeps_statistics:
                    _freeze_statistics(module)
        if self._what == self.EVERYTHING:
            for module in model.modules():
                _stay_in_evaluation(module)
            found = {"everything"}
        self.found = sorted(found, reverse=True)


def _take_out_dropout(module: nn.Module, draw: Callable[[], None] | None) -> bool:
    """Remove dropout from a module; returns whether it had any. draw: called instead of drawing a mask."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        if not module.p > 0:
            return False
        module.p = TakenOut(module.p)
        if draw is not None:

            def watched(x: torch.Tensor) -> torch.Tensor:
                if module.training:
                    draw()
                return x

            module.forward = watched
        return True
    # attention and recurrent networks keep their rate as `dropout`
    if not (isinstance(rate := getattr(module, "dropout", None), float) and rate > 0):
        return False
    module.dropout = TakenOut(rate)  # type: ignore[assignment]
    if draw is not None:
        module.register_forward_pre_hook(lambda module, args: draw() if module.training else None)
    return True


def _freeze_statistics(module: Any) -> None:
    if module.running_mean is None:  # without statistics of its own it would use the batch's even in evaluation mode
        module.running_mean, module.running_var = torch.zeros(module.num_features), torch.ones(module.num_features)
    _stay_in_evaluation(module)


def _stay_in_evaluation(module: nn.Module) -> None:
    module.eval()
    module.train = lambda mode=True: module  # type: ignore[method-assign] # a loss may call model.train()


def _norms(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]


@contextlib.contextmanager
def _untracked(norms: Sequence[Any]) -> Iterator[None]:
    """Context in which batch statistics are used but not stored."""
    for module in norms:
        module.track_running_stats = False
    try:
        yield
    finally:
        for module in norms:
            module.track_running_stats = True


def _tensors(batch: Any) -> list[torch.Tensor]:
    values = batch.values() if isinstance(batch, dict) else batch
    return [value for value in values if isinstance(value, torch.Tensor) and value.ndim]


def _num_rows(batch: Any) -> int:
    return len(_tensors(batch)[0])


def _rows(batch: Any, rows: slice) -> Any:
    if isinstance(batch, dict):
        return {name: value[rows] for name, value in batch.items()}
    return tuple(value[rows] for value in batch)
