"""Asynchronous SGD with bounded staleness: workers wait for each other's updates only if these become too old."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from scaleray.config import RunConfig
from scaleray.profiling.collectives import ALL_REDUCE
from scaleray.strategies.apart.in_flight_exchanges import (
    BESIDE,
    Arrival,
    Outstanding,
    always_apart,
    group_for_exchanges,
)
from scaleray.strategies.apart.replicas import Replicas
from scaleray.strategies.contract.parallel import Parallel, Tensors


def apply(model: nn.Module, mesh: DeviceMesh | None, config: RunConfig, workload: Any) -> Parallel:
    """Add 1/n of every worker's update on all n workers; on the others it arrives at most `gossip.max_staleness` steps
    late. Collective.

    In step t a worker has applied its own updates, all updates of all workers up to step t - 1 - max_staleness, and
    newer ones that have arrived (stale synchronous parallel, Ho et al. 2013, NeurIPS 26). There is no server: the sums
    of a step's updates are all-reduced during the training, in a separate group, and added once they are complete. No
    worker can therefore receive a step's updates before the slowest one has made its own, and a constantly slower
    worker eventually limits the others, as in every scheme with a bound. With max_staleness 0, plain SGD and equal
    counts on all ranks, it is equal to DDP. With `deterministic`, updates are applied exactly this many steps late,
    which makes runs repeatable. Each worker has its own optimizer state. A synchronisation waits for all updates and
    makes replicas equal."""
    if mesh is None:
        raise ValueError("async_sgd needs a device mesh with the axis 'dp'")
    replicas = Replicas(model, mesh.get_group("dp"), bucket_mib=config.strategy.bucket_size_mib)
    updates = Updates(replicas, config)
    return always_apart(replicas, updates, updates.group, config)


@dataclass(frozen=True)
class _Update:
    """This worker's part of a step's update, already applied, and the sum over all workers once it has arrived."""

    own: torch.Tensor
    total: torch.Tensor


class Updates:
    """Parameter updates of each step, in flight to all workers."""

    def __init__(self, replicas: Replicas, config: RunConfig) -> None:
        self.replicas, most = replicas, config.gossip.max_staleness
        self.group = group_for_exchanges(replicas.group, config, most=most)
        self.sent = replicas.sent.entry(BESIDE, replicas.size, ALL_REDUCE)
        self.outstanding: Outstanding[_Update] = Outstanding(
            self._take, self.sent, most=most, in_order_of_time=most > 0 and not config.deterministic
        )
        replicas.settle = self._settle
        self._before: torch.Tensor | None = None

    def before_step(self, step: int) -> None:
        """Save the parameters before the optimizer's step."""
        self._before = Replicas.flat(self.replicas.trained)

    def step(self, step: int) -> None:
        """Scale the optimizer's update to this worker's part, send it, and apply sums that are due or have arrived."""
        assert self._before is not None
        own = Replicas.flat(self.replicas.trained).sub_(self._before).div_(self.replicas.size)
        Replicas.fill(self.replicas.trained, self._before + own)
        self._before = None
        total = own.clone()
        work = dist.all_reduce(total, group=self.group, async_op=True)
        self.sent.add(total)
        self.outstanding.add(_Update(own, total), Arrival([work]))
        self.outstanding.take_arrived()

    def synchronise(self) -> None:
        """Apply every update and make the replicas equal, since each has added sums in a different order, with
        different rounding."""
        self.outstanding.take_all()
        self.replicas.average(measures=False)

    def state(self) -> Tensors:
        """Wait for updates in flight and return them. Collective."""
        found: Tensors = {}
        for position, update in enumerate(self.outstanding.wait_all()):
            found |= {f"update.{position:04d}.own": update.own, f"update.{position:04d}.total": update.total}
        return found

    def load_state(self, saved: Tensors) -> None:
        """Restore updates from `state`."""
        device = self.replicas.trained[0].device
        for name in sorted(name for name in saved if name.endswith(".own")):
            own, total = (saved[n].to(device, copy=True) for n in (name, f"{name.removesuffix('.own')}.total"))
            self.outstanding.add(_Update(own, total), Arrival([]))

    def wait(self) -> None:
        """Wait for the sums in flight."""
        self.outstanding.wait_all()

    def _take(self, update: _Update) -> None:
        Replicas.fill(self.replicas.trained, Replicas.flat(self.replicas.trained).add_(update.total).sub_(update.own))

    def _settle(self) -> float:
        for update in self.outstanding.wait_all():
            self._take(update)
        return 1.0
