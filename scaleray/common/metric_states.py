"""State of torchmetrics objects over all workers, combined by each metric's own rules (`dist_reduce_fx`).

A list state gets the entries of all workers, rank 0's first, whether its rule is None or concatenation. Lists may
differ in length, which torchmetrics' own exchange, tensor by tensor, does not support. A tensor state without a rule is
stacked, one entry per worker, as torchmetrics' own metrics expect (PearsonCorrCoef).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from scaleray.common.user_code import place_of
from scaleray.errors import WorkloadError

Gather = Callable[[Any], list[Any]]
"""Function that returns the objects of all workers, in the order of ranks. Collective."""
LIBRARY = "torchmetrics"


def is_metric_class(cls: type) -> bool:
    """Whether this is torchmetrics' own base class, without importing the library."""
    return cls.__name__ == "Metric" and cls.__module__.partition(".")[0] == LIBRARY


def check_rules(metric: Any, what: str) -> None:
    """Raise WorkloadError, with the line of the class, for a metric whose state cannot be combined: a tensor without a
    rule in a class that is not torchmetrics' own."""
    without = [
        name
        for name, rule in metric._reductions.items()
        if rule is None and isinstance(metric._defaults[name], torch.Tensor)
    ]
    cls = type(metric)
    is_known = any(c.__module__.partition(".")[0] == LIBRARY and not is_metric_class(c) for c in cls.__mro__)
    if without and not is_known:
        raise WorkloadError(
            what,
            f"{cls.__name__} without a reduction of {', '.join(without)} ({place_of(cls)})",
            "the tensors of all workers must be combined (its dist_reduce_fx is None)",
            f"add_state({without[0]!r}, ..., dist_reduce_fx='sum'), or mean, max, min, cat; a list of tensors, whose "
            "entries are gathered; or log sums and counts",
        )


def share(metric: Any, gather: Gather, has_several: Callable[[], bool]) -> None:
    """Make a metric compute over the rows of all workers. With several workers, its `compute` is then collective."""
    metric.distributed_available_fn = has_several
    metric._sync_dist = partial(_take_together, metric, gather)


def _take_together(metric: Any, gather: Gather, *_: Any, **__: Any) -> None:
    own = {name: _on_cpu(getattr(metric, name)) for name in metric._reductions}
    everyone = gather((metric.update_called, own))
    # a worker without rows has an initial state, whose lists do not even have a dtype
    states = [state for has_rows, state in everyone if has_rows] or [own]
    for name, value in merged(states, metric._reductions).items():
        setattr(metric, name, on_device(value, metric.device))


def merged(states: Sequence[dict[str, Any]], rules: dict[str, Any]) -> dict[str, Any]:
    """Combine the states of several workers, by the rule of each."""
    found = {}
    for name, rule in rules.items():
        parts = [state[name] for state in states]
        if any(isinstance(part, list) for part in parts):
            # a list that was saved, or combined before, is one tensor
            entries = [entry for part in parts for entry in (part if isinstance(part, list) else [part])]
            found[name] = rule(entries) if rule is not None and entries else entries
        else:
            stacked = torch.stack(parts)
            found[name] = stacked if rule is None else rule(stacked)
    return found


def _on_cpu(value: Any) -> Any:
    if isinstance(value, list):
        return [_on_cpu(entry) for entry in value]
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def on_device(value: Any, device: torch.device) -> Any:
    """Move a tensor, or a list of them, to a device."""
    if isinstance(value, list):
        return [on_device(entry, device) for entry in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value
