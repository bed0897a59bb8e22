"""A workload's call of its model: the input tensors, which an exported program also receives, and the outputs."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from scaleray.data.source_interface import Columns, rows_in
from scaleray.errors import WorkloadError
from scaleray.models.load import TrainedModel


@dataclasses.dataclass(frozen=True)
class ModelCall:
    """Arguments of one call of a model. num_rows: number of rows from which they were made."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    num_rows: int

    @classmethod
    def of(cls, model: TrainedModel, rows: Columns) -> ModelCall:
        """The workload's first call of its model for these rows. Raises WorkloadError if it calls only parts of the
        model."""
        seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.append((args, kwargs))

        handle = model.module.register_forward_pre_hook(look, with_kwargs=True)
        try:
            model.answers()(model.changed(rows))
        finally:
            handle.remove()
        if not seen:
            text = "calls a part or a method of the model, and only the model's whole forward() can be exported"
            raise WorkloadError.problem("the workload", text, "call the model in predict() or loss()")
        return cls(*seen[0], rows_in(rows))

    def of_dtype(self, dtype: torch.dtype) -> ModelCall:
        """The same call with floating-point tensors of another dtype."""
        to: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: (
            tensor.to(dtype) if tensor.is_floating_point() else tensor
        )
        args, kwargs = mapped(self.args, to), mapped(self.kwargs, to)
        return ModelCall(args, kwargs, self.num_rows)

    def __call__(self, module: Callable[..., Any]) -> list[torch.Tensor]:
        """Call a module, and return its output tensors in order."""
        with torch.no_grad():
            return list(tensors_in(module(*self.args, **self.kwargs)))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments, in order."""
        return list(tensors_in([self.args, self.kwargs]))

    def shapes(self, module: nn.Module) -> dict[str, Any] | None:
        """Dimensions of the arguments that count rows, for `torch.export.export`; None if they cannot be determined."""
        try:
            named = inspect.signature(module.forward).bind(*self.args, **self.kwargs).arguments
        except TypeError:
            return None
        rows: Callable[[torch.Tensor], Any] = lambda tensor: (
            {0: torch.export.Dim.AUTO} if tensor.dim() and len(tensor) == self.num_rows else None
        )
        return {name: mapped(value, rows, other=None) for name, value in named.items()}


KEEP = object()


def mapped(value: Any, change: Callable[[torch.Tensor], Any], *, other: Any = KEEP) -> Any:
    """Copy of nested lists, tuples and mappings with changed tensors. other: replacement for everything else."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {name: mapped(one, change, other=other) for name, one in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(one, change, other=other) for one in value)
    return value if other is KEEP else other


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in nested lists, tuples and mappings, which include the outputs of transformers' models."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from tensors_in(one)


def distance(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Largest difference between two calls' tensors, relative to the largest value of each; infinite if their
    structures differ."""
    if len(mine) != len(theirs) or not mine:
        return math.inf
    worst = 0.0
    for one, other in zip(mine, theirs, strict=True):
        if one.shape != other.shape:
            return math.inf
        if not one.numel():
            continue
        wide, of = one.double(), other.double()
        gap = float((wide - of).abs().max())
        if math.isnan(gap):
            return math.inf
        worst = max(worst, gap / max(float(of.abs().max()), 1e-30) if gap else 0.0)
    return worst
