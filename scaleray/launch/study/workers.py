"""The workers of a study: one group for the whole ladder, or one for each rung; Ray Train's, or plain gloo
processes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from scaleray.config import RunConfig
from scaleray.data.source import Source
from scaleray.launch.cluster.connection import input_cpus
from scaleray.launch.workers.gloo import TELL, UserCode, gloo_processes
from scaleray.launch.workers.in_process import stream_opener
from scaleray.launch.workers.ray_train import fit_group
from scaleray.launch.workers.signals import sigterm_like_ctrl_c
from scaleray.launch.workers.user_code import ship_user_code
from scaleray.training.setup.place import Place
from scaleray.training.study.ladder import Ascent, Tell, climb

Climb = Callable[[Ascent, Tell], None]
"""Function that measures an ascent, and hands over what is measured as soon as it is. Raises what a worker raised."""
POLL_S = 0.5


# without Ray


@contextlib.contextmanager
def local_workers(config: RunConfig, workers: int, sources: Mapping[str, Source], code: UserCode) -> Iterator[Climb]:
    """Gloo processes on this machine."""

    def measure(ascent: Ascent, tell: Tell) -> None:
        size = max(rung.workers for rung in ascent.rungs)
        with gloo_processes(size, code, timeout_s=config.scale.collective_timeout_s) as processes:
            workload = ascent.rungs[0].job.workload
            processes.run(size, climb_here, ascent, TELL, sources, workload=workload, on_message=tell)

    with sigterm_like_ctrl_c():
        yield measure


def climb_here(place: Place, ascent: Ascent, tell: Tell, sources: Mapping[str, Source]) -> None:
    """Climb as one process of the group, which reads its rows in a thread of its own."""
    import torch

    job = ascent.rungs[0].job
    torch.set_num_threads(max(1, int(job.config.scale.cpus_per_worker)))
    climb(place, ascent, open_stream=stream_opener(job, sources, lambda message: None), tell=tell)


# under Ray


@contextlib.contextmanager
def ray_workers(
    config: RunConfig, workers: int, sources: Mapping[str, Source], *, storage_path: str
) -> Iterator[Climb]:
    """Ray Train workers. storage_path: for Ray Train's own files."""
    import ray
    from ray.util.queue import Queue

    references = {name: ray.put(source) for name, source in sources.items()}
    launches = 0

    def measure(ascent: Ascent, tell: Tell) -> None:
        nonlocal launches
        launches += 1
        size = max(rung.workers for rung in ascent.rungs)
        ship_user_code(ascent.rungs[0].job.workload)
        queue = Queue(actor_options={"num_cpus": 0})
        task = {"ascent": ascent, "queue": queue, "sources": references, "input_cpus": input_cpus(config)}
        try:
            with _handing_over(queue, tell):
                fit_group(
                    config, size, task, storage_path=storage_path, worker=study_worker, name=f"ray_study_{launches}"
                )
        finally:
            queue.shutdown(force=True)

    with sigterm_like_ctrl_c():
        yield measure


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


def study_worker(task: dict[str, Any]) -> None:
    """Entry point of one Ray Train worker."""
    import logging

    import torch

    from scaleray.training.worker import place_under_ray
    from scaleray.training.worker import stream_opener as ray_stream_opener

    for name in ("ray.data", "ray.data._internal.progress"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("ray.train.v2._internal.util").setLevel(logging.CRITICAL)  # the driver says each error, once
    ascent = task["ascent"]
    place = place_under_ray(uses_gpu=task["uses_gpu"])
    if not task["uses_gpu"]:
        torch.set_num_threads(max(1, int(ascent.rungs[0].job.config.scale.cpus_per_worker)))
    opener = ray_stream_opener(
        ascent.rungs[0].job, task["sources"], input_cpus=task["input_cpus"], emit=lambda message: None
    )
    climb(place, ascent, open_stream=opener, tell=task["queue"].put, host=place.node)
