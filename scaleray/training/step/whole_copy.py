"""Whole copy of the model on each worker, for code that runs an unknown number of passes.

Under strategies that shard parameters, every pass of one worker requires the others. The passes of an evaluation by
generation depend on the rows, so each worker gets the whole current weights for the duration of the evaluation."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

from scaleray.common.seeding import same_random_numbers
from scaleray.errors import ConfigError, WorkloadError
from scaleray.records.text.units import memory
from scaleray.strategies.contract.parallel import full
from scaleray.strategies.contract.weight_shares import sizes
from scaleray.training.setup import fine_tuning, float8, precision
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.model_setup import Setup
from scaleray.training.setup.rank_context import RankContext
from scaleray.workload import built_model


class WholeCopy:
    """Whole copy of a model that a strategy has sharded. Built once; holds no weights while it is not in use."""

    def __init__(self, job: TrainJob, setup: Setup, place: RankContext) -> None:
        self.job, self.setup, self.place = job, setup, place
        self._model: nn.Module | None = None

    def check_fits(self, what: str) -> None:
        """Raise WorkloadError or ConfigError if a worker has no memory for the whole model. Collective."""
        settings = self.job.config.fsdp
        if settings.build_gib is not None:
            raise ConfigError(
                "fsdp.build_gib",
                settings.build_gib,
                f"{what} needs the whole model on each worker, which is too large for one worker",
                "measure in metrics(), whose passes all workers run together",
            )
        need, parallel = float(sum(sizes(self.setup.parallel.module).values())), self.setup.parallel
        if parallel.parameter_names:  # of a pipeline's stages, each replica has all
            need = self.place.all_reduce([need])[0] / self.place.data_parallel_size
        lacking = need - _free_bytes(self.place)
        if self.place.all_reduce_max([lacking])[0] > 0:
            raise WorkloadError.problem(
                what,
                f"needs the whole model ({memory(need)}) on each of the {self.place.world_size} workers, which have no "
                "room for it",
                "measure in metrics(), whose passes all workers run together, or use scaleray evaluate on a checkpoint",
            )

    @contextlib.contextmanager
    def filled(self) -> Iterator[nn.Module]:
        """Context with the whole model and its current weights, in evaluation mode. Entering it is collective."""
        if self._model is None:
            self._model = self._built()
        model = self._model
        tensors = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
        try:
            self._fill(model, tensors)
            yield model.eval()
        finally:
            for tensor in tensors.values():  # shapes come back with the next weights
                tensor.data = tensor.data.new_empty(0)

    def _built(self) -> nn.Module:
        device, config = self.place.device, self.job.config
        workload = _twin(self.job.workload)
        with same_random_numbers(device):
            model: nn.Module = built_model(workload, doing="building the model for evaluate()")
        fine_tuning.adapt(model, config.fine_tuning)
        model.to(device)
        precision.prepare(model, device, config.precision)
        float8.convert(model, device, config.precision, workload, self.setup.undo)
        self._shapes = {n: t.shape for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
        return model

    def _fill(self, model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
        share, done = self.setup.parallel.weights(), set()
        for name, placed in share.layout.items():
            target = tensors[name]
            if id(target) in done:  # tied
                continue
            done.add(id(target))
            if name in share.tensors:
                whole = share.tensors[name].to(self.place.device, target.dtype)
            else:
                whole = torch.empty(self._shapes[name], dtype=target.dtype, device=self.place.device)
            if self.place.group is not None:
                dist.broadcast(whole, src=placed.rank)
            target.data = whole
        own = dict(model.named_buffers())
        for name, buffer in self.setup.parallel.module.named_buffers():
            if name in own and name not in tensors:  # those that a state dict leaves out
                own[name].copy_(full(buffer.detach()))


def _twin(workload: Any) -> Any:
    """Workload that builds and stores modules separately, while the original workload keeps the trained model."""
    if not hasattr(workload, "__dict__"):
        return workload
    twin = object.__new__(type(workload))
    twin.__dict__.update(workload.__dict__)
    return twin


def _free_bytes(place: RankContext) -> float:
    """Memory that one worker may still allocate on its device."""
    if place.device.type == "cuda":
        return float(torch.cuda.mem_get_info(place.device)[0])
    return psutil.virtual_memory().available / place.local_world_size
