"""The repeated blocks of a model, and how to replace a block's forward pass without renaming its parameters.

Wrapping a block in another module, as torch's checkpoint_wrapper and torch.compile(module) do, adds a prefix to the
names of its parameters, and checkpoints no longer fit. Replacing the block's own method keeps every name."""

import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from scaleray.errors import WorkloadError
from scaleray.workload import call_user_code

Forward = Callable[..., Any]
"""Forward pass as a function of the module and its inputs."""


def model_blocks(workload: Any, model: nn.Module, *, wanted_by: str) -> list[nn.Module]:
    """Blocks from the workload's `blocks`, in its order. Raises WorkloadError, naming `wanted_by`, if there are
    none."""
    method = getattr(workload, "blocks", None)
    found = call_user_code(lambda: method(model), what="blocks()", doing="naming the blocks") if method else None
    hint = "add blocks(self, model) to the workload: it returns the repeated parts, such as model.blocks"
    if found is None:
        raise WorkloadError("blocks()", None, f"{wanted_by} applies to the model's blocks", hint)
    blocks = list(found)
    if not blocks:
        raise WorkloadError("blocks()", "no blocks", f"{wanted_by} applies to the model's blocks", hint)
    inside = set(map(id, model.modules()))
    for block in blocks:
        if not isinstance(block, nn.Module) or id(block) not in inside:
            raise WorkloadError.problem(
                "blocks()", f"returned a {type(block).__name__}: every block must be a part of the model"
            )
    if len(set(map(id, blocks))) < len(blocks):
        raise WorkloadError.problem("blocks()", "returned one block twice: every block must be returned once")
    return blocks


def forward_of(module: nn.Module) -> Forward:
    """Forward pass of a module as a function of the module; one function for all modules of a class."""
    forward = module.forward
    if inspect.ismethod(forward) and forward.__self__ is module:
        return forward.__func__
    return lambda self, *args, **kwargs: forward(*args, **kwargs)


def replace_forward(module: nn.Module, forward: Forward) -> Callable[[], None]:
    """Replace the module's own forward pass; hooks stay outside of it. Returns a function that undoes it."""
    before = module.__dict__.get("forward")
    module.forward = types.MethodType(forward, module)

    def undo() -> None:
        if before is None:
            module.__dict__.pop("forward", None)
        else:
            module.forward = before

    return undo
