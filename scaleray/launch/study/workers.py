"""The workers of a study: one group for the whole ladder, or one for each rung; Ray Train's, or plain gloo
processes."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from scaleray.config import RunConfig
from scaleray.data.source import Source
from scaleray.launch.cluster.connection import input_cpus
from scaleray.launch.workers.gloo import TELL, UserCode, gloo_processes
from scaleray.launch.workers.ray_train import fit_group
from scaleray.launch.workers.user_code import ship_user_code
from scaleray.training.input import local_opener, ray_opener
from scaleray.training.setup.place import Place
from scaleray.training.study.ladder import Ascent, Tell, climb

Climb = Callable[[Ascent, Tell], None]
"""Function that measures an ascent, and hands over what is measured as soon as it is. Raises what a worker raised."""
POLL_S = 0.5


# without Ray


def local_workers(config: RunConfig, sources: Mapping[str, Source], code: UserCode) -> Climb:
    """Gloo processes on this machine."""

    def measure(ascent: Ascent, tell: Tell) -> None:
        size = max(rung.workers for rung in ascent.rungs)
        with gloo_processes(size, code, timeout_s=config.scale.collective_timeout_s) as processes:
            workload = ascent.rungs[0].job.workload
            processes.run(size, climb_here, ascent, TELL, sources, workload=workload, on_message=tell)

    return measure


def climb_here(place: Place, ascent: Ascent, tell: Tell, sources: Mapping[str, Source]) -> None:
    """Climb as one process of the group, which reads its rows in a thread of its own."""
    import torch

    job = ascent.rungs[0].job
    torch.set_num_threads(max(1, int(job.config.scale.cpus_per_worker)))
    climb(place, ascent, open_stream=local_opener(job, sources, lambda message: None), tell=tell)


# under Ray


def ray_workers(config: RunConfig, sources: Mapping[str, Source], *, storage_path: str) -> Climb:
    """Ray Train workers. storage_path: for Ray Train's own files."""
    import ray
    from ray.util.queue import Queue

    references = {name: ray.put(source) for name, source in sources.items()}
    launches = itertools.count(1)

    def measure(ascent: Ascent, tell: Tell) -> None:
        size = max(rung.workers for rung in ascent.rungs)
        ship_user_code(ascent.rungs[0].job.workload)
        queue = Queue(actor_options={"num_cpus": 0})
        arguments = (ascent, queue, references, input_cpus(config))
        name = f"ray_study_{next(launches)}"
        try:
            with _handing_over(queue, tell):
                fit_group(config, size, climb_under_ray, arguments, storage_path=storage_path, name=name)
        finally:
            queue.shutdown(force=True)

    return measure


@contextlib.contextmanager
def _handing_over(queue: Any, tell: Tell) -> Iterator[None]:
    """Gives what workers put into the queue to `tell`, in a thread, and the rest at the end.

    Raises what `tell` raised.
    """
    from ray.exceptions import RayError
    from ray.util.queue import Empty

    is_over = threading.Event()
    errors: list[Exception] = []

    def hand_over() -> None:
        while True:
            try:
                measured = queue.get(timeout=POLL_S)
            except Empty:
                if is_over.is_set():
                    return
                continue
            except RayError:  # the queue's process is gone, with the cluster most likely
                return
            try:
                tell(measured)
            except Exception as exc:  # the driver's to raise, in its own thread
                errors.append(exc)

    thread = threading.Thread(target=hand_over, name="scaleray-study", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(timeout=30)
    if errors:
        raise errors[0]


def climb_under_ray(place: Place, ascent: Ascent, queue: Any, sources: Mapping[str, Any], cpus: float) -> None:
    """Climb as one Ray Train worker. sources: object references by split. cpus: Ray CPUs of the reading tasks."""
    import torch

    job = ascent.rungs[0].job
    if place.device.type == "cpu":
        torch.set_num_threads(max(1, int(job.config.scale.cpus_per_worker)))
    opener = ray_opener(job, sources, input_cpus=cpus, emit=lambda message: None)
    climb(place, ascent, open_stream=opener, tell=queue.put, host=place.node)
