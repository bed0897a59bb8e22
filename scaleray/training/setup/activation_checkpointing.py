"""Activation checkpointing: which activations of the model's blocks are stored for the backward pass, and which are
recomputed.

A checkpointed block stores only its inputs. Memory falls from the sum over all blocks to that of one block, at the cost
of a second forward pass through each (Chen et al. 2016, arXiv:1604.06174). Selective checkpointing keeps the outputs of
matrix products and attention, which are most of the arithmetic, and recomputes the cheap rest (Korthikanti et al. 2022,
arXiv:2205.05198). Losses and gradients are the same to the bit: random numbers repeat, and buffers are not updated
twice."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from scaleray.config.compilation_activation_memory import ActivationSettings
from scaleray.training.setup.blocks import Forward, forward_of, model_blocks, replace_forward

Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]
"""Contexts of the first pass through a block, and of its recomputation."""

aten = torch.ops.aten
KEPT = frozenset(
    {
        aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default,
        aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)  # fmt: skip
"""Operations whose results selective checkpointing stores: nearly all of a block's FLOPs."""


def apply(model: nn.Module, settings: ActivationSettings, workload: Any) -> Callable[[], None]:
    """Checkpoint blocks of `model` in place, keeping the names of parameters. Returns a function that undoes it.

    torch.compile implements `budget`, see `compilation`. Raises WorkloadError if the workload names no blocks."""
    if settings.checkpointing in ("none", "budget"):
        return lambda: None
    blocks = model_blocks(workload, model, wanted_by=f"activations.checkpointing {settings.checkpointing}")
    every = settings.every if settings.checkpointing == "every" else 1
    selective = settings.checkpointing == "selective"
    # one function for all blocks of a class: torch.compile then compiles it once
    checkpointed: dict[Forward, Forward] = {}
    undo = contextlib.ExitStack()
    for block in blocks[::every]:
        forward = forward_of(block)
        function = checkpointed.setdefault(forward, _checkpointed(forward, selective=selective))
        undo.callback(replace_forward(block, function))
    return undo.close


def _checkpointed(forward: Forward, *, selective: bool) -> Forward:
    def checkpointed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        more: dict[str, Any]
        if torch.compiler.is_compiling():  # the compiled repetition updates no buffers, and takes torch's contexts only
            more = {"context_fn": _selective_contexts} if selective else {}
        else:
            more = {"context_fn": functools.partial(_contexts, self, selective=selective)}
        return checkpoint(forward, self, *args, use_reentrant=False, **more, **kwargs)

    return checkpointed


def keep_or_repeat(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Decision of selective checkpointing for one operation: store its result or recompute it."""
    if operation not in KEPT or _draws_random_numbers(operation, args, kwargs):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def _draws_random_numbers(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # attention with dropout must run again: skipping it would shift the random numbers of everything after it
    names = [argument.name for argument in operation._schema.arguments]
    if "dropout_p" not in names:
        return False
    position = names.index("dropout_p")
    probability = args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)
    return bool(probability > 0)


def _selective_contexts() -> Contexts:
    first, again = create_selective_checkpoint_contexts(keep_or_repeat)
    return first, again


def _contexts(block: nn.Module, *, selective: bool) -> Contexts:
    first, again = _selective_contexts() if selective else (contextlib.nullcontext(), contextlib.nullcontext())
    buffers = _Buffers(block)
    return _both(buffers.remembered(), first), _both(buffers.set_aside(), again)


@contextlib.contextmanager
def _both(outer: Any, inner: Any) -> Iterator[None]:
    with outer, inner:
        yield


class _Buffers:
    """Buffers of a block. A recomputation starts from their values before the first pass, and leaves them unchanged.

    Otherwise BatchNorm would count each batch twice, and spectral normalisation would compute with another vector."""

    def __init__(self, block: nn.Module) -> None:
        self.there = [(part, name) for part in block.modules() for name, b in part._buffers.items() if b is not None]
        self.before: dict[tuple[nn.Module, str], torch.Tensor] = {}

    @contextlib.contextmanager
    def remembered(self) -> Iterator[None]:
        found = {place: _buffer(*place) for place in self.there}
        versions = {place: (buffer._version, buffer.clone()) for place, buffer in found.items()}
        yield
        for place, (version, copy) in versions.items():
            if _buffer(*place) is not found[place] or found[place]._version != version:
                self.before[place] = copy

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        kept = {place: _buffer(*place) for place in self.there}
        for (part, name), buffer in kept.items():
            part._buffers[name] = self.before[part, name] if (part, name) in self.before else buffer.clone()
        try:
            yield
        finally:
            for (part, name), buffer in kept.items():
                part._buffers[name] = buffer


def _buffer(part: nn.Module, name: str) -> torch.Tensor:
    buffer = part._buffers[name]
    assert buffer is not None
    return buffer
