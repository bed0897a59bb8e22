"""Live runs of a Ray cluster: each has a recorder, an actor with a name, which answers in a thread of its own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from scaleray.errors import ClusterError
from scaleray.launch.cluster.connection import joined
from scaleray.launch.workers.recorder_actor import NAMES, NAMESPACE
from scaleray.records.live import LiveState

ANSWER_S = 10.0
"""Seconds within which a recorder answers, also where its cores are busy."""

Ask = Callable[[], LiveState]


class RecorderGone(Exception):
    """The recorder that was asked has ended, or cannot be reached any more."""


@contextlib.contextmanager
def cluster_runs() -> Iterator[Callable[[], list[tuple[LiveState, Ask]]]]:
    """A function that gives the live runs of the cluster of RAY_ADDRESS, each with a way to ask it again, while the
    context lasts. Raises ClusterError."""
    address = os.environ["RAY_ADDRESS"]
    if address.startswith(("http://", "https://")):
        raise ClusterError(
            "RAY_ADDRESS",
            address,
            "this is the address of the dashboard, by which jobs are submitted",
            "give HOST:6379, or ray://HOST:10001 from outside the cluster",
        )
    with joined(address, name="RAY_ADDRESS"):
        yield _runs


def _runs() -> list[tuple[LiveState, Ask]]:
    import ray

    found = []
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] != NAMESPACE or not actor["name"].startswith(NAMES):
            continue
        with contextlib.suppress(RecorderGone, ValueError):  # it has ended since it was listed
            ask = asking(ray.get_actor(actor["name"], namespace=NAMESPACE))
            found.append((ask(), ask))
    return found


def asking(actor: Any) -> Ask:
    """A function that asks a recorder for the state of its run. It raises RecorderGone."""

    def ask() -> LiveState:
        import ray

        try:
            return LiveState.from_json(ray.get(actor.live_text.remote(), timeout=ANSWER_S))
        except (ray.exceptions.RayError, AttributeError, ValueError) as exc:  # also a recorder of an older version
            raise RecorderGone(str(exc)) from exc

    return ask
