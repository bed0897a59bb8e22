"""Inspection of the nodes in parts, each with its own time limit."""

import contextlib
import dataclasses
import secrets
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scaleray.clusters.doctor.fleet import Fleet
from scaleray.clusters.doctor.measure import Seats
from scaleray.clusters.doctor.node import Asked
from scaleray.clusters.preflight.check_texts import FAILED
from scaleray.clusters.preflight.clock_checks import offset
from scaleray.clusters.preflight.machine_checks import is_idle
from scaleray.common.progress import stage
from scaleray.config.base import without_password
from scaleray.errors import ScaleRayError, TrackingError, first_line
from scaleray.recording.store import check_reachable, sqlite_path
from scaleray.records.doctor_record import Measured, NodeSeen, StorageSeen

FACTS_S, PORTS_S, STORAGE_S, RATES_S, LINKS_S, TRIPS_S = 12.0, 8.0, 12.0, 8.0, 25.0, 1.0
"""Time limit of a part in seconds; if nodes answer, all parts together take less than half a minute."""
TRIPS = 10
WORDS = {
    "clocks": "clocks",
    "ports": "ports between nodes",
    "storage": "the storage of runs",
    "rates": "matrix products",
    "links": "all-reduces and links",
}
"""Description of each part while it runs."""


@dataclass(frozen=True)
class Subject:
    """What to check besides the nodes themselves: the storage (absolute folder or URI), MLflow, and the specified
    network.
    """

    storage_path: str
    tracking_uri: str
    network: str = ""


class Inspection:
    """Inspection of a fleet, which collects the findings of each part in `seen`."""

    def __init__(self, fleet: Fleet, subject: Subject) -> None:
        self.fleet, self.subject = fleet, subject
        self.seen: dict[str, Any] = {}
        self.not_measured: dict[str, str] = {}

    def everything(self) -> Measured:
        """Run all parts one after another, so that they do not disturb each other's measurements."""
        nodes = self._facts()
        alive = [node.name for node in nodes if not node.error]
        if alive:
            self._part("clocks", lambda: self._clocks(alive))
            self._part("ports", lambda: self._ports(alive))
            self._part("storage", lambda: self._storage(alive))
            self._part("rates", lambda: self._rates(nodes))
            self._part("links", lambda: self._links(nodes))
        else:
            self.not_measured |= dict.fromkeys(("clocks", "ports", "storage", "rates", "links"), "no node answers")
        return Measured(
            nodes=nodes,
            has_ray=bool(self.fleet.address),
            storage_path=without_password(self.subject.storage_path),
            tracking_uri=without_password(self.subject.tracking_uri),
            tracking_error=_tracking_error(self.subject.tracking_uri),
            network=self.subject.network,
            not_measured=self.not_measured,
            **self.seen,
        )

    def _part(self, name: str, look: Callable[[], None]) -> None:
        """Run one part; if it fails, record the reason under "not measured"."""
        try:
            with stage(f"checking {WORDS[name]}"):
                look()
        except (ScaleRayError, RuntimeError, OSError) as exc:
            self.not_measured[name] = f"{FAILED}{first_line(exc)}"

    def _facts(self) -> list[NodeSeen]:
        uri = self.subject.tracking_uri if self.subject.tracking_uri.startswith("http") else None
        places = {"runs": self.subject.storage_path, "temporary files": tempfile.gettempdir(), **self.fleet.places()}
        with stage("checking versions, GPUs and limits"):
            answers = self.fleet.ask(
                "facts", {name: (Asked(places, uri),) for name in self.fleet.names}, timeout_s=FACTS_S
            )
        failed = {**answers.failed, **self.fleet.lost}
        return [
            NodeSeen(name=name, error=failed[name])
            if name in failed
            else dataclasses.replace(
                answers.given[name], is_drivers=name == self.fleet.drivers_node, **self.fleet.facts_of_ray(name)
            )
            for name in self.fleet.names
        ]

    def _clocks(self, alive: list[str]) -> None:
        trips = {name: self.fleet.trips(name, TRIPS, timeout_s=TRIPS_S) for name in alive}
        self.seen["clocks"] = [offset(name, found) for name, found in trips.items() if found]

    def _ports(self, alive: list[str]) -> None:
        if len(alive) < 2:
            self.not_measured["ports"] = "one node"
            return
        places = self.fleet.ask("listen", dict.fromkeys(alive, ()), timeout_s=PORTS_S).given
        try:
            found = self.fleet.ask("unreachable", dict.fromkeys(places, (places,)), timeout_s=PORTS_S).given
        finally:
            self.fleet.ask("stop_listening", dict.fromkeys(alive, ()), timeout_s=PORTS_S)
        self.seen["closed"] = [(name, other) for name, others in found.items() for other in others]

    def _storage(self, alive: list[str]) -> None:
        folder = f"{self.subject.storage_path.rstrip('/')}/.scaleray-doctor-{secrets.token_hex(4)}"
        files = {name: f"node-{number}" for number, name in enumerate(alive)}
        try:
            written = self.fleet.ask("write", {n: (folder, file) for n, file in files.items()}, timeout_s=STORAGE_S)
            good = {name: answer for name, answer in written.given.items() if not answer.error}
            # each node reads the files of the next ones, so that no file is read by all at once
            order = list(good)
            others = {
                name: {files[o]: good[o].content for o in [*order[i + 1 :], *order[:i]]} for i, name in enumerate(order)
            }
            own = {name: {files[name]: good[name].content} for name in order}
            contents = others if len(order) > 1 else own
            seen = self.fleet.ask("read", {n: (folder, contents[n]) for n in order}, timeout_s=STORAGE_S)
        finally:
            self.fleet.ask("remove", dict.fromkeys(alive, (folder,)), timeout_s=STORAGE_S)
        of = {file: name for name, file in files.items()}
        self.seen["storage"] = [
            StorageSeen(
                node=name,
                error=written.failed.get(name) or written.given[name].error or seen.failed.get(name, ""),
                write_bytes_per_s=getattr(written.given.get(name), "bytes_per_s", None),
                read_bytes_per_s=getattr(seen.given.get(name), "bytes_per_s", None),
                does_not_see=[of[file] for file in getattr(seen.given.get(name), "missing", ())],
            )
            for name in alive
        ]

    def _rates(self, nodes: list[NodeSeen]) -> None:
        alive = [node for node in nodes if not node.error]
        if why := _why_gpus_are_left_alone(alive):
            self.not_measured["rates"] = why
            return
        found = self.fleet.ask("matmuls", {node.name: (node.torch_gpus,) for node in alive}, timeout_s=RATES_S)
        with_gpus = any(node.torch_gpus for node in alive)  # if there are GPUs, nodes without them do not train
        self.seen["rates"] = [
            rate for node in alive for rate in found.given.get(node.name, []) if node.torch_gpus or not with_gpus
        ]
        if found.failed:
            self.not_measured["rates"] = FAILED + "; ".join(f"{name}: {why}" for name, why in found.failed.items())

    def _links(self, nodes: list[NodeSeen]) -> None:
        alive = [node for node in nodes if not node.error]
        if why := _why_gpus_are_left_alone(alive):
            self.not_measured["links"] = why
        elif self.seen.get("closed"):
            self.not_measured["links"] = "nodes cannot reach each other's ports"
        elif (seats := seats_of(alive)).num_ranks < 2:
            self.not_measured["links"] = "one device"
        else:
            self.seen["all_reduces"], self.seen["links"] = self.fleet.links(seats, timeout_s=LINKS_S)


def seats_of(nodes: list[NodeSeen]) -> Seats:
    """Place one rank per GPU, with the same number on each node with GPUs; without GPUs, one per node, or two on a
    single node."""
    with_gpus = [node for node in nodes if node.torch_gpus]
    if with_gpus:
        return Seats(tuple(n.name for n in with_gpus), min(n.torch_gpus for n in with_gpus), "cuda")
    return Seats(tuple(node.name for node in nodes), 1 if len(nodes) > 1 else 2)


def _why_gpus_are_left_alone(nodes: list[NodeSeen]) -> str:
    """Reason not to measure GPUs: on GPUs in use, measuring would disturb users and be inconclusive."""
    busy = sum(not is_idle(gpu) for node in nodes for gpu in node.gpus)
    return f"{busy} GPU{'s are' if busy != 1 else ' is'} in use" if busy else ""


def _tracking_error(uri: str) -> str:
    """Reason why MLflow cannot be used from here, found without creating a missing database."""
    is_new_file = uri.startswith("sqlite:///") and not sqlite_path(uri).exists()
    try:
        check_reachable(uri)
    except TrackingError as exc:
        return first_line(exc)
    finally:
        if is_new_file:
            with contextlib.suppress(OSError):
                sqlite_path(uri).unlink()
    return ""
