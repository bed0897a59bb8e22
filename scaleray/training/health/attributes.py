"""Attributes of modules that are neither parameters nor buffers, and so are missing from every state dict."""

import contextlib
import random
from collections import deque
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import nn

from scaleray.training.health.live_memory import local_part

PLAIN = (bool, int, float, str, type(None))
GENERATORS = (torch.Generator, random.Random, np.random.Generator)
MARKED = (torch.Tensor, np.ndarray, *GENERATORS, Mapping, list, tuple, Set, deque)
MARKS = 64
"""Maximum number of values of a tensor, or items of a container, that are compared."""


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Numbers, strings, modes and switches stored in attributes of modules, by the names of module and attribute; no
    state dict contains them. Names that begin with _, such as torch's own, are left out."""
    return {
        f"{name}/{attribute}": value
        for name, part in module.named_modules()
        for attribute, value in vars(part).items()
        if type(value) in PLAIN and not attribute.startswith("_")
    }


def changed_attributes(module: nn.Module, before: Mapping[str, Any]) -> dict[str, Any]:
    """Plain attributes that differ from an earlier result of `plain_attributes`."""
    unset = object()
    return {name: value for name, value in plain_attributes(module).items() if before.get(name, unset) != value}


def common_attributes(by_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Attributes of the first rank that are equal on all ranks."""
    first, *others = by_rank or [{}]
    return {name: value for name, value in first.items() if all(o.get(name) == value for o in others)}


def set_plain_attributes(module: nn.Module, values: Mapping[str, Any]) -> None:
    """Set the attributes that `plain_attributes` has read, on those of the modules that exist."""
    parts = dict(module.named_modules())
    for path, value in values.items():
        name, _, attribute = path.rpartition("/")
        if name in parts:
            setattr(parts[name], attribute, value)


def marked_attributes(module: nn.Module) -> dict[str, Any]:
    """Fingerprints of tensors, containers and generators in attributes of modules other than buffers, by the names of
    module and attribute. Values with gradients belong to a single pass and are left out, as are metrics and modules
    with their own state."""
    return {
        f"{name}/{attribute}": _mark(value)
        for name, part in module.named_modules()
        if not has_extra_state(part) and not hasattr(part, "_defaults")  # as torchmetrics has it
        for attribute, value in vars(part).items()
        if isinstance(value, MARKED) and not attribute.startswith("_") and getattr(value, "grad_fn", None) is None
    }


def _mark(value: Any, depth: int = 3) -> Any:
    """Short fingerprint of a value, computed from a few of its parts: if it differs, the value has changed."""
    with contextlib.suppress(Exception):  # a user's own class may do anything
        if isinstance(value, torch.Tensor):
            flat = local_part(value).detach().reshape(-1)
            return tuple(value.shape), repr(flat[:: max(1, len(flat) // MARKS)].tolist())
        if isinstance(value, np.ndarray):
            return value.shape, repr(value.reshape(-1)[:: max(1, value.size // MARKS)].tolist())
        if isinstance(value, torch.Generator):
            return hash(value.get_state().numpy().tobytes())
        if isinstance(value, random.Random | np.random.Generator):
            state = value.getstate() if isinstance(value, random.Random) else value.bit_generator.state
            return hash(repr(state))
        if isinstance(value, Mapping | Sequence | Set | deque) and not isinstance(value, str | bytes) and depth:
            items = list(value.items() if isinstance(value, Mapping) else value)
            few = [*items[: MARKS // 2], *items[-MARKS // 2 :]]
            return len(items), sorted(map(repr, few)) if isinstance(value, Set) else [_mark(i, depth - 1) for i in few]
        if isinstance(value, PLAIN):
            return repr(value)
    return type(value).__name__


def has_extra_state(part: nn.Module) -> bool:
    """Whether a module has state other than tensors, from `get_extra_state`."""
    return type(part).get_extra_state is not nn.Module.get_extra_state
