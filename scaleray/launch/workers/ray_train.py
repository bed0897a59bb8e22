"""Ray Train as all commands use it: build its trainer, and run a function once in a group of workers."""

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from scaleray.common.private_parts import LEAN_TRAINER, QUIET_WATCHER
from scaleray.config import RunConfig
from scaleray.launch.workers.hang_reports import with_explanation
from scaleray.launch.workers.lost_workers import explain

CONTROLLER_FAILURE_LIMIT = 2  # Ray's default retries an impossible launch for ever


def worker_resources(config: RunConfig) -> dict[str, float]:
    """Resources that Ray reserves for each worker."""
    resources = {"CPU": config.scale.cpus_per_worker}
    return {**resources, "GPU": config.scale.gpus} if config.scale.gpus else resources


def torch_trainer(
    config: RunConfig,
    worker: Callable[[Any], Any],
    task: Any,
    *,
    num_workers: int | tuple[int, int],
    name: str,
    storage_path: str,
    max_failures: int = 0,
    num_spares: int | None = None,
    callbacks: Sequence[Any] = (),
    datasets: dict[str, Any] | None = None,
) -> Any:
    """Return an unstarted TorchTrainer with the config's backend, resources and placement.

    worker: called on each worker with a mapping whose `task` is a reference to the given task. num_workers: a number,
    or minimum and maximum of an elastic run. num_spares: additional workers that replace lost ones; Ray then replaces
    lost workers one by one and leaves the others alone. None: it restarts all. name: of Ray Train's own folder in
    `storage_path`. datasets: Ray Datasets that are streamed to the workers, by split."""
    import ray.train

    from scaleray.launch.workers.process_group import ProcessGroup

    trainer: Callable[..., Any]
    if LEAN_TRAINER.is_used():
        from scaleray.launch.workers import lean_trainer

        trainer = lean_trainer.lean_trainer
    else:
        from ray.train.torch import TorchTrainer

        trainer = TorchTrainer
    scale = config.scale
    elastic = {} if isinstance(num_workers, int) else {"elastic_resize_monitor_interval_s": scale.resize_interval_s}
    return trainer(
        worker,
        train_loop_config={"task": ray.put(task)},  # the controller, which has no use for it, unpickles what is here
        torch_config=ProcessGroup(scale.backend, int(scale.collective_timeout_s), are_replaced=num_spares is not None),
        scaling_config=ray.train.ScalingConfig(
            num_workers=num_workers + (num_spares or 0) if isinstance(num_workers, int) else num_workers,
            use_gpu=scale.gpus > 0,
            resources_per_worker=worker_resources(config),
            placement_strategy=scale.placement,
            label_selector=dict(scale.label_selector) or None,
            **elastic,
        ),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=storage_path,
            failure_config=ray.train.FailureConfig(
                max_failures=max_failures,
                # a lost node may be missing for hours, while the others train
                controller_failure_limit=CONTROLLER_FAILURE_LIMIT if num_spares is None else -1,
            ),
            callbacks=list(callbacks) or None,
            logging_config=ray.train.LoggingConfig(log_level="ERROR"),
        ),
        datasets=datasets or None,
        dataset_config=ray.train.DataConfig(enable_shard_locality=True) if datasets else None,
    )


def fit_group(
    config: RunConfig,
    world_size: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    *,
    storage_path: str,
    name: str,
) -> Any:
    """Result of `function(place, *arguments)` on rank 0, run once by a group of workers.

    Arguments that are object references are fetched. name: of Ray Train's own folder, to which the world size is added.
    Raises the errors into which `lost_workers.explain` converts Ray's.
    """
    import ray
    import ray.train

    group = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    trainer = torch_trainer(
        config,
        run_function,
        {
            "function": function,
            "arguments": arguments,
            "uses_gpu": config.scale.gpus > 0,
            "watch": (storage_path, group),
            "timeout_s": config.scale.collective_timeout_s,
        },
        num_workers=world_size,
        name=f"{name}_{world_size}",
        storage_path=storage_path,
    )
    try:
        with _without_preemption_watcher():
            return trainer.fit().return_value
    except SystemExit as exc:  # Ray's answer to Ctrl-C
        raise KeyboardInterrupt from exc
    except (ray.train.TrainingFailedError, ray.exceptions.RayError) as exc:
        raise with_explanation(explain(exc), storage_path, group, world_size) from exc


def run_function(config: dict[str, Any]) -> Any:
    """Entry point of each Ray Train worker of a group; the group's result is that of rank 0."""
    import ray

    from scaleray.training.health.group_watch import GroupWatch
    from scaleray.training.worker import context_under_ray, quieten_ray, received

    quieten_ray()
    task = received(config["task"])
    arguments = [ray.get(a) if isinstance(a, ray.ObjectRef) else a for a in task["arguments"]]
    place = context_under_ray(uses_gpu=task["uses_gpu"])
    with GroupWatch(place, *task["watch"], collective_timeout_s=task["timeout_s"]):
        return task["function"](place, *arguments)


@contextlib.contextmanager
def without_watcher_notice() -> Iterator[None]:
    """Context that hides one log line of Ray, on arguments of its preemption watcher in the object store, which appears
    as an error at every start although nothing is wrong. All other lines of all processes are shown."""
    if not QUIET_WATCHER.is_used():
        yield
        return
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    def drop(batch: dict[str, Any]) -> None:
        lines = batch["lines"]
        lines[:] = [line for line in lines if not ("PreemptionWatcher" in line and "constructor arguments" in line)]

    entry = ("scaleray", drop)
    dispatcher.handlers = [entry, *dispatcher.handlers]  # before the one that prints; a thread may read the old list
    try:
        yield
    finally:
        dispatcher.handlers = [one for one in dispatcher.handlers if one is not entry]


@contextlib.contextmanager
def _without_preemption_watcher() -> Iterator[None]:
    """Disable Ray Train's preemption watcher: its notices are unused here, and it costs a process and logs an error at
    every start."""
    name = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before
