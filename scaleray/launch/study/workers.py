"""The workers of a study: one group that climbs the rungs it is given; Ray Train's, or plain gloo processes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scaleray.config import RunConfig
from scaleray.data import RaySources
from scaleray.data.source import Source
from scaleray.launch.cluster.connection import input_cpus
from scaleray.launch.workers.gloo import TELL, UserCode, gloo_processes
from scaleray.launch.workers.ray_train import fit_group
from scaleray.launch.workers.user_code import ship_user_code
from scaleray.training.study.ladder import Rung, Tell, climb

POLL_S = 0.5


def climb_in_processes(
    code: UserCode, rungs: Sequence[Rung], seed: int, tell: Tell, config: RunConfig, sources: Mapping[str, Source]
) -> None:
    """Measure the rungs in gloo processes on this machine. Raises what a worker raised."""
    size, workload = max(rung.workers for rung in rungs), rungs[0].job.workload
    with gloo_processes(size, code, timeout_s=config.scale.collective_timeout_s) as processes:
        processes.run(size, climb, rungs, seed, TELL, sources, workload=workload, on_message=tell)


def climb_under_ray(
    storage_path: str, rungs: Sequence[Rung], seed: int, tell: Tell, config: RunConfig, sources: Mapping[str, Source]
) -> None:
    """Measure the rungs with Ray Train workers. storage_path: for Ray Train's own files. Raises what a worker
    raised."""
    import ray
    from ray.util.queue import Queue

    ship_user_code(rungs[0].job.workload)
    stored = RaySources({name: ray.put(source) for name, source in sources.items()}, input_cpus(config))
    queue = Queue(actor_options={"num_cpus": 0})
    arguments = (rungs, seed, queue.put, stored)
    size, name = max(rung.workers for rung in rungs), f"ray_study_{rungs[0].name}"
    try:
        with _handing_over(queue, tell):
            fit_group(config, size, climb, arguments, storage_path=storage_path, name=name)
    finally:
        queue.shutdown(force=True)


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
                told = queue.get(timeout=POLL_S)
            except Empty:
                if is_over.is_set():
                    return
                continue
            except RayError:  # the queue's process is gone, with the cluster most likely
                return
            try:
                tell(told)
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
