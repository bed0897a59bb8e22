"""A workload's own `evaluate`: its measurements with a split's batches other than `metrics`, as by generating."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from scaleray.strategies.contract.parallel import Run
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.model_setup import Setup
from scaleray.training.setup.place import Place
from scaleray.training.step.sum_and_count import check_sum_and_count
from scaleray.training.step.whole_copy import WholeCopy
from scaleray.workload import call_user_code, own_method


class OwnEvaluation:
    """Calls a workload's `evaluate`, if it has one; each worker may run as many passes as it likes.

    Where a pass communicates, workers compute on whole copies of the model, and those of one replica, which have the
    same rows, take its batches in turn. Raises ConfigError or WorkloadError where there is no room for copies.
    """

    def __init__(self, job: TrainJob, setup: Setup, place: Place) -> None:
        self.setup, self.place = setup, place
        self._evaluate = own_method(job.workload, "evaluate")
        self._whole: WholeCopy | None = None
        self._run: Run = setup.parallel.run_alone
        if self._evaluate is not None and setup.parallel.forward_is_collective and place.world_size > 1:
            self._whole = WholeCopy(job, setup, place)
            self._whole.check_fits("evaluate()")

    @contextlib.contextmanager
    def with_weights(self) -> Iterator[None]:
        """Context of an evaluation, whose weights are those of its beginning. Collective."""
        if self._whole is None:
            yield
            return
        with self._whole.filled() as model:
            self._run = lambda computation: computation(model)
            yield

    def sums(self, split: str, batches: Iterable[Any]) -> dict[str, Any]:
        """Sums and counts of this rank by name; nothing for a workload without `evaluate`. batches: of this rank,
        without placeholders."""
        if self._evaluate is None:
            return {}
        evaluate, place = self._evaluate, self.place
        size = place.model_parallel_size
        used = itertools.islice(batches, place.rank % size, None, size)

        def measure(model: nn.Module) -> Any:
            return evaluate(model, used, split=split, rank=place.rank, world_size=place.world_size)

        with self.setup.precision.autocast():
            given = call_user_code(lambda: self._run(measure), what="evaluate()", doing=f"evaluating {split}")
        found = {}
        for name, pair in dict(given or {}).items():
            if isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], (int, float)):
                pair = (torch.tensor(float(pair[0]), dtype=torch.float64), pair[1])  # counted, or without rows
            found[str(name)] = check_sum_and_count(pair, what=f"evaluate()[{name!r}]")
        return found
