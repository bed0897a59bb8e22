"""Nodes of a Ray cluster, each with an actor that reserves neither CPUs nor GPUs, so that a full cluster can be checked
too."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scaleray.clusters.doctor.fleet import Answers, Measurements, Trip
from scaleray.clusters.doctor.measure import Seats
from scaleray.clusters.doctor.node import NodeInspector
from scaleray.common.progress import stage
from scaleray.errors import ClusterError, RunFailedError, first_line
from scaleray.launch.cluster.connection import joined

START_S = 25.0
"""Seconds within which a node's first process must have started and imported torch."""


class RayNodes:
    """Live nodes of the connected cluster. address: as given by the user."""

    def __init__(self, address: str) -> None:
        import ray

        self.address = address
        here = ray.get_runtime_context().get_node_id()
        alive = sorted((n for n in ray.nodes() if n["Alive"]), key=lambda n: (n["NodeID"] != here, n["NodeID"]))
        counts = Counter(node["NodeManagerAddress"] for node in alive)
        self._nodes: dict[str, Mapping[str, Any]] = {}
        for node in alive:
            at = node["NodeManagerAddress"]
            self._nodes[at if counts[at] == 1 else f"{at} ({node['NodeID'][:6]})"] = node
        self.names = list(self._nodes)
        self.drivers_node = self.names[0] if alive and alive[0]["NodeID"] == here else ""
        self._actors = {name: self._actor(name) for name in self.names}
        self.lost: dict[str, str] = {}
        with stage("waiting for a process on each node", total=len(self.names), unit="nodes"):
            self.lost.update(self.ask("clock", dict.fromkeys(self.names, ()), timeout_s=START_S).failed)

    def ask(self, method: str, arguments: Mapping[str, Sequence[Any]], *, timeout_s: float) -> Answers:
        """Call a method on these nodes concurrently; lost nodes are omitted."""
        asked = {
            name: getattr(self._actors[name], method).remote(*given)
            for name, given in arguments.items()
            if name not in self.lost
        }
        return _answers(asked, timeout_s)

    def trips(self, name: str, count: int, *, timeout_s: float) -> list[Trip]:
        """Round trips to a node's clock."""
        import ray

        found: list[Trip] = []
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(ray.exceptions.RayError):
            while len(found) < count and time.monotonic() < deadline:
                asked = time.time()
                there = ray.get(self._actors[name].clock.remote(), timeout=timeout_s)
                found.append((asked, there, time.time()))
        return found

    def links(self, seats: Seats, *, timeout_s: float) -> Measurements:
        """Measure with ranks on these nodes: the first rank of each node is its actor, the others are started for this
        purpose.
        """
        import ray

        ranks: list[tuple[str, Any]] = []
        for name in seats.nodes:
            ranks += [(name, self._actors[name]), *((name, self._actor(name)) for _ in range(seats.per_node - 1))]
        place = ray.get(ranks[0][1].open_store.remote(), timeout=timeout_s)
        asked = {
            f"rank {rank} on {name}": actor.links.remote(rank, seats, place, timeout_s)
            for rank, (name, actor) in enumerate(ranks)
        }
        answers = _answers(asked, timeout_s)
        if answers.failed:
            who, why = next(iter(answers.failed.items()))
            raise RunFailedError(f"{who}: {why}")
        found: Measurements = next(iter(answers.given.values()))
        return found

    def facts_of_ray(self, name: str) -> Mapping[str, Any]:
        """GPUs and the object store as reported by Ray."""
        resources = self._nodes[name]["Resources"]
        return {
            "ray_gpus": resources.get("GPU", 0.0),
            "object_store_bytes": int(resources.get("object_store_memory", 0)) or None,
        }

    def places(self) -> Mapping[str, str]:
        """Folder of Ray's sockets and logs, to which it also spills objects that do not fit into memory."""
        import ray._private.worker as worker

        node = getattr(worker, "_global_node", None)
        folder = node.get_session_dir_path() if node is not None else "/tmp/ray"
        return {"Ray's spilled objects and logs": folder}

    def _actor(self, name: str) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = self._nodes[name]
        strategy = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
        actor = ray.remote(num_cpus=0)(NodeInspector).options(scheduling_strategy=strategy)
        return actor.remote(name, node["NodeManagerAddress"])


@contextlib.contextmanager
def ray_nodes(address: str) -> Iterator[RayNodes]:
    """Context with the nodes of the cluster at this address; the actors end with it. Raises ClusterError."""
    if address.startswith(("http://", "https://")):
        raise ClusterError(
            "--address",
            address,
            "this is the dashboard, which only accepts jobs",
            "give HOST:6379, or ray job submit --address ... -- python -m scaleray doctor",
        )
    with contextlib.ExitStack() as stack:
        with stage(f"connecting to Ray at {address}"):
            stack.enter_context(joined(address, name="--address"))
        nodes = RayNodes(address)
        try:
            yield nodes
        finally:
            nodes._actors.clear()


def _answers(asked: Mapping[str, Any], timeout_s: float) -> Answers:
    """Results of these calls that arrive within their common time limit."""
    import ray

    found, deadline = Answers(), time.monotonic() + timeout_s
    for name, call in asked.items():
        try:
            found.given[name] = ray.get(call, timeout=max(0.01, deadline - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            found.failed[name] = f"no answer within {timeout_s:g} s"
        except ray.exceptions.RayError as exc:
            found.failed[name] = _reason(exc)
    return found


def _reason(exc: BaseException) -> str:
    """The last informative line of another process's error, without its traceback."""
    cause = getattr(exc, "cause", None)
    if cause is not None and str(cause):
        return first_line(cause)
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    named = [line for line in lines if "Error:" in line]
    return (named or lines or [type(exc).__name__])[-1]
