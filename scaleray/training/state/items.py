"""Items of a training's state, under names that a user understands, and conversion of their values to JSON."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote

import torch

from scaleray.checkpoints.manifest import Manifest, Tensor
from scaleray.errors import WorkloadError

Tensors = dict[str, torch.Tensor]
Values = dict[str, Any]

MODEL, BUFFERS, OPTIMIZER, SCHEDULE, SCALER, RANDOM, PROGRESS, WORKLOAD, STRATEGY, REPLICA, PRUNING = (
    "model", "buffers", "optimizer", "schedule", "scaler", "random", "progress", "workload", "strategy", "replica",
    "pruning",
)  # fmt: skip
CALLBACKS, AVERAGING, ATTRIBUTES, RATE_SCALE = "callbacks", "averaging", "attributes", "rate_scale"
ITEMS = (
    MODEL, BUFFERS, ATTRIBUTES, OPTIMIZER, SCHEDULE, RATE_SCALE, SCALER, PROGRESS, WORKLOAD, STRATEGY, REPLICA, PRUNING,
    AVERAGING, CALLBACKS, RANDOM,
)  # fmt: skip
"""State items in the order in which they are restored. Random numbers come last, as restoring others may draw some."""
IN_WORDS = {
    "model": "model parameters or buffers",
    "buffers": "buffers that the state dict leaves out",
    "attributes": "attributes of modules that have changed",
    "optimizer": "optimizer state",
    "schedule": "learning-rate schedule",
    "rate_scale": "factor of callbacks on the learning rate",
    "scaler": "loss scaler",
    "progress": "progress of the loop",
    "workload": "the workload's own state",
    "strategy": "the strategy's own state",
    "replica": "a replica's own values",
    "pruning": "masks of pruned weights",
    "averaging": "average of the weights",
    "callbacks": "state of the workload's callbacks",
    "random": "random number generators",
}
"""Name of each state item in a sentence."""


def tensors_of(manifest: Manifest, item: str) -> dict[str, Tensor]:
    """The saved tensors of an item, by full name."""
    return {name: tensor for name, tensor in manifest.tensors.items() if name.startswith(item + ".")}


def dtype_of(tensor: Tensor) -> torch.dtype:
    """Type of the elements of a saved tensor."""
    found: torch.dtype = getattr(torch, tensor.dtype)
    return found


def as_json(item: str, value: Any) -> Any:
    """Copy of small values. Raises WorkloadError for values that a checkpoint cannot hold."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as exc:
        raise WorkloadError.problem(
            f"the state of the {item}",
            f"cannot be saved ({exc}): "
            "a checkpoint holds tensors, numbers, text, true/false, none, lists and mappings of them",
            "store it in such values, or switch checkpoints off: --checkpoint.every-minutes null",
        ) from exc


def flattened(state: Mapping[str, Any], prefix: str = "") -> Values:
    """Flatten a nested state dict to values by path. Each part of a path is quoted, so it can contain any character."""
    flat: Values = {}
    for key, value in state.items():
        path = f"{prefix}{quote(str(key), safe='')}"
        if isinstance(value, Mapping) and value:
            flat.update(flattened(value, f"{path}/"))
        else:
            flat[path] = value
    return flat


def nested(flat: Values) -> Values:
    """Undo `flattened`."""
    tree: Values = {}
    for path, value in flat.items():
        *parents, last = (unquote(part) for part in path.split("/"))
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return tree


def plain(value: Any) -> Any:
    """Convert a small value to JSON: tensors become numbers; tuples, and mappings that JSON would change, are marked as
    such."""
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [plain(item) for item in value]}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "mapping"
        return {kind: [[plain(key), plain(item)] for key, item in value.items()]}
    return value


def unplain(value: Any) -> Any:
    """Undo `plain`, except for tensors."""
    if isinstance(value, list):
        return [unplain(item) for item in value]
    if not isinstance(value, dict) or len(value) != 1:
        return value
    ((kind, items),) = value.items()
    if kind == "tuple":
        return tuple(unplain(item) for item in items)
    if kind in ("mapping", "counter"):
        return (Counter if kind == "counter" else dict)({unplain(key): unplain(item) for key, item in items})
    return value
