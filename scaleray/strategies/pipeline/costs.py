"""Time of each block of a model, measured once in order to cut the model into equally long stages."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from scaleray.common.seeding import same_random_numbers
from scaleray.config import RunConfig
from scaleray.errors import WorkloadError
from scaleray.strategies.pipeline.stages import Unit
from scaleray.workload import own_method

REPEATS = 5
LARGEST_BATCH = 32


def measured_costs(
    model: nn.Module, units: Sequence[Unit], num_blocks: int, *, config: RunConfig, workload: Any
) -> list[float]:
    """Seconds of the forward pass of each block with its surrounding modules: the minimum of a few passes on training
    rows. The backward pass is assumed to be proportional. Changes neither random numbers nor the model. Raises
    WorkloadError if the training data cannot be read by row."""
    reference = next(model.parameters())
    with same_random_numbers(reference.device):  # the data may draw some
        batch = _example(workload, config, reference)
    spent: dict[str, float] = {}
    begun: dict[str, float] = {}

    def now() -> float:
        if reference.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    handles = []
    for unit in units:

        def begin(module: nn.Module, args: Any, path: str = unit.path) -> None:
            begun[path] = now()

        def end(module: nn.Module, args: Any, output: Any, path: str = unit.path) -> None:
            spent[path] = spent.get(path, 0.0) + now() - begun[path]

        handles += [unit.module.register_forward_pre_hook(begin), unit.module.register_forward_hook(end)]
    best = [float("inf")] * num_blocks
    modes = [(part, part.training) for part in model.modules()]
    devices = [reference.device] if reference.is_cuda else []
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices):
            for _ in range(REPEATS):
                spent.clear()
                workload.loss(model, batch)
                times = [0.0] * num_blocks
                for unit in units:
                    times[unit.block] += spent.get(unit.path, 0.0)
                best = [min(a, b) for a, b in zip(best, times, strict=True)]
    finally:
        for handle in handles:
            handle.remove()
        for part, was_training in modes:
            part.training = was_training
    return best


def _example(workload: Any, config: RunConfig, reference: torch.Tensor) -> dict[str, torch.Tensor]:
    """A few rows of the training data in the form that the loss takes."""
    if changes := [n for n in ("preprocessor", "transform", "collate") if own_method(workload, n) is not None]:
        raise WorkloadError(
            "the train data",
            f"changed by {changes[0]}()",
            "pipeline.split measured takes rows as they are stored",
            "use pipeline.split counted",
        )
    data = workload.datasets()["train"]
    rows = np.arange(min(config.batch.micro_size or LARGEST_BATCH, LARGEST_BATCH))
    if isinstance(data, Mapping):
        columns = {name: np.asarray(values)[: len(rows)] for name, values in data.items()}
    elif callable(getattr(data, "read", None)):
        columns = data.read(rows[: data.num_rows])
    else:
        raise WorkloadError(
            "the train data",
            type(data).__name__,
            "pipeline.split measured needs arrays, or a source that reads rows by index",
            "use pipeline.split counted",
        )
    tensors = {
        name: torch.from_numpy(np.ascontiguousarray(values)).to(reference.device) for name, values in columns.items()
    }
    return {n: t.to(reference.dtype) if t.is_floating_point() else t for n, t in tensors.items()}
