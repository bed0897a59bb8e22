"""Properties of a training, besides its numbers, that must equal those of one process: modes and rates of layers, and
digits of values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from scaleray.verification.traces.compare_traces import WIDTHS
from scaleray.verification.traces.run_trace import Layer
from scaleray.verification.traces.signatures import number_format

SETTINGS = ("p", "dropout", "momentum", "eps")
"""Attributes of torch's layers that strategies never change."""


class TakenOut(float):
    """A disabled dropout rate, which is 0 in every computation and has the original in `rate`."""

    def __new__(cls, rate: float) -> TakenOut:
        return super().__new__(cls, 0.0)

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __mul__(self, other: Any) -> TakenOut:
        return TakenOut(self.rate * other)

    def __truediv__(self, other: Any) -> TakenOut:
        return TakenOut(self.rate / other)


def taken_out(value: float) -> float:
    """The number itself or, if it is a disabled rate, the original rate."""
    return value.rate if isinstance(value, TakenOut) else value


def layers_of(module: nn.Module) -> dict[str, Layer]:
    """Modes of modules by name, with settings of torch's own layers. Omits modules with neither settings nor
    parameters, which replace other stages' layers in a pipeline."""
    found = {name: (part, _settings(part)) for name, part in module.named_modules()}
    return {n: (p.training, s) for n, (p, s) in found.items() if s or next(p.parameters(), None) is not None}


def _settings(part: nn.Module) -> tuple[tuple[str, float], ...]:
    bases = (kind for kind in type(part).__mro__ if kind is not nn.Module)  # FSDP makes a class of its own of a layer's
    if not any(kind.__module__.startswith("torch.nn") for kind in bases):
        return ()
    found = ((name, getattr(part, name, None)) for name in SETTINGS)
    return tuple((name, taken_out(value)) for name, value in found if isinstance(value, int | float))


def formats_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Number format with the fewest digits that holds all values of each tensor; "" for float64. Omits tensors with a
    single distinct value, such as a buffer of ones."""
    varied = {n: t.flatten() for n, t in tensors.items() if t.is_floating_point() and t.numel()}
    return {n: number_format(t.double()) for n, t in varied.items() if bool((t != t[0]).any())}


def widest(everyone: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Number format, by name, that holds the values of all ranks."""
    found: dict[str, str] = {}
    for theirs in everyone:
        for name, kind in theirs.items():
            found[name] = max(found.get(name, kind), kind, key=WIDTHS.index)
    return found


def alike(everyone: Iterable[Mapping[str, Layer]]) -> dict[str, Layer | None]:
    """Layers by name; None for a layer on which ranks differ."""
    found: dict[str, Layer | None] = {}
    for theirs in everyone:
        for name, layer in theirs.items():
            found[name] = layer if found.get(name, layer) == layer else None
    return found


@dataclass
class Given:
    """Input of a step's loss on this rank: digests of its distinct rows (uint64; None if a row is unknown), and number
    formats of its columns. evaluates_in_training: whether an evaluation found the model in training mode.
    """

    rows: np.ndarray | None = None
    formats: dict[str, str] = field(default_factory=dict)
    evaluates_in_training: bool = False

    def take(self, batch: Any) -> None:
        """Record the rows of a micro-batch."""
        columns = {str(n): t for n, t in _columns(batch) if isinstance(t, torch.Tensor) and t.ndim}
        if not columns:
            return
        rows = _digests(list(columns.values()))
        self.rows = rows if self.rows is None else np.union1d(self.rows, rows)
        found = formats_of({f"rows' {name}": tensor for name, tensor in columns.items()})
        self.formats = widest((self.formats, found))


def _columns(batch: Any) -> list[tuple[Any, Any]]:
    if isinstance(batch, dict):
        return sorted(batch.items())
    return list(enumerate(batch)) if isinstance(batch, tuple | list) else []


def _digests(columns: list[torch.Tensor]) -> np.ndarray:
    wide = [t.detach().double() if t.is_floating_point() else t.detach() for t in columns]
    count = min(len(t) for t in wide)
    flat = [t[:count].cpu().contiguous().unsqueeze(-1).flatten(1) for t in wide]
    parts = [t.view(torch.uint8).numpy() for t in flat]
    whole = np.concatenate(parts, axis=1)
    digests = b"".join(hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in whole)
    return np.unique(np.frombuffer(digests, dtype=np.uint64))
