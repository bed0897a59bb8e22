"""First steps of every command: make paths absolute, choose a name, and connect to Ray."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scaleray.config import RunConfig
from scaleray.config.base import absolute_path
from scaleray.config.optimizer_schedule import missing_rate
from scaleray.errors import ClusterError, ConfigError
from scaleray.launch.cluster import connection as cluster
from scaleray.launch.session.run_folder import RunFolder
from scaleray.records.run_record import Say
from scaleray.workload import brings_optimizer

LAUNCHERS = (
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpiexec", "PMI_RANK", "PMI_SIZE"),
)
"""Launchers that start several copies of a command, with their variables for a copy's number and the count."""


def check_started_once(say: Say) -> None:
    """Raise ClusterError in all but the first copy of a command that a launcher has started several times; log a
    warning in the first.
    """
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:  # a job of a Ray that a launcher has started on each node
        return
    for launcher, rank, size in LAUNCHERS:
        number, copies = os.environ.get(rank, ""), os.environ.get(size, "")
        if not (number.isdecimal() and copies.isdecimal() and int(copies) > 1):
            continue
        if int(number) > 0:
            raise ClusterError(
                "this process",
                f"copy {int(number) + 1} of {copies}, started by {launcher}",
                "one command starts all workers, and the first copy does so",
                "start scaleray once, and set the number of workers with --scale.workers",
            )
        say(
            f"warning: {launcher} started {copies} copies of this command ({size}={copies}); this one trains with "
            "scale.workers workers, and the others are refused"
        )
        return


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The config with all paths absolute, so that they are valid in every process."""
    checkpoint, workload = config.checkpoint, config.workload
    storage_path = absolute_path(checkpoint.storage_path)
    paths = {"checkpoint.storage_path": storage_path}
    if checkpoint.copy_path is not None:
        paths["checkpoint.copy_path"] = absolute_path(checkpoint.copy_path)
    if workload.weights is not None:
        paths["workload.weights"] = _path_of_weights(workload.weights, storage_path)
    if config.tracking.policy is not None:
        paths["tracking.policy"] = absolute_path(config.tracking.policy)
    return config.changed(paths)


def _path_of_weights(weights: str, storage_path: str) -> str:
    """Path of `workload.weights`: as given, or of the run with this name in the storage path."""
    path, in_storage = absolute_path(weights), f"{storage_path.rstrip('/')}/{weights}"
    is_name = "/" not in weights and not Path(path).exists()
    return in_storage if is_name and Path(in_storage).is_dir() else path


def check_local(config: RunConfig) -> None:
    """Raise ConfigError for GPUs with `--local`, whose workers are gloo processes on CPUs."""
    if config.scale.gpus:
        raise ConfigError(
            "scale.gpus_per_worker",
            config.scale.gpus,
            "--local runs gloo processes on CPUs",
            "add --scale.gpus-per-worker 0, or leave --local out",
        )


def forbid_ray() -> None:
    """Prevent a Ray Dataset in a local run from starting a cluster implicitly."""
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"


def check_learning_rate(config: RunConfig, workload: Any) -> None:
    """Raise ConfigError if neither the config nor the workload sets a learning rate."""
    if config.optimizer.learning_rate is None and not brings_optimizer(workload):
        raise missing_rate("the workload has no optimizer() of its own")


@contextlib.contextmanager
def connected_unless(config: RunConfig, *, local: bool) -> Iterator[None]:
    """Context in which Ray is connected, or disabled if the command runs locally."""
    if local:
        forbid_ray()
        yield
        return
    with cluster.connected(config):
        yield


@contextlib.contextmanager
def own_folder(config: RunConfig, kind: str, started_at: float) -> Iterator[RunFolder]:
    """A folder that is completed at the end of the context, and removed if empty. kind: first part of its default name.
    started_at: in Unix seconds."""
    started = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(started_at))}-{int(started_at * 1000) % 1000:03d}"
    folder = RunFolder.reserve(config, f"{kind}-{config.workload.stem}-{started}")
    try:
        yield folder
    finally:
        folder.complete()
        folder.remove_if_empty()
        folder.unlock()
