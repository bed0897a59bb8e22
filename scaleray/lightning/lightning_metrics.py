"""Combine the states of a module's torchmetrics objects, which accumulate over steps."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from scaleray.common.metric_states import check_rules, is_metric_class, merged, on_device, share
from scaleray.lightning.trainer_object import refused

ADD_UP = ("dim_zero_sum", "dim_zero_cat", "dim_zero_max", "dim_zero_min")
"""Reductions of torchmetrics that combine two workers' states into one from which a worker can continue."""


def metric_objects(module: nn.Module) -> list[Any]:
    """The torchmetrics objects among a module's parts. The library is not imported for this."""
    return [part for part in module.modules() if any(is_metric_class(parent) for parent in type(part).__mro__)]


def connect(module: nn.Module, run: Any) -> None:
    """Reset a module's objects, and let them combine states over the workers of this training; torchmetrics by default
    uses the whole process group, in which other workers may train. Raises WorkloadError if states cannot be
    combined."""
    for name, metric in _named_objects(module):
        if run.world_size > 1:
            check_rules(metric, f"the metric self.{name}")
        metric.reset()
        share(metric, run.gather, partial(_has_several, run))


def _has_several(run: Any) -> bool:
    return bool(run.world_size > 1)


def states_of(module: nn.Module) -> dict[str, Any]:
    """Tensor states of objects that have received rows, by name of the module's part; lists become mappings."""
    found = {}
    for name, metric in _named_objects(module):
        state = {key: getattr(metric, key) for key in metric._reductions}
        if metric.update_called and all(_is_of_tensors(value) for value in state.values()):
            listed = {k: {f"{n}": entry for n, entry in enumerate(v)} for k, v in state.items() if isinstance(v, list)}
            tensors = {key: value for key, value in state.items() if key not in listed}
            found[name] = {"tensors": tensors, "lists": listed, "updates": metric.update_count}
    return found


def restore_states(module: nn.Module, states: Sequence[Mapping[str, Any]]) -> list[str]:
    """Restore objects from the result of `states_of`: states of one worker, or states of several to be added up.
    Returns the names of objects whose states cannot be added up, which are reset.
    """
    restarted = []
    for name, metric in _named_objects(module):
        kept = [state[name] for state in states if name in state]
        parts = [
            {**one["tensors"], **{key: [*entries.values()] for key, entries in one["lists"].items()}} for one in kept
        ]
        if len(parts) > 1 and not _add_up(metric):
            restarted.append(name)
        elif parts:
            value = parts[0] if len(parts) == 1 else merged(parts, metric._reductions)
            for key, part in value.items():
                is_list = isinstance(metric._defaults[key], list) and not isinstance(part, list)
                setattr(metric, key, on_device([part] if is_list else part, metric.device))
            metric._update_count, metric._computed = sum(one["updates"] for one in kept), None
    return restarted


def _named_objects(module: nn.Module) -> list[tuple[str, Any]]:
    objects = {id(metric) for metric in metric_objects(module)}
    return [(name, part) for name, part in module.named_modules() if id(part) in objects]


def _is_of_tensors(value: Any) -> bool:
    return all(isinstance(entry, torch.Tensor) for entry in (value if isinstance(value, list) else [value]))


def _add_up(metric: Any) -> bool:
    """Whether two states of a metric combine exactly, unlike a mean of means or class-specific state."""
    return all(
        getattr(rule, "__name__", "") in ADD_UP or (rule is None and isinstance(metric._defaults[key], list))
        for key, rule in metric._reductions.items()
    )


def computed(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Compute the objects' values over all workers, by name, and reset the objects. Collective."""
    values = {name: metrics[name].compute() for name in sorted(metrics)}
    for metric in metrics.values():
        metric.reset()
    for name, value in values.items():
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            shown = f"of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise refused(f"the value of the metric {name!r}, {shown},", "a logged value must be a single number")
    return {name: float(value) for name, value in values.items()}


@contextlib.contextmanager
def left_alone(module: nn.Module) -> Iterator[None]:
    """Context that restores the objects' states at its end."""
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
