"""Checks of one node, in a process there: an actor on each node of a Ray cluster, or this process."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from scaleray.errors import TrackingError
from scaleray.launch.doctor import storage
from scaleray.launch.doctor.facts import facts_of_this_node
from scaleray.launch.doctor.measure import Seats, matmul_rate, measure_links
from scaleray.launch.doctor.reach import Listener, unreachable
from scaleray.records.preflight import AllReduceTime, DeviceRate, Links, NodeSeen
from scaleray.tracking.store import check_reachable
from scaleray.training.setup.stores import OwnedStore, StorePlace, open_store


@dataclass(frozen=True)
class Asked:
    """Subjects of the check on every node. places: folders by their content for a training. tracking_uri: of a server
    that every node is to reach; None: no server is checked.
    """

    places: Mapping[str, str]
    tracking_uri: str | None = None


class NodeLook:
    """The questions to one node; `name` is what it is called, `host` the address by which others know it."""

    def __init__(self, name: str, host: str) -> None:
        self.name, self.host = name, host
        self._listener: Listener | None = None
        self._store: OwnedStore | None = None

    def clock(self) -> float:
        """This node's clock."""
        return time.time()

    def facts(self, asked: Asked) -> NodeSeen:
        """Facts of the node."""
        import dataclasses

        return dataclasses.replace(
            facts_of_this_node(self.name, asked.places), mlflow_error=_mlflow_error(asked.tracking_uri)
        )

    def listen(self) -> tuple[str, int]:
        """Open a port for others to reach; it stays open until `stop_listening`."""
        self._listener = Listener(self.host)
        return self._listener.place

    def stop_listening(self) -> None:
        """Close the port."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def unreachable(self, places: Mapping[str, tuple[str, int]]) -> list[str]:
        """Names of those other nodes whose ports cannot be reached from here."""
        return unreachable({name: place for name, place in places.items() if name != self.name})

    def write(self, folder: str, file: str) -> storage.Written:
        """Write a file into the storage."""
        return storage.write_file(folder, file)

    def read(self, folder: str, contents: Mapping[str, storage.Content]) -> storage.Found:
        """Look for files in the storage."""
        return storage.read_files(folder, contents)

    def remove(self, folder: str) -> None:
        """Remove a folder of the storage."""
        storage.remove_folder(folder)

    def matmuls(self, num_gpus: int) -> list[DeviceRate]:
        """Rates of matrix products of every GPU one after the other, or of a core where there is none."""
        return [matmul_rate(self.name, index) for index in (range(num_gpus) if num_gpus else [None])]

    def open_store(self) -> StorePlace:
        """A port at which ranks meet, kept until they have."""
        self._store = OwnedStore(self.host)
        return self._store.place

    def links(self, rank: int, seats: Seats, place: StorePlace, timeout_s: float) -> tuple[list[AllReduceTime], Links]:
        """Take part in measuring links, as a rank of a process group that ends with this call."""
        import os

        import torch.distributed as dist

        from scaleray.launch.workers.process_group import interface_of

        if (interface := interface_of(self.host)) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        limit = timedelta(seconds=timeout_s)
        store = open_store(place, timeout=limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=seats.num_ranks, timeout=limit)
        try:
            return measure_links(rank, seats)
        finally:
            dist.destroy_process_group()


def _mlflow_error(uri: str | None) -> str | None:
    if uri is None:
        return None
    try:
        check_reachable(uri)
    except TrackingError as exc:
        return exc.allowed
    return ""
