"""Gossip: every worker trains its own replica and averages it with a few neighbours, whatever the number of workers."""

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from scaleray.config import RunConfig
from scaleray.profiling.collectives import SEND
from scaleray.strategies.apart.graphs import mixing_matrix
from scaleray.strategies.apart.in_flight_exchanges import (
    BESIDE,
    Arrival,
    Outstanding,
    always_apart,
    group_for_exchanges,
    must_be_watched,
)
from scaleray.strategies.apart.replicas import Replicas
from scaleray.strategies.contract.parallel import Parallel, Tensors


def apply(model: nn.Module, mesh: DeviceMesh | None, config: RunConfig, workload: Any) -> Parallel:
    """In every step, step locally and then mix with neighbours on `gossip.graph`. Collective between neighbours only.

    Parameters and floating-point buffers are mixed; the optimizer's state is each worker's own. Synchronous: a worker
    waits for the parameters of its neighbours after the same step (D-PSGD, Lian et al. 2017, arXiv:1705.09056, with the
    update before the mixing). Asynchronous: it sends its parameters and continues, and the neighbours' parameters are
    mixed in when they arrive, at most `max_staleness` steps late (stochastic gradient push with overlap, Assran et al.
    2018, arXiv:1811.10792). Each message carries a part of its sender's weight, so that the mean loses nothing in
    flight. With `deterministic`, messages are mixed in exactly this many steps late, which makes runs repeatable."""
    if mesh is None:
        raise ValueError("gossip needs a device mesh with the axis 'dp'")
    replicas = Replicas(model, mesh.get_group("dp"), bucket_mib=config.strategy.bucket_size_mib)
    mixing = Mixing(replicas, config)
    return always_apart(replicas, mixing, mixing.group, config)


@dataclass(frozen=True)
class _Letter:
    """Messages from neighbours in one step. Each has the sender's values, concatenated, then their weight."""

    received: list[torch.Tensor]


class Mixing:
    """Push-sum: a worker sends parts of its weight with its values, and receives parts from others. Values are weighted
    means, so they never overshoot, however late a message is; and the weights of all workers and messages always add up
    to the number of workers. If nothing is late, every weight is 1 after each step, and the values are those of the
    mixing matrix."""

    def __init__(self, replicas: Replicas, config: RunConfig) -> None:
        self.replicas, self.settings, self.seed = replicas, config.gossip, config.seed
        self.most = config.gossip.max_staleness if config.gossip.is_asynchronous else 0
        self.group = group_for_exchanges(replicas.group, config, most=self.most)
        self.ranks, self.rank = dist.get_process_group_ranks(self.group), dist.get_rank(self.group)
        # on the device, as reading it would wait for the training there
        self.weight = torch.ones((), dtype=torch.float64, device=replicas.trained[0].device)
        self.sent = replicas.sent.entry(BESIDE, replicas.size, SEND)
        early = self.most > 0 and not config.deterministic
        self.is_watched = early and must_be_watched(self.group)
        self.inbox: Outstanding[_Letter] = Outstanding(self._mix, self.sent, most=self.most, in_order_of_time=early)
        self.outbox: deque[tuple[Arrival, list[torch.Tensor]]] = deque()
        replicas.settle = self._settle

    def before_step(self, step: int) -> None:
        """Do nothing, since only parameters are sent."""

    def step(self, step: int) -> None:
        """Send to this step's neighbours, and mix in messages that are due or have arrived."""
        matrix = mixing_matrix(self.settings.graph, len(self.ranks), step, seed=self.seed)
        self._exchange(matrix)
        self.inbox.take_arrived()
        while len(self.outbox) > self.most:
            self.outbox.popleft()[0].wait()

    def _exchange(self, matrix: np.ndarray) -> None:
        others = [rank for rank in range(len(self.ranks)) if rank != self.rank]
        to = [rank for rank in others if matrix[rank, self.rank] > 0]
        of = [rank for rank in others if matrix[self.rank, rank] > 0]
        if not to and not of:
            return
        values = Replicas.flat(self.replicas.moving())
        letters = []
        given = torch.zeros_like(self.weight)
        for rank in to:
            part = (self.weight * float(matrix[rank, self.rank])).to(values.dtype)
            given += part.double()  # as rounded, so that what is given away and what is kept are the whole
            letters.append(torch.cat([values, part.reshape(1)]))
        self.weight = self.weight - given
        received = [torch.empty(values.numel() + 1, dtype=values.dtype, device=values.device) for _ in of]
        sends = [dist.P2POp(dist.isend, t, self.ranks[r], self.group) for r, t in zip(to, letters, strict=True)]
        receives = [dist.P2POp(dist.irecv, t, self.ranks[r], self.group) for r, t in zip(of, received, strict=True)]
        # in one batch, as NCCL would wait for ever if all sent first
        works = dist.batch_isend_irecv([*sends, *receives])
        # gloo gives a work for each operation, NCCL one for all
        own_works, their_works = (works[: len(sends)], works[len(sends) :]) if len(works) > 1 else (works, works)
        for letter in letters:
            self.sent.add(letter)
        self.outbox.append((Arrival(own_works), letters))
        self.inbox.add(_Letter(received), Arrival(their_works, is_watched=self.is_watched))

    def _mix(self, letter: _Letter) -> None:
        """Replace this replica by its weighted mean with the values received."""
        own = Replicas.flat(self.replicas.moving())
        own.mul_(self.weight.to(own.dtype))
        for received in letter.received:
            own.addcmul_(received[:-1], received[-1])
            self.weight = self.weight + received[-1].double()
        own.div_(self.weight.to(own.dtype))
        Replicas.fill(self.replicas.moving(), own)

    def _settle(self) -> float:
        """Temporarily mix in the messages in flight to this worker, and return the weight of its values, 1 on average.
        Collective."""
        before = self.weight
        for letter in self.inbox.wait_all():
            self._mix(letter)
        weight, self.weight = self.weight, before
        return float(weight)

    def synchronise(self) -> None:
        """Do nothing, since replicas continue with their own values."""

    def state(self) -> Tensors:
        """Weight of this worker, and messages in flight to it. Collective."""
        found = {"weight": self.weight.clone()}
        for position, letter in enumerate(self.inbox.wait_all()):
            found.update({f"letter.{position:04d}.{n:02d}": t for n, t in enumerate(letter.received)})
        return found

    def load_state(self, saved: Tensors) -> None:
        """Restore what `state` returned."""
        if not saved:
            return
        device = self.replicas.trained[0].device
        self.weight = saved["weight"].to(device, copy=True)
        by_letter: dict[str, list[torch.Tensor]] = {}
        for name in sorted(saved.keys() - {"weight"}):
            by_letter.setdefault(name.split(".")[1], []).append(saved[name].to(device, copy=True))
        for received in by_letter.values():
            self.inbox.add(_Letter(received), Arrival([]))

    def wait(self) -> None:
        """Wait for messages from this worker and to it."""
        self.inbox.wait_all()
        for arrival, _ in self.outbox:
            arrival.wait()
