"""Nodes to check: those of a Ray cluster, or this machine alone."""

import contextlib
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from scaleray.clusters.doctor.measure import Seats, measure_links
from scaleray.clusters.doctor.node import NodeInspector
from scaleray.errors import first_line
from scaleray.launch.workers.gloo import UserCode, gloo_processes
from scaleray.records.doctor_record import AllReduceTime, Links
from scaleray.training.setup.rank_context import RankContext

Measurements = tuple[list[AllReduceTime], Links]
Trip = tuple[float, float, float]
"""Time of the request, the node's clock, and time of the answer; the first and last by the driver's clock."""


@dataclass(frozen=True)
class Answers:
    """Answers of nodes by name, and reasons for missing answers."""

    given: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class Fleet(Protocol):
    """Nodes by name, each with the methods of `NodeInspector`."""

    names: list[str]
    address: str
    """Address of the Ray cluster; empty without one."""
    drivers_node: str
    """The node of this process, if it is one of them."""
    lost: dict[str, str]
    """Unreachable nodes, with reasons."""

    def ask(self, method: str, arguments: Mapping[str, Sequence[Any]], *, timeout_s: float) -> Answers:
        """Call a method on these nodes concurrently. arguments: of the method, by name of the node."""

    def trips(self, name: str, count: int, *, timeout_s: float) -> list[Trip]:
        """Round trips to a node's clock; fewer than requested if it is too slow."""

    def links(self, seats: Seats, *, timeout_s: float) -> Measurements:
        """Result of `measure_links` with ranks on these nodes. Raises a rank's error."""

    def facts_of_ray(self, name: str) -> Mapping[str, Any]:
        """Facts about a node from Ray, as fields of `NodeSeen`."""

    def places(self) -> Mapping[str, str]:
        """Folders that Ray uses on every node, by purpose."""


class ThisMachine:
    """This machine without Ray, as a single node whose ranks are gloo processes."""

    def __init__(self) -> None:
        self.drivers_node, self.address = socket.gethostname(), ""
        self.names, self.lost = [self.drivers_node], dict[str, str]()
        self._node = NodeInspector(self.drivers_node, "127.0.0.1")

    def ask(self, method: str, arguments: Mapping[str, Sequence[Any]], *, timeout_s: float) -> Answers:
        """Call the method in this process."""
        found = Answers()
        for name, given in arguments.items():
            try:
                found.given[name] = getattr(self._node, method)(*given)
            except Exception as exc:  # a failed check is a finding, whatever it raised
                found.failed[name] = first_line(exc)
        return found

    def trips(self, name: str, count: int, *, timeout_s: float) -> list[Trip]:
        """One round trip to the driver's own clock."""
        now = time.time()
        return [(now, now, now)]

    def links(self, seats: Seats, *, timeout_s: float) -> Measurements:
        """Measure with processes on this machine."""
        with gloo_processes(seats.num_ranks, UserCode(None, {}, None, None), timeout_s=timeout_s) as processes:
            found: Measurements = processes.run(seats.num_ranks, _links, seats, workload=None)
        return found

    def facts_of_ray(self, name: str) -> Mapping[str, Any]:
        """Empty: there is no Ray."""
        return {}

    def places(self) -> Mapping[str, str]:
        """Empty: there is no Ray."""
        return {}


def _links(place: RankContext, seats: Seats) -> Measurements:
    return measure_links(place.rank, seats)


@contextlib.contextmanager
def this_machine() -> Iterator[ThisMachine]:
    """Context with this machine as a fleet."""
    yield ThisMachine()
