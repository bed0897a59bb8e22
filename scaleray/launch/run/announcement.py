"""Description of a run for the terminal, before its workers start."""

from collections.abc import Mapping
from typing import Any

from scaleray.common.printed import quantity
from scaleray.config import RunConfig
from scaleray.config.recipe.values import Recipe
from scaleray.data import TRAIN
from scaleray.data.iterable import ENDLESS
from scaleray.launch.run.resume import Request
from scaleray.launch.session.run_folder import RunFolder
from scaleray.live.metrics_endpoint import HOST
from scaleray.training.setup.job import TrainJob
from scaleray.workload import brings_optimizer, brings_schedule

READERS = {"worker": "the workers themselves", "ray": "Ray tasks"}


def announcement(
    request: Request,
    job: TrainJob,
    *,
    data: Mapping[str, Mapping[str, Any]],
    folder: RunFolder,
    local: bool,
    port: int | None = None,
) -> list[str]:
    """Lines that describe the run. data: facts of each split. local: on this machine, without Ray. port: of its
    metrics."""
    r, config, before = job.recipe, job.config, request.before
    here = "this process" if config.scale.max_workers == 1 else "gloo processes of this machine"
    start = "run"
    if before is not None:
        newest = before.newest
        start = f"continuing after step {newest.step}: run" if newest else "continuing from the first step: run"
    return [
        f"{start} {folder.name}: {config.workload.name}",
        f"  {config.scale.workers!s} worker{'s' if config.scale.max_workers > 1 else ''}, {r.strategy}, "
        f"{config.precision.dtype}, {quantity(r.total_steps, 'step')} ({_an_epoch(job)}), "
        f"{_learning_rate(config, job)}",
        f"  {_global_batch(config, r)}",
        f"  sample order: {job.sample_order}",
        f"  rows are read by {READERS[data[TRAIN]['read_by']]}",
        *(f"  the {name} data: {note}" for name, facts in data.items() for note in facts.get("notes", ())),
        *([f"  in {here}, without Ray"] if local else []),
        *([f"  metrics for Prometheus: http://{HOST}:{port}/metrics"] if port is not None else []),
        *(f"  changed: {change}" for change in request.changed),
    ]


def _global_batch(config: RunConfig, recipe: Recipe) -> str:
    """Factors of the global batch: model replicas, micro-batches of each, and rows of a micro-batch."""
    replicas = recipe.degrees.data
    name = "worker" if recipe.degrees.model == 1 else "replica"
    micro_batches, rows = recipe.accumulation_steps, recipe.micro_batch_size
    most = "" if replicas * micro_batches * rows == recipe.global_batch_size else "at most "
    return (
        f"global batch {recipe.global_batch_size} = {replicas} {name}{'s' if replicas > 1 else ''} x {micro_batches} "
        f"micro-batch{'es' if micro_batches > 1 else ''} of {most}{rows} {config.batch.unit}"
    )


def _an_epoch(job: TrainJob) -> str:
    """Steps per epoch, as text."""
    return "endless epochs" if job.splits[TRAIN].num_rows == ENDLESS else f"{job.recipe.steps_per_epoch} an epoch"


def _learning_rate(config: RunConfig, job: TrainJob) -> str:
    rule, rate = "", job.recipe.learning_rate
    if config.optimizer.rule != "none":
        rule = f" (rule {config.optimizer.rule} from {config.optimizer.learning_rate:g})"
    if brings_optimizer(job.workload) and rate is not None:
        rule += " for the workload's own optimizer()"
    elif brings_schedule(job.workload):
        rule += " for the workload's own schedule()"
    return ("the workload's own learning rate" if rate is None else f"learning rate {rate:g}") + rule
