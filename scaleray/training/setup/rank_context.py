"""Context of a worker: its rank, node, device and process groups."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from scaleray.config.parallel import Degrees


@dataclass(frozen=True)
class RankContext:
    """Context of one of the workers. Without a process group it is the only worker."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: str = "local"
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - torch.device is immutable
    degrees: Degrees | None = None
    """Numbers of workers along each axis; None if each worker computes its own samples."""

    @property
    def mesh(self) -> Degrees:
        """Numbers of workers along each axis."""
        return self.degrees or Degrees(replicate=self.world_size)

    @property
    def data_rank(self) -> int:
        """Number of the share of the global batch on which this worker trains; all workers of a replica share it."""
        return self.mesh.data_rank(self.rank)

    @property
    def data_parallel_size(self) -> int:
        """Number of shares into which the global batch is divided."""
        return self.mesh.data

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of all workers, or None if there is only one."""
        return dist.group.WORLD if self.world_size > 1 else None

    def all_reduce(self, values: list[float]) -> list[float]:
        """Sum a few numbers over all workers, in float64. Collective."""
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return [float(v) for v in tensor.tolist()]

    def all_reduce_max(self, values: list[float]) -> list[float]:
        """Maximum of each of a few numbers over all workers. Collective."""
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [float(v) for v in tensor.tolist()]

    def gathered(self, value: Any) -> list[Any]:
        """Values of all workers, such as short texts, in the order of their ranks. Collective."""
        if self.world_size == 1:
            return [value]
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, value)
        return everyone
