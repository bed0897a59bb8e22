"""A workload's own `evaluate`: what it measures with a split's batches beside `metrics`, such as by generating."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from scaleray.errors import WorkloadError
from scaleray.strategies.contract.parallel import Parallel
from scaleray.training.setup.place import Place
from scaleray.training.step.sum_and_count import check_sum_and_count
from scaleray.workload import call_user_code, own_method


def own_sums(workload: Any, parallel: Parallel, place: Place, split: str, batches: Iterable[Any]) -> dict[str, Any]:
    """Sums and counts of this rank by name; nothing for a workload without `evaluate`. batches: of this rank, without
    placeholders. Raises WorkloadError under strategies whose ranks must run equally many passes."""
    evaluate = own_method(workload, "evaluate")
    if evaluate is None:
        return {}
    if parallel.forward_is_collective and place.world_size > 1:
        raise WorkloadError(
            "evaluate()",
            "there",
            "under a strategy that shares out parameters all workers must run equally many passes, which nobody can "
            "promise of it",
            "use --strategy.name ddp or zero1, or measure in metrics()",
        )
    used = iter(batches)

    def measure(model: nn.Module) -> Any:
        return evaluate(model, used, split=split, rank=place.rank, world_size=place.world_size)

    given = call_user_code(lambda: parallel.run_alone(measure), what="evaluate()", doing=f"evaluating {split}")
    found = {}
    for name, pair in dict(given or {}).items():
        if isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], (int, float)):
            pair = torch.tensor(float(pair[0]), dtype=torch.float64), pair[1]  # of a worker without rows, or counted
        found[str(name)] = check_sum_and_count(pair, what=f"evaluate()[{name!r}]")
    return found
