"""`verify`: is the distributed run still the same training? Plans the variants, runs them, keeps the certificate.

One Ray Train launch for each number of workers, or plain gloo processes; the first runs the single process that the
others must equal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from scaleray.checkpoints.storage import Store
from scaleray.config import RunConfig
from scaleray.config.base import absolute_path
from scaleray.data.sources import Source
from scaleray.errors import ClusterError, ConfigError
from scaleray.launch import cluster
from scaleray.launch.certificate import EqualityCertificate, Say, keep, largest_differences, make_certificate, recorded
from scaleray.launch.gloo import UserCode, gloo_processes
from scaleray.launch.local import stream_opener
from scaleray.launch.run import load_sources
from scaleray.launch.run_folder import RunFolder
from scaleray.launch.trainer import CONTROLLER_FAILURE_LIMIT, collective_backend, worker_resources
from scaleray.launch.verification_plan import Plan, Question, course_in_words, make_plan
from scaleray.launch.worker_failures import explain
from scaleray.tracking import store
from scaleray.training.place import Place
from scaleray.training.verification import Assignment, Outcome, References, verify_group
from scaleray.workload import user_modules

RunGroup = Callable[[int, Assignment, References], tuple[list[Outcome], References]]
"""Runs the variants of one number of workers."""
CHECKPOINTS = "compared"
"""The folder of the checkpoints that are passed on between numbers of workers; deleted at the end."""
PARAMS = (
    "config_hash", "environment_hash", "bound", "precision", "own_precision", "steps", "strategies", "world_sizes",
    "accumulation", "global_batch_size", "where",
)  # fmt: skip
"""Fields of the certificate that MLflow lists among a run's params."""


def verify(
    config: RunConfig, question: Question, workload: Any = None, *, local: bool = False, say: Say = lambda text: None,
    render: Callable[[EqualityCertificate], str] | None = None, base_dir: Path | None = None,
) -> EqualityCertificate:  # fmt: skip
    """Run the first steps of a training in every way asked for, and compare each with a single process.

    render: makes the table that is stored beside the certificate. Raises UsageError for what the user can mend and
    RunFailedError for a group that died; a mismatch is no error, `passed` says it.
    """
    started_at = time.time()
    storage = {"storage_path": absolute_path(config.checkpoint.storage_path)}
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update=storage)})
    tracking_uri = store.resolve_uri(config.tracking.uri)
    store.check_reachable(tracking_uri)
    if local and config.scale.gpus_per_worker:
        raise ConfigError(
            "scale.gpus_per_worker", config.scale.gpus_per_worker, "--local uses gloo processes on the CPU",
            "add --scale.gpus-per-worker 0, or leave --local out",
        )  # fmt: skip
    code = UserCode(config.workload.name if workload is None else None, config.workload.args, base_dir, workload)
    workload = code.load()
    with environment_of(config, local=local):
        sources = load_sources(workload)
        plan = make_plan(config, question, workload, sources)
        if not local:
            check_capacity(config, plan)
        reference = plan.reference.job
        say(
            f"verify {config.workload.name}: {reference.recipe.total_steps} steps of {reference.recipe.global_batch_size} samples "
            f"in {question.precision}, bound {question.bound:g}"
        )
        say(f"  {course_in_words(plan)}")
        if not local:
            cpus = reference.config.scale.cpus_per_worker
            say(f"  workers ask for {cpus:g} CPU each: numbers are compared, not speed")
        with recorded(config, tracking_uri, started_at) as (folder, run):
            groups = _local_groups(plan, sources, code, config) if local else _ray_groups(plan, sources, config, folder)
            try:
                with groups as run_group:
                    outcomes = [
                        *_outcomes(plan, question, run_group, say, f"{folder.path}/{CHECKPOINTS}"),
                        *plan.refused,
                    ]
            finally:
                with contextlib.suppress(OSError):
                    Store(folder.path).delete_folder(CHECKPOINTS)
            certificate = make_certificate(
                config, question, plan, sources, outcomes, folder, run, local=local, started_at=started_at
            )
            table = {"verification.txt": render(certificate)} if render else {}
            keep(
                certificate,
                folder,
                run,
                params=PARAMS,
                metrics=largest_differences(outcomes),
                more_files=table,
                say=say,
            )
    return certificate


def _outcomes(
    plan: Plan, question: Question, run_group: RunGroup, say: Say, checkpoints: str
) -> Iterator[Outcome]:  # fmt: skip
    references: References = {}
    for world_size, variants in plan.groups.items():
        labels = ", ".join(v.label for v in variants) or "the reference"
        say(f"  {world_size} worker{'s' if world_size > 1 else ''}: {labels} ...")
        started = time.monotonic()
        outcomes, references = run_group(
            world_size, Assignment(plan.reference, tuple(variants), question.bound, checkpoints), references
        )
        bad = sum(outcome.verdict == "differs" for outcome in outcomes)
        found = f"{bad} of {len(outcomes)} differ" if bad else "no mismatch"
        say(f"    {found}, {time.monotonic() - started:.0f} s")
        yield from outcomes


# without Ray


@contextlib.contextmanager
def _local_groups(plan: Plan, sources: Mapping[str, Source], code: UserCode, config: RunConfig) -> Iterator[RunGroup]:
    timeout_s = config.scale.collective_timeout_s
    workload, read = plan.reference.job.workload, _read(plan, sources)
    with gloo_processes(max(plan.groups), code, timeout_s=timeout_s) as processes:

        def run_group(world_size: int, assignment: Assignment, references: References) -> Any:
            return processes.run(world_size, verify_here, assignment, references, read, workload=workload)

        yield run_group


def _read(plan: Plan, sources: Mapping[str, Source]) -> dict[str, Source]:
    """The sources of the splits that are read."""
    return {name: sources[name] for name in plan.reference.job.splits}


def verify_here(
    place: Place, assignment: Assignment, references: References, sources: Mapping[str, Source]
) -> tuple[list[Outcome], References]:
    """One worker's part. It reads its rows itself, so that nothing but the training differs."""
    import torch

    torch.set_num_threads(1)
    open_stream = stream_opener(assignment.reference.job, sources, lambda message: None)
    return verify_group(place, assignment, references, open_stream=open_stream)


# under Ray


@contextlib.contextmanager
def _ray_groups(plan: Plan, sources: Mapping[str, Source], config: RunConfig, folder: RunFolder) -> Iterator[RunGroup]:
    import ray
    from ray import cloudpickle

    for module in user_modules(plan.reference.job.workload):
        cloudpickle.register_pickle_by_value(module)
    read = ray.put(_read(plan, sources))

    def run_group(world_size: int, assignment: Assignment, references: References) -> Any:
        task = {"function": verify_here, "arguments": (assignment, ray.put(references)), "sources": read}
        config = (assignment.variants or (assignment.reference,))[0].job.config
        return fit_group(config, world_size, task, storage_path=folder.path)

    with sigterm_like_ctrl_c():
        yield run_group


def fit_group(
    config: RunConfig, world_size: int, task: dict[str, Any], *, storage_path: str, worker: Callable[[Any], Any] | None = None,
    name: str = "ray_verify",
) -> Any:  # fmt: skip
    """Run a check on Ray Train workers; gives what rank 0 returned.

    task: `function(place, *arguments, sources)` with arguments that may be object references, and a reference to
    the `sources` by split; or whatever `worker` takes. name: of Ray Train's own folder, with the world size added.
    """
    import ray
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = TorchTrainer(
        worker or verify_worker,
        train_loop_config={**task, "uses_gpu": config.scale.gpus_per_worker > 0},
        torch_config=TorchConfig(backend=collective_backend(config), timeout_s=int(config.scale.collective_timeout_s)),
        scaling_config=ray.train.ScalingConfig(
            num_workers=world_size,
            use_gpu=config.scale.gpus_per_worker > 0,
            resources_per_worker=worker_resources(config),
            placement_strategy=config.scale.placement,
            label_selector=dict(config.scale.label_selector) or None,
        ),
        run_config=ray.train.RunConfig(
            name=f"{name}_{world_size}",
            storage_path=storage_path,
            failure_config=ray.train.FailureConfig(max_failures=0, controller_failure_limit=CONTROLLER_FAILURE_LIMIT),
            logging_config=ray.train.LoggingConfig(log_level="ERROR"),
        ),
    )
    try:
        with _without_preemption_watcher():
            return trainer.fit().return_value
    except SystemExit as exc:  # Ray's answer to Ctrl-C
        raise KeyboardInterrupt from exc
    except (ray.train.TrainingFailedError, ray.exceptions.RayError) as exc:
        raise explain(exc) from exc


@contextlib.contextmanager
def _without_preemption_watcher() -> Iterator[None]:
    """Nothing here could act on its notices, and it costs a process and prints an error at every start."""
    name = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def verify_worker(task: dict[str, Any]) -> Any:
    """Entry point of one Ray Train worker; rank 0's answer is the group's."""
    import ray
    import ray.train
    import ray.train.torch
    import torch

    context = ray.train.get_context()
    arguments = [ray.get(a) if isinstance(a, ray.ObjectRef) else a for a in task["arguments"]]
    device = torch.device("cpu")
    if task["uses_gpu"]:
        device = ray.train.torch.get_device()
        torch.cuda.set_device(device)
    place = Place(
        rank=context.get_world_rank(), world_size=context.get_world_size(), local_rank=context.get_local_rank(),
        local_world_size=context.get_local_world_size(), node=ray.util.get_node_ip_address(), device=device,
    )  # fmt: skip
    return task["function"](place, *arguments, ray.get(task["sources"]))


@contextlib.contextmanager
def environment_of(config: RunConfig, *, local: bool) -> Iterator[None]:
    if local:
        os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # a Ray Dataset must not start a cluster in passing
        yield
        return
    with cluster.connected(config):
        yield


def check_capacity(config: RunConfig, plan: Plan) -> None:
    nodes = cluster.alive_nodes()
    for world_size, variants in plan.groups.items():
        spread = (variants or [plan.reference])[0].job.config
        # no input tasks run here, so that no CPU needs to stay free for them
        alone = spread.model_copy(update={"data": spread.data.model_copy(update={"reserved_cpus": 0.0})})
        try:
            cluster.check_capacity(alone, nodes)
        except ClusterError as exc:
            raise ClusterError(
                "--world-sizes", f"{world_size}, which needs {exc.found}", exc.allowed,
                "leave the size out, or check on this machine alone with --local",
            ) from exc  # fmt: skip


@contextlib.contextmanager
def sigterm_like_ctrl_c() -> Iterator[None]:
    """`ray job stop` sends SIGTERM: end like with Ctrl-C, which frees the workers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before_term, before_int = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGTERM, lambda signum, frame: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before_term)
        signal.signal(signal.SIGINT, before_int)  # Ray leaves its own behind
