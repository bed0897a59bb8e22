"""What a strategy gives to the training loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from scaleray.strategies.weight_shares import WeightShare

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a step on the device, as the loss takes them, and how many of them count: 0 for a placeholder."""

    batch: Any
    weight: int


Computation = Callable[[nn.Module], Any]
"""Code of the user's that computes with the model it is given, such as a call of the workload's loss."""
Run = Callable[[Computation], Any]
"""Runs a computation on a model, and gives its result."""


class OnModel(nn.Module):
    """Runs the user's code on his own model: `on_model(computation)` is `computation(module)`.

    This is what strategies wrap, and not the model itself: whatever the computation does with the model (calls it, once or
    several times, or a method or a part of it, or reads a weight) then lies within what the wrapper sees as one forward
    pass, and the code gets the model as `build_model` made it, with all its methods and attributes.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, computation: Computation) -> Any:
        return computation(self.module)


class Objective(Protocol):
    """The scaled loss of one micro-batch, ready for `backward()`; books sum and count on the way. run: where it is computed."""

    def __call__(self, run: Run, piece: MicroBatch) -> torch.Tensor: ...


@dataclass(frozen=True)
class Parallel:
    """A model spread over workers, and the few things the loop calls. "Collective": every worker calls it, in one order."""

    model: nn.Module
    """`module` itself, or what is wrapped around it to synchronise backward passes: that takes a `Computation`. See `run`."""
    module: nn.Module
    """The user's own model inside, whose state is trained; it has the user's methods and attributes."""
    alone: Run | None = None
    """What `run_alone` does, where it is more than to compute on `module`."""
    gradient_divisor: int = 1
    """By how much the strategy divides summed gradients: the world size where it averages, 1 where it sums. Of local
    steps nothing is summed."""
    no_sync: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """Context of a micro-batch that is not the last of its step: gradients stay local."""
    abandon: Callable[[], None] | None = None
    """Forget a step none of whose backward passes has communicated yet, so that it can be repeated. None: it cannot."""
    before_evaluation: Callable[[], None] = lambda: None
    """Make buffers equal on all ranks. Collective."""
    weights: Callable[[], WeightShare] = WeightShare
    """What this rank is to write of the final weights: of an unsharded model rank 0 has them all. Collective."""
    close: Callable[[], None] = lambda: None
    """Take every hook off the user's model, and make sharded parameters whole where they fit. Collective."""
    let_go: Callable[[], None] | None = None
    """What of `close` the next run in this process needs, where nobody keeps the model: sharded parameters stay shards. Not
    collective. None: `close` waits for nobody."""

    total_norm: Callable[[Sequence[torch.Tensor]], torch.Tensor] = lambda gradients: (
        torch.linalg.vector_norm(gradients[0]) if len(gradients) == 1 else torch.nn.utils.get_total_norm(gradients)
    )
    """Norm of the whole model's gradient, of which this rank has these. Collective where gradients are sharded."""
    share_of_square: Callable[[Sequence[torch.Tensor]], float] | None = None
    """This rank's share of the squared norm of the whole model's gradient, in float64: the shares of all ranks add up to it.
    For those who sum something else anyway. None: there is only `total_norm`."""
    forward_is_collective: bool = False
    """A forward pass communicates, so that all ranks must run equally many."""
    owns: Callable[[nn.Parameter], bool] = lambda parameter: True
    """Whether this rank's optimizer updates the parameter (of ZeRO-1, others get it by `after_update`)."""
    after_update: Callable[[int], None] = lambda step: None
    """After optimizer step `step`, from 1. Where ranks communicate parameters."""
    carry_over: Callable[[float, bool], None] = lambda factor, was_taken: None
    """Before `after_update`, for gradients that a strategy keeps from step to step: (by what factor the next step's will be
    larger than this one's were, as the loss scale and the expected count change; whether the optimizer took the step)."""
    is_partitioned: bool = False
    """Ranks have parameters, or optimizer state, that others do not have at all: pipeline stages, ZeRO-1."""

    is_local: Callable[[int], bool] = lambda step: False
    """Whether, in step `step`, from 1, gradients are those of this rank's own samples, divided by their own count. Their
    norm and clipping are this rank's own then, too."""
    meets: Callable[[int], bool] = lambda step: True
    """Whether all ranks sum losses and signals in step `step`, from 1. Evaluations, checkpoints and the end are meetings
    too. In any other step the recorded loss is that of rank 0's own samples."""
    replicas_differ: bool = False
    """Ranks hold different values of the same parameters; checkpoints then keep each rank's."""
    averaged: Callable[[bool], contextlib.AbstractContextManager[Any]] = lambda with_optimizer: contextlib.nullcontext()
    """Context in which `module`, and if asked the optimizer's state, hold the mean of all replicas; each has its own
    again afterwards. Collective."""
    use_optimizer: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None
    """Take the optimizer, as soon as it is built."""
    before_step: Callable[[int], None] = lambda step: None
    """Before the first forward pass of optimizer step `step`, from 1."""

    parameter_names: tuple[str, ...] = ()
    """Names of all parameters in the whole model's order, where `module` holds only some of them: pipeline stages."""

    run_micro_batches: Callable[[list[MicroBatch], Objective, Callable[[], contextlib.AbstractContextManager[Any]]], None] | None = None  # fmt: skip
    """Forward and backward of all micro-batches of a step, where the strategy decides their order: (micro-batches,
    objective, autocast). The objective is called once a micro-batch, on ranks that count the loss."""
    counts_loss: bool = True
    """Whether this rank's losses count: where several ranks work on the same samples, one of them does."""

    state: Callable[[], Tensors] = dict
    """State of the strategy's own on this rank (an outer momentum, error feedback), by reference, for checkpoints."""
    load_state: Callable[[Tensors], None] = lambda state: None
    """Take `state` over, as saved by this rank of as many; empty after a change of the number of workers."""
    bytes_sent: Callable[[], float] = lambda: 0.0
    """Bytes that this rank has given to collectives and sends, for gradients, parameters and activations, since it was
    built: payloads, each counted once whatever the algorithm makes of them."""
    show_own_gradients: Callable[[Callable[[torch.Tensor, float], None] | None], None] | None = None
    """From now on, give `see(piece, factor)` each piece of this rank's own gradient, divided by `factor`, right before it
    meets the others'; None ends that. None: hooks of the parameters see it, in a step's last backward pass."""
    metrics: Callable[[], dict[str, float]] = dict
    """Figures of the last step by metric name, such as a consensus distance."""
    notes: list[str] = field(default_factory=list)
    """What a user should know about what was chosen; said once, in the run's events. May grow while training."""

    def run(self, computation: Computation) -> Any:
        """The result of the user's code on his model, as the forward pass of a micro-batch, whose backward pass is then
        synchronised. Collective where `forward_is_collective`."""
        return computation(self.module) if self.model is self.module else self.model(computation)

    def run_alone(self, computation: Computation) -> Any:
        """The same where no backward pass follows, as in evaluations. Collective where `forward_is_collective`."""
        return computation(self.module) if self.alone is None else self.alone(computation)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that may be sharded. Collective for a sharded one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
