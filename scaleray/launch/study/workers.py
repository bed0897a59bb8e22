"""The workers of a study: one group that climbs the rungs it is given; Ray Train's, or plain gloo processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scaleray.config import RunConfig
from scaleray.data import RaySources
from scaleray.data.source import Source
from scaleray.launch.cluster.connection import input_cpus
from scaleray.launch.workers.gloo import TELL, UserCode, gloo_processes
from scaleray.launch.workers.ray_train import fit_group
from scaleray.launch.workers.telling import handing_over
from scaleray.launch.workers.user_code import ship_user_code
from scaleray.training.study.ladder import Rung, Tell, climb


def climb_in_processes(
    code: UserCode,
    path: str,
    rungs: Sequence[Rung],
    seed: int,
    tell: Tell,
    config: RunConfig,
    sources: Mapping[str, Source],
) -> None:
    """Measure the rungs in gloo processes on this machine. path: the study's folder. Raises what a worker raised."""
    size, workload = max(rung.workers for rung in rungs), rungs[0].job.workload
    with gloo_processes(size, code, timeout_s=config.scale.collective_timeout_s, watched_in=path) as processes:
        processes.run(size, climb, rungs, seed, TELL, sources, workload=workload, on_message=tell)


def climb_under_ray(
    storage_path: str, rungs: Sequence[Rung], seed: int, tell: Tell, config: RunConfig, sources: Mapping[str, Source]
) -> None:
    """Measure the rungs with Ray Train workers. storage_path: for Ray Train's own files. Raises what a worker
    raised."""
    import ray

    ship_user_code(rungs[0].job.workload)
    stored = RaySources({name: ray.put(source) for name, source in sources.items()}, input_cpus(config))
    size, name = max(rung.workers for rung in rungs), f"ray_study_{rungs[0].name}"
    with handing_over(tell) as put:
        fit_group(config, size, climb, (rungs, seed, put, stored), storage_path=storage_path, name=name)
