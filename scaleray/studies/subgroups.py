"""Process groups of the first 1, 2, 4 ... workers of an existing group, one after another, node by node.

Strategies communicate through torch's default group, so it is recreated for each of them: a new gloo group costs
milliseconds; a new NCCL group creates communicators with the first collective, during a warm-up. The other workers wait
in a store until these leave."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from scaleray.errors import PeerLostError
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.setup.stores import OwnedStore, open_store

LOOPBACK = "127.0.0.1"
LONGEST_TURN = timedelta(days=7)  # wait for the others; a lost one closes the store's connections or is ended, too


class SubGroups:
    """Sub-groups of the process group of `place`, which is replaced and ended. Collective: every worker creates one.

    timeout_s: timeout of a collective in any of the groups. host: address at which the others reach this worker's
    machine. Close it at the end, after which there is no default group."""

    def __init__(self, place: RankContext, *, timeout_s: float, host: str = LOOPBACK) -> None:
        self.place, self.timeout_s = place, timeout_s
        self._number = 0
        self._order = [0]
        self._nodes = [place.node]
        self._store: Any = None
        self._owned: OwnedStore | None = None
        if place.world_size > 1:
            self._nodes = nodes = place.gathered(place.node)
            # ranks of a node are next to each other, in the order of each node's first rank
            self._order = sorted(range(len(nodes)), key=lambda rank: (nodes.index(nodes[rank]), rank))
            self._store = self._make_store(host)
            leave_group()

    def _make_store(self, host: str) -> Any:
        if self.place.rank == 0:
            self._owned = OwnedStore(host)
        everyone = self.place.gathered(self._owned.place if self._owned else None)
        return open_store(everyone[0])

    @property
    def is_first(self) -> bool:
        """Whether this worker is in every group, with rank 0."""
        return self.place.rank == self._order[0]

    @contextlib.contextmanager
    def of(self, size: int) -> Iterator[RankContext | None]:
        """Context of the first `size` workers, which get their place in a separate group; others get None and wait at
        the end. Collective over all workers. Raises PeerLostError if it failed on another worker."""
        self._number += 1
        name = f"group {self._number}"
        position = self._order.index(self.place.rank)
        is_in = position < size
        try:
            if is_in and size > 1:
                dist.init_process_group(
                    # gloo beside NCCL: collectives on CPU tensors need a backend of their own
                    "cpu:gloo,cuda:nccl" if self.place.device.type == "cuda" else "gloo",
                    store=dist.PrefixStore(name, self._store),
                    rank=position,
                    world_size=size,
                    timeout=timedelta(seconds=self.timeout_s),
                )
            yield self._place(position, size) if is_in else None
        except BaseException:
            if self._store is not None:
                self._store.set(f"{name} is over", "failed")
            raise
        leave_group()
        self._meet(name)

    def _place(self, position: int, size: int) -> RankContext:
        nodes = [self._nodes[rank] for rank in self._order[:size]]
        node = nodes[position]
        return dataclasses.replace(
            self.place,
            rank=position,
            world_size=size,
            local_rank=nodes[:position].count(node),
            local_world_size=nodes.count(node),
        )

    def _meet(self, name: str) -> None:
        if self._store is None:
            return
        if self._store.add(f"{name} has left", 1) == self.place.world_size:
            self._store.set(f"{name} is over", "done")
        self._store.wait([f"{name} is over"], LONGEST_TURN)
        if self._store.get(f"{name} is over") != b"done":
            raise PeerLostError("another worker failed in this measurement")

    def share(self, value: str) -> str:
        """Send the first worker's text to every worker. Collective."""
        if self._store is None:
            return value
        self._number += 1
        if self.is_first:
            self._store.set(f"value {self._number}", value)
        self._store.wait([f"value {self._number}"], LONGEST_TURN)
        return str(self._store.get(f"value {self._number}").decode())

    def close(self) -> None:
        """Leave the group together. Collective: the store's server must outlive its last client."""
        if self._store is not None:
            if self._store.add("closed", 1) == self.place.world_size:
                self._store.set("all closed", "1")
            if self.place.rank == 0:
                self._store.wait(["all closed"], timedelta(seconds=self.timeout_s))
            self._store = None
            if self._owned is not None:
                self._owned.close()


def leave_group() -> None:
    """End this process's default group, if it has one."""
    if not dist.is_initialized():
        return
    # torch's cache holds meshes, which compare equal to those of the next group and would lead to groups that are gone
    _clear_sharding_prop_cache()
    gc.collect()  # a wrapper of the last training may still hold the group
    dist.destroy_process_group()
