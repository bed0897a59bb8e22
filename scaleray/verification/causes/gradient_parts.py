"""Decompose a synchronised gradient: find the weight of every rank's every micro-batch in it.

Each rank recomputes the gradients of its own micro-batches, on a plain model without any strategy. The step's gradient
is then expressed as a mixture of them, by least squares. Of several losses only the first is used, since it starts from
the same weights as the step. `trace_probe` uses this for a step whose gradient is in doubt."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from scaleray.data import TRAIN, RankBatch
from scaleray.parallel import context
from scaleray.strategies.contract.parallel import full
from scaleray.training.setup.fine_tuning import adapt
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.model_setup import Setup
from scaleray.training.setup.precision import in_float64
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.setup.several_optimizers import SeveralOptimizers
from scaleray.training.setup.weighted_losses import losses_of
from scaleray.training.step.micro_batches import micro_batches, user_batch
from scaleray.verification.causes.gradient_values import Relation, relation_of
from scaleray.verification.traces.signatures import Signer
from scaleray.workload import built_model

PROJECTIONS = 16
SAME = 1e-6

Collect = Callable[[Any], Any]


class GradientParts:
    """Decomposition of the gradient of one step. All methods are collective.

    names: names of all parameters, in order. whole: adds the values of this replica's other ranks to values by name;
    gather: gathers a value from every rank. shares, stale: as for `from_shares`; shares are None if the gradient is not
    a mixture."""

    def __init__(
        self,
        job: TrainJob,
        place: RankContext,
        setup: Setup,
        names: Sequence[str],
        step: int,
        *,
        whole: Collect,
        gather: Collect,
    ) -> None:
        self.job, self.place, self.setup, self.names, self.step = job, place, setup, names, step
        self._whole, self._gather = whole, gather
        self.shares: tuple[np.ndarray, np.ndarray] | None = None
        self.stale = 0.0
        self.relations: dict[str, Relation] = {}
        """Relations of wrong gradients to the right ones, by parameter name."""
        self.unsent: float | None = None
        """Error of a compressed gradient plus its remainder, relative to the true gradient. It must include the
        previous step's remainder."""
        self._found = self._before = np.zeros(0)
        self._left: np.ndarray | None = None
        self._carried: np.ndarray | None = None
        self._lost = np.zeros(0)
        self._is_seen = False
        self._loss, self._moves = _first_loss(job.workload, setup)
        self._sign = Signer(PROJECTIONS)
        self._due: dict[str, torch.Tensor] = {}
        self._count = 0.0

    def begin(self, number: int, batch: RankBatch) -> None:
        """Begin a step with this rank's rows."""
        self.number, self._is_seen = number, False
        if number == self.step:
            self._pieces, self._left = self._take_apart(batch), self._left_over()
            if self._left is not None:
                self._lost = self._left - self._carried if self._carried is not None else np.zeros_like(self._left)

    def see(self, gradients: Mapping[str, torch.Tensor | None], correction: float) -> None:
        """Record the step's gradients, whole and by name; `correction` scales them to mean gradients. Gradients of
        further losses are ignored."""
        if self._is_seen:
            return
        self._is_seen = True
        if self.step - 1 <= self.number <= self.step:
            signatures = self._whole({n: self._signature(n, g) for n, g in gradients.items()})
            self._before = self._found
            self._found = np.concatenate([signatures[name] for name in self.names]) * correction
        if self.number == self.step - 1 and (left := self._left_over()) is not None:
            self._carried = left * correction
        if self.number == self.step and self._due:
            self._relate(gradients, correction)
        if self.number == self.step and self._left is not None:
            left = self._left_over()
            assert left is not None
            self._left = (self._left - left) * correction

    def end(self) -> None:
        """End the step; if it is the one to decompose, find the shares."""
        if self.number != self.step:
            return
        mine = (*self._pieces, self._found, self._before, (self._left, self._lost))
        gathered = self._gather(mine)
        everyone = [gathered[ranks[0]] for ranks in self.place.mesh.token_shares]
        self.shares = self._solved(everyone)
        if self._left is not None:
            total = sum(sum(counts) for _, counts, *_ in everyone)
            true = sum(gradients.sum(axis=0) for gradients, *_ in everyone) / total
            missing = everyone[0][2] - true - np.mean([left for *_, (left, _) in everyone], axis=0)
            lost = [lost for *_, (_, lost) in everyone]
            self.unsent = float(max(np.linalg.norm(m) for m in (missing, *lost)) / (np.linalg.norm(true) or 1.0))

    def _relate(self, gradients: Mapping[str, torch.Tensor | None], correction: float) -> None:
        """Compare the step's gradients value by value with the sum over all micro-batches. Collective."""
        count = torch.tensor(self._count, dtype=torch.float64, device=self.place.device)
        due = {"": count, **self._due}
        for tensor in due.values() if self.place.world_size > 1 else ():
            dist.all_reduce(tensor, group=self.place.group)
        parameters = dict(self.setup.parallel.module.named_parameters())
        mine = {
            name: relation_of(gradient * correction, due[name] / due[""], full(parameters[name]))
            for name, gradient in gradients.items()
            if gradient is not None and name in due
        }
        found = {name: r for theirs in self._gather(mine) for name, r in theirs.items() if r is not None}
        self.relations = {name: found[name] for name in self.names if name in found}
        self._due = {}

    def let_go(self) -> None:
        """Release references to the ended training and to the signs of its parameters."""
        for name in ("setup", "_sign", "_moves"):
            vars(self).pop(name, None)

    def _take_apart(self, batch: RankBatch) -> tuple[np.ndarray, list[float]]:
        """Each micro-batch's own gradient without any strategy, as (signatures (micro-batches, values), counts)."""
        model = self._plain_model()
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad and self._moves(n)}
        gives_tuples = self.job.splits[TRAIN].gives_tuples
        gradients, counts = [], []
        if not self.setup.parallel.replicas_differ and self.job.config.compression.name == "none":
            self._due = {name: torch.zeros_like(parameter) for name, parameter in trained.items()}
        for arrays, weight in micro_batches(batch, self.job.recipe.micro_batch_size):
            dtype = self.setup.precision.input_dtype
            rows = user_batch(self.job.workload, arrays, self.place.device, dtype, gives_tuples=gives_tuples)
            with self.setup.precision.autocast():
                loss, count = self._loss(model, rows)
            by_name = dict(zip(trained, _gradients(loss, list(trained.values())), strict=True))
            for name, gradient in by_name.items():
                if gradient is not None and weight and name in self._due:
                    self._due[name] += gradient
            gradients.append(np.concatenate([self._signature(n, by_name.get(n)) for n in self.names]) * bool(weight))
            counts.append(float(count) * bool(weight))
        self._count = sum(counts)
        return np.array(gradients), counts

    def _plain_model(self) -> nn.Module:
        """A new model with the current values and without a strategy. Collective for sharded parameters."""
        with self.place.device:
            model: nn.Module = built_model(self.job.workload)
        adapt(model, self.job.config.fine_tuning)
        if self.job.config.precision.dtype == "fp64":
            in_float64(model)
        module = self.setup.parallel.module
        values = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        values = self._whole({name: full(tensor.detach()) for name, tensor in values.items()})
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                tensor.copy_(values[name])
        return model

    def _left_over(self) -> np.ndarray | None:
        """Signatures of this rank's gradients that compression has not sent; None without compression."""
        if self.job.config.compression.name == "none" or self.place.world_size == 1:
            return None
        state = self.setup.parallel.state()
        return np.concatenate([self._signature(name, state.get(f"left.{name}")) for name in self.names])

    def _signature(self, name: str, tensor: torch.Tensor | None) -> np.ndarray:
        return np.zeros(PROJECTIONS) if tensor is None else self._sign(name, tensor)[2:]

    def _solved(self, everyone: list[Any]) -> tuple[np.ndarray, np.ndarray] | None:
        """Express each rank's gradient as a mixture of all micro-batches' gradients and the previous step's."""
        most = max(len(counts) for _, counts, *_ in everyone)
        counts = np.array([[*counts, *[0.0] * (most - len(counts))] for _, counts, *_ in everyone])
        there = np.concatenate([np.array(c) > 0 for _, c, *_ in everyone])
        columns = np.concatenate([gradients for gradients, *_ in everyone]).T[:, there] / counts.sum()
        shares = np.zeros((len(everyone), *counts.shape))
        positions = [(rank, piece) for rank, (_, c, *_) in enumerate(everyone) for piece in range(len(c))]
        kept = [position for position, is_there in zip(positions, there, strict=True) if is_there]
        for view, (_, _, found, before, _) in enumerate(everyone):
            weights, rest = _mixture(columns, found)
            if rest > SAME and before.any():
                weights, rest = _mixture(np.column_stack([columns, before]), found)
                self.stale = float(weights[-1])
            if rest > SAME:
                return None
            for (rank, piece), weight in zip(kept, weights, strict=False):
                shares[view, rank, piece] = weight
        return shares, counts


def _gradients(loss: torch.Tensor, parameters: list[nn.Parameter]) -> list[torch.Tensor | None]:
    """Gradients of this worker's loss. If workers share sequences, a pass involves all of them, so each in turn
    contributes the only loss that counts. Collective over these workers."""
    own: list[torch.Tensor | None] = []
    for number in range(context.size()):
        is_own = number == context.rank()
        found = torch.autograd.grad(loss * float(is_own), parameters, allow_unused=True, retain_graph=True)
        if context.size() > 1:
            found = tuple(
                context.summed(torch.zeros_like(p) if g is None else g) for p, g in zip(parameters, found, strict=True)
            )
        own = list(found) if is_own else own
    return own


def _first_loss(workload: Any, setup: Setup) -> tuple[Callable[[Any, Any], Any], Callable[[str], bool]]:
    """The workload's loss, or the first of several, and a function that tells whether this loss moves a parameter."""
    losses = losses_of(workload)
    if losses is None:
        return workload.loss, lambda name: True
    assert isinstance(setup.optimizer, SeveralOptimizers)
    name, loss = next(iter(losses.items()))
    own = {id(p) for p in setup.optimizer.parameters_of[name]}
    moved = {n for n, p in setup.parallel.module.named_parameters() if id(p) in own}
    return loss, moved.__contains__


def _mixture(columns: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, float]:
    """Best mixture of the columns for the target, as (weights, remaining distance relative to the target)."""
    weights, *_ = np.linalg.lstsq(columns, target, rcond=None)
    rest = float(np.linalg.norm(columns @ weights - target))
    return weights, rest / (float(np.linalg.norm(target)) or 1.0)
