"""Means over an epoch of what training steps have logged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from scaleray.lightning.logs import Logged


class EpochSums:
    """Sums and counts of this worker by name, on the device until they are read."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, kept: Mapping[str, Logged]) -> None:
        """Add what a step has logged; of a value that is not averaged over epochs the last one counts, as in
        Lightning."""
        for name, logged in kept.items():
            if logged.is_metric:
                continue
            value = logged.value.double()
            pair = torch.stack([value * logged.weight, torch.as_tensor(logged.weight).to(value)])
            before = self._sums.get(name) if logged.on_epoch else None
            self._sums[name] = pair if before is None else before + pair

    def values(self) -> dict[str, tuple[float, float]]:
        """(sum, count) by name. Waits for the device."""
        found = {name: pair.tolist() for name, pair in self._sums.items()}
        return {name: (total, count) for name, (total, count) in found.items()}

    def load(self, values: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the `values` of a worker, or of several together."""
        self._sums = {}
        for of_worker in values:
            for name, pair in of_worker.items():
                own = torch.tensor(list(pair), dtype=torch.float64)
                self._sums[name] = own + self._sums[name] if name in self._sums else own

    def means(self, run: Any) -> dict[str, float]:
        """The means over all workers; resets the sums. Collective."""
        found = run.sums(self.values())
        self._sums.clear()
        return {name: total / count for name, (total, count) in found.items() if count}
