"""A look at the first batch: whether its rows and the loss are what training needs, said before training hides it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from scaleray.data import RankBatch
from scaleray.errors import DataError, WorkloadError
from scaleray.reproducibility.seeding import same_random_numbers
from scaleray.training.evaluation import evaluation_mode
from scaleray.training.failures import explained
from scaleray.training.micro_batches import as_user_batch, to_device
from scaleray.training.model_setup import Setup
from scaleray.training.place import Place
from scaleray.training.sum_and_count import check_sum_and_count
from scaleray.workload import call_user_code


def check_first_batch(
    workload: Any, module: nn.Module, batch: RankBatch, setup: Setup, place: Place, *, gives_tuples: bool
) -> None:
    """Run a few rows of the first batch and say what is wrong with the data or the loss, before training hides it.

    Changes neither parameters nor buffers nor random numbers. Raises DataError or WorkloadError.
    """
    bad = next((n for n, v in batch.columns.items() if v.dtype.kind == "f" and not np.isfinite(v).all()), None)
    if bad is not None:
        bad_rows = np.flatnonzero(~np.isfinite(batch.columns[bad].reshape(len(batch.columns[bad]), -1)).all(axis=1))
        raise DataError(
            f"column {bad} of the first batch",
            f"NaN or infinite in {len(bad_rows)} of {len(batch.columns[bad])} rows",
            "inputs must be finite",
            "clean the data, or fill the gaps before training",
        )
    rows = min(8, len(next(iter(batch.columns.values()))))
    model = setup.parallel.evaluation_model or module
    if setup.parallel.forward_is_collective and place.world_size > 1:  # all ranks must run equally many passes
        least = torch.tensor(rows, device=place.device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        rows = int(least)

    def loss_of(start: int, stop: int) -> tuple[float, float]:
        columns = to_device(
            {n: v[start:stop] for n, v in batch.columns.items()}, place.device, setup.precision.input_dtype
        )
        with setup.precision.autocast():
            result = workload.loss(model, as_user_batch(columns, gives_tuples))
        total, count = check_sum_and_count(result, what="loss()")
        return float(total), float(count)

    with evaluation_mode(module), same_random_numbers(place.device):
        whole, count = call_user_code(
            lambda: _with_explanation(lambda: loss_of(0, rows)), what="loss()", doing="computing the first loss"
        )
        halves = [loss_of(0, rows // 2), loss_of(rows // 2, rows)] if rows >= 2 else []
    if not math.isfinite(whole):
        raise DataError(
            "the loss of the first batch",
            whole,
            "it must be finite",
            "the inputs are finite: look at the initial parameters, a log of zero or a division in the loss",
        )
    if count > 1 and len(halves) == 2 and min(n for _, n in halves) > 0:
        (first, first_count), (second, second_count) = halves
        added = first + second
        averaged = (first * first_count + second * second_count) / (first_count + second_count)
        # a mean equals the weighted mean of its halves; a sum does not, unless the loss is zero
        if math.isclose(whole, averaged, rel_tol=1e-4) and not math.isclose(whole, added, rel_tol=1e-2):
            raise WorkloadError(
                "loss()",
                f"a mean ({whole:.6g} for {rows} rows, {first:.6g} and {second:.6g} for its halves)",
                "it must return the sum over the micro-batch",
                "use reduction='sum'; scaleray divides by the count of all workers",
            )


def _with_explanation(call: Any) -> Any:
    try:
        return call()
    except Exception as exc:
        found = explained(exc)
        if found is None:
            raise
        raise found from exc
