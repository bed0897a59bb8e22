"""The torchmetrics objects of a module: they add up what steps give them, and their sums are brought together here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from scaleray.lightning.trainer import refused


def metric_objects(module: nn.Module) -> list[Any]:
    """The torchmetrics objects among a module's parts. The library is not imported for it."""
    return [part for part in module.modules() if any(_is_metric_class(parent) for parent in type(part).__mro__)]


def _is_metric_class(cls: type) -> bool:
    return cls.__name__ == "Metric" and cls.__module__.partition(".")[0] == "torchmetrics"


def connect(module: nn.Module, run: Any) -> None:
    """Let a module's objects begin anew, and bring their states together over the workers of this training:
    torchmetrics itself knows of the process group alone, in which others may train as well."""
    for metric in metric_objects(module):
        metric.reset()
        metric.dist_sync_fn = partial(_gathered, run)
        metric.distributed_available_fn = partial(_has_several, run)


def _has_several(run: Any) -> bool:
    return bool(run.world_size > 1)


def _gathered(run: Any, state: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    return [theirs.to(state.device) for theirs in run.gather(state.detach().cpu())]


def computed(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Values of objects over all workers by name; the objects begin anew. Collective."""
    values = {name: metrics[name].compute() for name in sorted(metrics)}
    for metric in metrics.values():
        metric.reset()
    for name, value in values.items():
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            shown = f"of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise refused(f"the value of the metric {name!r}, {shown},", "a logged value is one number")
    return {name: float(value) for name, value in values.items()}


@contextlib.contextmanager
def left_alone(module: nn.Module) -> Iterator[None]:
    """Context after which the objects' states are what they were."""
    kept = [(metric, _copied(metric.__dict__, [*metric.metric_state, *COUNTERS])) for metric in metric_objects(module)]
    try:
        yield
    finally:
        for metric, state in kept:
            metric.__dict__.update(state)


COUNTERS = ("_update_count", "_computed", "_forward_cache")


def _copied(values: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    found = {name: values[name] for name in names if name in values}
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else list(value) if isinstance(value, list) else value
        for name, value in found.items()
    }
