"""Interface between a strategy and the training loop."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from scaleray.records.phases import Enter
from scaleray.records.profile_record import CollectiveRow
from scaleray.strategies.contract.arrivals import ArrivalSource
from scaleray.strategies.contract.numbers import Number, Truth
from scaleray.strategies.contract.weight_shares import WeightShare

Tensors = dict[str, torch.Tensor]
Metrics = Mapping[str, "float | Callable[[], float]"]
"""Metrics by name: numbers, or functions that wait for a number that the device may still be computing."""


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a step on the device, in the loss's form, and how many of them count (0 for a placeholder)."""

    batch: Any
    weight: int


Computation = Callable[[nn.Module], Any]
"""User code that computes with the model passed to it, such as a call of the workload's loss."""
Run = Callable[[Computation], Any]
"""Function that runs a computation on a model and returns its result."""


class OnModel(nn.Module):
    """Module that runs user code on the user's own model: `on_model(computation)` is `computation(module)`.

    Strategies wrap this module instead of the model. Any use of the model in the computation (calling it once or
    several times, calling a method or a part, reading a weight) is then a single forward pass for the wrapper, and the
    code gets the model as `build_model` made it, with all its methods and attributes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, computation: Computation) -> Any:
        return computation(self.module)


class Objective(Protocol):
    """Scaled loss of one micro-batch, ready for `backward()`. Records its sum and count. run: runs the computation."""

    def __call__(self, run: Run, piece: MicroBatch) -> torch.Tensor: ...


@dataclass(frozen=True)
class Parallel:
    """A model distributed over workers, and the functions that the loop calls. "Collective" means that every worker
    calls the function, in the same order."""

    model: nn.Module
    """`module` itself, or the wrapper around it that synchronises backward passes and takes a `Computation`.
    See `run`."""
    module: nn.Module
    """The user's own model inside, whose state is trained; it has the user's methods and attributes."""
    alone: Run | None = None
    """Implementation of `run_alone` if it does more than compute on `module`."""
    gradient_divisor: int = 1
    """Number by which the strategy divides summed gradients: the world size if it averages, 1 if it sums.
    See `local_divisor` for local steps."""
    no_sync: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """Context of a micro-batch that is not the last one of its step, in which gradients stay local."""
    abandon: Callable[[], None] | None = None
    """Abandon a step in which no backward pass has communicated yet, so that it can be repeated. None if this is
    impossible."""
    before_evaluation: Callable[[], None] = lambda: None
    """Make buffers equal on all ranks. Collective."""
    weights: Callable[[], WeightShare] = WeightShare
    """Share of the final weights that this rank writes: rank 0 has all of an unsharded model. Collective."""
    close: Callable[[], None] = lambda: None
    """Remove every hook from the user's model, and make sharded parameters whole if they fit. Collective."""
    let_go: Callable[[], None] | None = None
    """Part of `close` that the next run in this process needs if the model is discarded. Sharded parameters stay
    shards. Not collective. None if `close` itself waits for no other rank and is used instead."""

    total_norm: Callable[[Sequence[torch.Tensor]], torch.Tensor] = lambda gradients: (
        torch.linalg.vector_norm(gradients[0]) if len(gradients) == 1 else torch.nn.utils.get_total_norm(gradients)
    )
    """Norm of the whole model's gradient, given this rank's gradients. Collective if gradients are sharded."""
    share_of_square: Callable[[Sequence[torch.Tensor]], float] | None = None
    """This rank's share of the squared norm of the whole model's gradient, in float64; the shares of all ranks add up
    to it. For callers that sum other values over ranks anyway. None if only `total_norm` exists."""
    forward_is_collective: bool = False
    """Whether a forward pass communicates, so that all ranks must run the same number of them."""
    owns: Callable[[nn.Parameter], bool] = lambda parameter: True
    """Whether this rank's optimizer updates the parameter. With ZeRO-1, others receive it in `after_update`."""
    after_update: Callable[[int], None] = lambda step: None
    """Hook after optimizer step `step`, counted from 1, in which ranks communicate parameters."""
    carry_over: Callable[[Number, Truth], None] | None = None
    """Hook before `after_update`, for gradients that a strategy keeps from step to step. Its arguments are the ratio of
    the next step's gradients to this one's, as the loss scale and the expected count change, and whether the optimizer
    took the step. None if the strategy keeps none."""
    is_partitioned: bool = False
    """Whether ranks have parameters or optimizer state that others lack, as with pipeline stages and ZeRO-1."""

    is_local: Callable[[int], bool] = lambda step: False
    """Whether, in step `step`, counted from 1, gradients are those of this rank's own samples, divided by their own
    count. Norm and clipping are then also per rank."""
    synchronises: Callable[[int], bool] = lambda step: True
    """Whether all ranks sum losses and signals in step `step`, counted from 1. Evaluations, checkpoints and the end of
    the training are also synchronisations. In any other step the recorded loss is that of rank 0's own samples."""
    local_group: dist.ProcessGroup | None = None
    """Ranks that share one replica and take its local steps together: samples, counts, norm and clipping then cover all
    of them. None if each rank is a replica."""
    local_divisor: int = 1
    """`gradient_divisor` in local steps."""
    after_backward: Callable[[int], None] = lambda step: None
    """Hook after the last backward pass of step `step`, before the gradients are used. Collective."""
    replicas_differ: bool = False
    """Whether replicas have different values of the same parameters; checkpoints then contain those of each replica."""
    replica: int = 0
    """Number of this rank's replica, if replicas differ."""
    averaged: Callable[[bool], contextlib.AbstractContextManager[Any]] = lambda with_optimizer: contextlib.nullcontext()
    """Context in which `module`, and the optimizer's state if requested, have the mean of all replicas. Afterwards each
    replica has its own values again. Collective."""
    use_optimizer: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None
    """Receives the optimizer as soon as it is built."""
    before_step: Callable[[int], None] = lambda step: None
    """Hook before the first forward pass of optimizer step `step`, counted from 1."""

    parameter_names: tuple[str, ...] = ()
    """Names of all parameters in the whole model's order, if `module` has only some of them (pipeline stages)."""

    run_micro_batches: (
        Callable[[list[MicroBatch], Objective, Callable[[], contextlib.AbstractContextManager[Any]]], None] | None
    ) = None
    """Forward and backward passes of all micro-batches of a step, if the strategy determines their order:
    (micro-batches, objective, autocast). The objective is called once per micro-batch, on ranks that count the loss."""
    counts_loss: bool = True
    """Whether this rank's losses count; of several ranks with the same samples, only one's do."""

    state: Callable[[], Tensors] = dict
    """The strategy's own state on this rank (outer momentum, error feedback), by reference, for checkpoints."""
    load_state: Callable[[Tensors], None] = lambda state: None
    """Restore a `state` saved by this rank with the same number of workers. It is empty if that number changed."""
    bytes_sent: Callable[[], float] = lambda: 0.0
    """Bytes that this rank has passed to collectives and sends, for gradients, parameters and activations, since the
    strategy was applied. Payloads are counted once, whatever the algorithm."""
    collectives: Callable[[], list[CollectiveRow]] = list
    """The same bytes by group and operation; empty if a strategy counts only the total."""
    arrivals: ArrivalSource | None = None
    """Source of this rank's arrival times at the collectives of a step, if available."""
    no_arrivals: str = ""
    """Reason why lateness of ranks cannot be measured."""
    show_own_gradients: Callable[[Callable[[torch.Tensor, float], None] | None], None] | None = None
    """From now on, call `see(piece, factor)` with each piece of this rank's own gradient, divided by `factor`,
    immediately before it is summed with those of the others; None as `see` ends this. None as the field means that
    parameter hooks provide the gradient, in a step's last backward pass."""
    tell_phases: Callable[[Enter], None] = lambda enter: None
    """Receives the function that enters a phase, for phases inside a pass that only the strategy can observe. When this
    rank begins to wait for a collective, the strategy enters `Phase.COMMUNICATION`, and afterwards the previous phase
    again."""
    metrics: Callable[[], Metrics] = dict
    """Metrics of the last step by name, such as the consensus distance."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user about choices. Each is reported once, as an event of the run. The list may grow."""

    def run(self, computation: Computation) -> Any:
        """Result of user code on the model, run as the forward pass of a micro-batch whose backward pass is then
        synchronised. Collective if `forward_is_collective`."""
        return computation(self.module) if self.model is self.module else self.model(computation)

    def run_alone(self, computation: Computation) -> Any:
        """Result of user code on the model without a backward pass, as in evaluations. Collective if
        `forward_is_collective`."""
        return computation(self.module) if self.alone is None else self.alone(computation)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Whole value of a tensor that may be sharded. Collective if it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def known(figures: Metrics) -> dict[str, float]:
    """The metrics as numbers, after waiting for those that the device is still computing."""
    return {name: value() if callable(value) else value for name, value in figures.items()}
