"""Ray actors that hold copies of the state in memory: one on each node of a run, separate from its workers.

They do not belong to the job and outlive its workers and its driver. A holder without requests for a while ends."""

from __future__ import annotations

import hashlib
import secrets
import socket
import sys
import threading
import time
from typing import Any

from scaleray.checkpoints.holder import family_of
from scaleray.checkpoints.memory_store import MemoryStore
from scaleray.checkpoints.storage import Store
from scaleray.training.state.memory_copies import HolderPlace

NAMESPACE = "scaleray-holders"
KEPT_S = 1800.0
"""Seconds without a request after which a holder ends, because its run has ended and was not resumed."""
READY_S = 60.0
MARKS = ("WORKER_TEMPLATE_SOCKET",)
"""Variables that mark the processes of a driver, which are ended after it."""


def holder_here(run_path: str, *, label: str) -> HolderPlace:
    """Holder of a run on this worker's node, started if missing. label: node label of the failure domain, or `node`."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    class MemoryHolder:
        def __init__(self, node: str, domain: str, host: str, port: int, token: str) -> None:
            from scaleray.checkpoints.holder import Holder

            try:  # Ray starts it again with the same arguments if its process is lost: clients find it where it was
                self._holder = Holder(host, token, port)
            except OSError:
                self._holder = Holder(host, token)
            self._place = HolderPlace(node, domain, host, self._holder.port, token)
            threading.Thread(target=self._end_unused, daemon=True).start()

        def place(self) -> HolderPlace:
            return self._place

        def _end_unused(self) -> None:
            while time.monotonic() - self._holder.asked_at < KEPT_S:
                time.sleep(10.0)
            ray.kill(ray.get_runtime_context().current_actor)

    context, host = ray.get_runtime_context(), ray.util.get_node_ip_address()
    with socket.socket(family_of(host)) as free:
        free.bind((host, 0))
        port = free.getsockname()[1]
    node = context.get_node_id()
    domain = node if label == "node" else str(context.get_node_labels().get(label, node))
    environment: dict[str, Any] = {}
    if "py_executable" in context.runtime_env:  # a fork of the driver's template would end with the driver
        environment = {"py_executable": sys.executable, "env_vars": dict.fromkeys(MARKS, "")}
    actor = (
        ray.remote(MemoryHolder)
        .options(
            name=f"{_prefix(run_path)}{node}",
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=0,
            runtime_env=environment or None,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote(node, domain, host, port, secrets.token_urlsafe(32))
    )
    place: HolderPlace = ray.get(actor.place.remote(), timeout=READY_S)
    return place


def other_holders(run_path: str) -> list[HolderPlace]:
    """All holders of a run that respond."""
    import ray

    found = [actor.place.remote() for actor in _actors(run_path)]
    ready, _ = ray.wait(found, num_returns=len(found), timeout=READY_S / 6) if found else ([], [])
    places = []
    for each in ready:
        try:
            places.append(ray.get(each))
        except ray.exceptions.RayError:  # of a node that is lost
            continue
    return places


def stores_of(run_path: str) -> list[Store]:
    """The files of all holders of a run."""
    return [MemoryStore.at(each.host, each.port, each.token) for each in other_holders(run_path)]


def end_holders(run_path: str) -> None:
    """End the holders of a run, which frees their memory."""
    import ray

    for actor in _actors(run_path):
        ray.kill(actor)


def _actors(run_path: str) -> list[Any]:
    import ray

    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if each["namespace"] == NAMESPACE]
    found = []
    for name in names:
        if name.startswith(_prefix(run_path)):
            try:
                found.append(ray.get_actor(name, namespace=NAMESPACE))
            except ValueError:  # it has ended meanwhile
                continue
    return found


def _prefix(run_path: str) -> str:
    return f"holder-{hashlib.sha256(run_path.encode()).hexdigest()[:16]}-"
