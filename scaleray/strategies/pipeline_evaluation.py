"""Evaluation of a model whose stages lie on several workers: each of them gets the output of the last."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from scaleray.strategies.pipeline_parts import Parts


class Whole(nn.Module):
    """The whole model for evaluation: a call gives its output on every worker of the replica. Collective.

    The stages run one after the other, without gradients. Anything else is asked of this worker's part of the model.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self._stages = parts  # no module, so that its parameters are not counted twice

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._stages.gathered():
            return self._forward(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        parts = self._stages

        def call(module: nn.Module) -> Any:
            return module(*args, **kwargs)

        if not parts.is_checked:
            parts.check_chain(call)
        output = None
        for stage in parts.stages:
            parts.in_mode_of_module(stage)
            stage.entry.on_pass = lambda: None
            received = _receive(parts.owner(stage.index - 1), parts) if stage.index else None
            result = stage.run(call, received)
            if stage.is_last:
                output = result
            else:
                _send(result, parts.owner(stage.index + 1), parts)
        return _from_last(output, parts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_stages"].module, name)


def _send(tensor: torch.Tensor, to: int, parts: Parts) -> None:
    tensor = tensor.detach().contiguous()
    header = [(tuple(tensor.shape), tensor.dtype)]
    dist.send_object_list(header, group=parts.group, group_dst=to, device=parts.device)
    dist.send(tensor, group=parts.group, group_dst=to)


def _receive(source: int, parts: Parts) -> torch.Tensor:
    header: list[Any] = [None]
    dist.recv_object_list(header, group=parts.group, group_src=source, device=parts.device)
    tensor = torch.empty(header[0][0], dtype=header[0][1], device=parts.device)
    dist.recv(tensor, group=parts.group, group_src=source)
    return tensor


def _from_last(output: Any, parts: Parts) -> Any:
    """The last worker's output on all of them. Collective."""
    source = parts.owner(parts.num_stages - 1)
    told: list[Any] = [None]
    leaves: list[Any] = []
    if parts.has_last:
        leaves = [x.detach().contiguous() if isinstance(x, torch.Tensor) else x for x in tree_leaves(output)]
        told = [tree_map_only(torch.Tensor, lambda x: _Shape(tuple(x.shape), x.dtype), output)]
    dist.broadcast_object_list(told, group=parts.group, group_src=source, device=parts.device)
    shown, structure = tree_flatten(told[0])
    received = []
    for number, leaf in enumerate(shown):
        if isinstance(leaf, _Shape):
            mine = leaves[number] if parts.has_last else torch.empty(leaf.shape, dtype=leaf.dtype, device=parts.device)
            dist.broadcast(mine, group=parts.group, group_src=source)
            leaf = mine
        received.append(leaf)
    return tree_unflatten(received, structure)


class _Shape:
    """A tensor in an output that was sent without its values."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
