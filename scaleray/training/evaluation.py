"""Metrics of a split over all workers, from sums and counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from scaleray.data import RankBatch
from scaleray.errors import WorkloadError
from scaleray.training.model_setup import Setup
from scaleray.training.place import Place
from scaleray.training.step import as_user_batch, check_sum_and_count, evaluation_mode, to_device

KEPT_BYTES = 2**26  # a split up to this size per worker is read once and kept, as an execution costs 0.3 s


class Evaluator:
    """Evaluates one split; `open_stream` gives this worker's batches of it, in file order."""

    def __init__(
        self, name: str, workload: Any, setup: Setup, place: Place, open_stream: Callable[[], Iterable[RankBatch]],
        *, gives_tuples: bool, rank_bytes: int, enter: Callable[[str], None] = lambda phase: None,
    ) -> None:  # fmt: skip
        self.name, self.workload, self.setup, self.place = name, workload, setup, place
        self.gives_tuples, self.enter = gives_tuples, enter
        self._open_stream = open_stream
        self._keeps = rank_bytes <= KEPT_BYTES
        self._kept: list[RankBatch] | None = None

    def run(self) -> dict[str, float]:
        """`name/loss` and the workload's metrics, over every row of the split once. Collective."""
        module = self.setup.parallel.module
        model = self.setup.parallel.evaluation_model or module
        totals: dict[str, list[float]] = {}
        with evaluation_mode(module):
            for batch in self._batches():
                self.enter("evaluation")  # with every batch, or a long evaluation would look like a hang
                for name, (total, count) in self._measure(model, batch).items():
                    pair = totals.setdefault(name, [0.0, 0.0])
                    if batch.num_rows:  # else a placeholder row
                        pair[0] += float(total)
                        pair[1] += float(count)
                self.enter("input")
        self.enter("synchronise")
        names = sorted(totals)
        sums = self.place.all_reduce([value for name in names for value in totals[name]])
        result = {}
        for number, name in enumerate(names):
            total, count = sums[2 * number : 2 * number + 2]
            if count <= 0:
                raise WorkloadError(
                    f"the count of {self.name}/{name}", count, "it must be above 0 over the whole split"
                )
            result[f"{self.name}/{name}"] = total / count
        return result

    def _measure(self, module: torch.nn.Module, batch: RankBatch) -> dict[str, Any]:
        columns = to_device(batch.columns, self.place.device, self.setup.precision.input_dtype)
        user_batch = as_user_batch(columns, self.gives_tuples)
        with self.setup.precision.autocast():
            metrics = getattr(self.workload, "metrics", None)
            given = dict(metrics(module, user_batch)) if callable(metrics) else {}
            if "loss" not in given:  # a workload that has it at hand saves this forward pass
                given["loss"] = self.workload.loss(module, user_batch)
            found = {name: check_sum_and_count(pair, what=f"metrics()[{name!r}]") for name, pair in given.items()}
        return found

    def _batches(self) -> Iterable[RankBatch]:
        if self._kept is not None:
            return self._kept
        if not self._keeps:
            return self._open_stream()
        self._kept = list(self._open_stream())
        return self._kept
