"""`evaluate`: measure the metrics of a run's model, as in its training, on its splits or on other data."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scaleray.checkpoints.storage import Store
from scaleray.common.options import takes
from scaleray.common.progress import stage
from scaleray.config import RunConfig
from scaleray.config.averaging_pruning_fine_tuning import FineTuningSettings
from scaleray.config.checkpoint import NOTHING_SAVED
from scaleray.config.precision import PrecisionSettings
from scaleray.config.recipe.derive import derive
from scaleray.config.recipe.values import DataSize
from scaleray.data import TRAIN, Input, Split, load_sources
from scaleray.data.as_source import as_source, for_workload
from scaleray.data.iterable import refuse_endless
from scaleray.data.parquet import ParquetSource
from scaleray.data.ragged import joined
from scaleray.data.source_interface import Columns, Source
from scaleray.data.sources import ArraySource
from scaleray.errors import DataError, TrackingError, UsageError, first_line
from scaleray.launch.cluster import connection as cluster
from scaleray.launch.cluster.capacity import check_option_fits
from scaleray.launch.cluster.gpu_workers import with_gpus_decided
from scaleray.launch.session.opened import connected_unless, with_absolute_paths
from scaleray.launch.workers.gloo import UserCode, gloo_processes
from scaleray.launch.workers.loaded_workload import ship_user_code
from scaleray.launch.workers.ray_train import fit_group
from scaleray.models.load import ModelParts, find_parts
from scaleray.models.model_options import EvaluateOptions
from scaleray.models.row_files import Files, Shape, columns_of, own_rows, shape_of, types_of
from scaleray.models.stored_weights import Weights, fill
from scaleray.models.trained_run import TrainedRun, find_trained
from scaleray.recording.store import RunStore, check_reachable, open_client, resolve_uri, without_password
from scaleray.records.json_record import JsonRecord
from scaleray.records.mlflow_operations import LogArtifact, LogMetrics
from scaleray.records.run_record import Say
from scaleray.records.start import steady_time
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.model_setup import prepare
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.step.evaluation import Evaluations


def add_to_run(
    about: Mapping[str, Any], metrics: Mapping[str, float], *, step: int, files: Sequence[Path], folder: str
) -> None:
    """Write metrics at a step, and files into a folder of the artifacts. about: content of run.json.

    Raises TrackingError. The run's status is unchanged.
    """
    run_id, experiment_id, uri = (about.get(key) for key in ("run_id", "experiment_id", "tracking_uri"))
    if not run_id:
        raise TrackingError.problem("run.json", "names no MLflow run", "add --no-record")
    uri = resolve_uri(uri)
    check_reachable(uri)
    now = int(1000 * time.time())
    try:
        # a promoted model names its run alone
        store = RunStore(uri, run_id, experiment_id or open_client(uri).get_run(run_id).info.experiment_id)
        store.send(LogMetrics([(name, value, now, step) for name, value in metrics.items()]))
        for file in files:
            store.send(LogArtifact(str(file), folder))
    except Exception as exc:  # mlflow, its HTTP client and its database drivers share no base class
        raise TrackingError(
            "MLflow at", without_password(uri), f"it rejected the metrics: {first_line(exc)}", "or add --no-record"
        ) from exc


BATCH_ROWS = 65_536


def as_source_of_split(data: Any, shape: Shape, workload: Any, *, split: str, fitted: Any = None) -> Source:
    """Source, with the workload's transform, for `--data` or `data=`: files of tables, data in memory, or any value
    that `datasets()` may return. shape: shapes of the training's columns. Raises DataError."""
    if not isinstance(data, (str, Path)):
        given = as_source(data, split=split, allows_text=shape.allows_text)
        return for_workload(given, workload, split=split, fitted=fitted)
    if (own := own_rows(data, workload)) is not None:
        _refuse_missing(own.read(np.arange(1)), shape, str(data))
        return for_workload(own, workload, split=split, fitted=fitted)
    files = Files.at(data)
    if files.format == "parquet" and (stored := _as_stored(files, shape)) is not None:
        return for_workload(as_source(stored, split=split), workload, split=split, fitted=fitted)
    parts: list[Columns] = []
    for table in files.tables(BATCH_ROWS):
        names = [name for name in table.column_names if _is_wanted(name, shape)]
        columns, problems = columns_of(table.select(names), files.uri, allows_text=shape.allows_text)
        if problems:
            raise problems[0]
        parts.append(shape.fit(columns))
    if parts:
        _refuse_missing(parts[0], shape, files.uri)
    if not parts:
        raise DataError("--data", files.uri, "it has no rows")
    rows = ArraySource(joined(parts), allows_text=shape.allows_text)
    return for_workload(rows, workload, split=split, fitted=fitted)


def _refuse_missing(columns: Columns, shape: Shape, where: str) -> None:
    """Raise DataError if a training column is missing, such as the labels."""
    if missing := [name for name in shape.columns if name not in columns]:
        there = ", ".join(columns) or "no column of numbers"
        raise DataError(f"column {missing[0]} of {where}", None, f"the training had it; the columns are {there}")


def _as_stored(files: Files, shape: Shape) -> ParquetSource | None:
    """Source that reads the files piece by piece, if their columns are exactly the training's."""
    try:
        source = ParquetSource(files.uri, columns=list(shape.columns) or None)
        first = source.read(np.arange(1))
    except DataError:
        return None
    return source if types_of(first) == dict(shape.columns) else None


def _is_wanted(name: str, shape: Shape) -> bool:
    """Whether a column is a training column, or a part of one."""
    return not shape.columns or name in shape.columns or name.rpartition("_")[0] in shape.columns


SECTION = "evaluate"
"""Section of the metrics in MLflow, so that the training's own curves are unchanged."""
MOST_ROWS = 256
"""Rows of a micro-batch if the config does not set its size."""


@dataclass(frozen=True)
class Evaluation(JsonRecord):
    """Metrics of a run's model, by `split/metric`. rows: number of rows, by split. recorded: names of the metrics in
    MLflow, if written there."""

    run: str
    weights: str
    step: int | None
    metrics: dict[str, float]
    rows: dict[str, int]
    data: dict[str, Any]
    """Facts about each split: kind, rows, and SHA-256 if its content was hashed."""
    workers: int
    duration_s: float
    recorded: dict[str, str] = dataclasses.field(default_factory=dict)


@takes(EvaluateOptions)
def evaluate(
    run: str | Path, *, options: EvaluateOptions, data: Any = None, record: bool = True, say: Say = lambda text: None
) -> Evaluation:
    """Measure the metrics of a run's model, as in its training, on every split except `train` or on other data.

    run: as for `load`. data: a Parquet, CSV or JSON-lines file, a folder or s3:// URI of such files, or any value that
    a workload's `datasets()` may have for a split; its metrics are named after its file. record: write the metrics to
    the run in MLflow, in the section `evaluate`. Raises UsageError for errors of use."""
    split, workers, local = options.split, options.workers, options.local
    started = time.perf_counter()
    if data is not None and split is not None:
        raise UsageError("--split", split, "it is a split of the run, but --data is given", "omit one of them")
    if workers < 1:
        raise UsageError("--workers", workers, "it must be at least 1")
    found = find_trained(run, uri=options.uri)
    if record and found.about.get("tracking_uri") is None:
        text = "is recorded on another MLflow server than the one in use, which is contacted only if you name it"
        raise TrackingError.problem(f"the run {found.name}", text, "add --uri URI, or --no-record")
    parts = find_parts(found, options=options)
    sources = _sources(parts, data, split)
    config = evaluation_config(parts, found, workers)
    many = f"{workers} worker{'s' * (workers > 1)}"
    say(f"evaluating {parts.weights.words} of {parts.name} on {', '.join(sources)}, {many}")
    with stage("evaluating"), connected_unless(config, local=local):
        config = _on_what_is_there(config, local=local, say=say)
        task = Task(evaluation_job(config, parts.workload, sources), parts.weights)
        metrics = _measured(task, sources, workers, local=local, code=_code(parts, found, options.workload))
    result = Evaluation(
        run=parts.name,
        weights=parts.weights.words,
        step=parts.weights.step,
        metrics=metrics,
        rows={name: source.num_rows for name, source in sources.items()},
        data={name: source.describe() for name, source in sources.items()},
        workers=workers,
        duration_s=time.perf_counter() - started,
    )
    return _recorded(result, found) if record else result


@dataclass(frozen=True)
class Task:
    """Input of an evaluating worker."""

    job: TrainJob
    weights: Weights


def evaluate_here(place: RankContext, task: Task, sources: Mapping[str, Source]) -> dict[str, float]:
    """Evaluate on this worker, and return the metrics of all workers together. Collective."""
    job = task.job
    setup = prepare(job.workload, job.config, job.recipe, place, is_resumed=True)
    try:
        fill(setup.parallel.module, task.weights, where=task.weights.words)
        given = Input(
            sources, job.config.data, may_draw=False, others_wait_s=lambda: float("inf"), warn=lambda text: None
        )
        evaluations = Evaluations(place, given, lambda phase: None, job.config)
        evaluations.prepare(job, setup)
        step = task.weights.step or 0
        return dict(evaluations.run(step, evaluations.due(step, at_end=True)).metrics)
    finally:
        setup.close()


def evaluation_config(parts: ModelParts, run: TrainedRun, workers: int) -> RunConfig:
    """The run's config for evaluating an unsharded model on this many workers, with defaults for settings needed only
    in training."""
    config = with_absolute_paths(parts.config)
    derived = run.record.derived if run.record is not None else {}
    size = config.evaluation.micro_size or derived.get("evaluation_micro_batch_size") or config.batch.micro_size
    size = int(size or min(config.batch.global_size, MOST_ROWS))
    untouched = RunConfig.model_validate(
        {
            "workload": config.workload,
            "batch": {"global_size": size * workers, "micro_size": size},
            "optimizer": {"learning_rate": config.optimizer.learning_rate or 1e-3},  # a workload's own may need none
            "stop": {"after": "1 steps"},
        }
    )
    return untouched.changed(
        {
            "evaluation": config.evaluation,
            "evaluation.every": None,
            "evaluation.test": "with_others",
            "evaluation.micro_size": size,
            "scale": config.scale,
            "scale.workers": workers,
            "precision": config.precision,
            "data": config.data,
            "tracking": config.tracking,
            "checkpoint": config.checkpoint,
            **NOTHING_SAVED,
            "fine_tuning": config.fine_tuning if parts.keeps_adapters else FineTuningSettings(),
            "seed": config.seed,
            "deterministic": config.deterministic,
        }
    )


def evaluation_job(config: RunConfig, workload: Any, sources: Mapping[str, Source]) -> TrainJob:
    """Job of a one-step training that only evaluates these sources, which may include `train`."""
    splits = {name: Split.of(name, source, workload) for name, source in sources.items()}
    if streamed := [name for name, split in splits.items() if split.is_streamed]:
        raise DataError(
            f"the {streamed[0]} data",
            "a Ray Dataset",
            "its rows cannot be read by index",
            "write it to files and give --data",
        )
    first = next(iter(sources.values()))
    if first.tokens_per_row is None:  # rows of unequal length are evaluated in their order, some at a time
        config = config.changed({"batch.unit": "samples", "data.bucket_by_length": None})
    recipe = derive(config, DataSize(max(config.batch.global_size, first.num_rows), first.tokens_per_row))
    evaluated = {f"evaluated {name}": split for name, split in splits.items()}  # keys: `train` alone is not evaluated
    splits = {TRAIN: next(iter(splits.values())), **evaluated}
    return TrainJob(config, recipe, workload, splits, steady_time(), is_only_measured=True)


def _sources(parts: ModelParts, data: Any, split: str | None) -> dict[str, Source]:
    if data is not None:
        name = Path(str(data)).stem if isinstance(data, (str, Path)) else ""
        name = "data" if name in ("", TRAIN) else name  # a transform treats the train split in its own way
        fitted = parts.preprocessor
        shape, _ = shape_of(parts.workload, wide=parts.config.precision.dtype == "fp64", fitted=fitted)
        return {name: as_source_of_split(data, shape, parts.workload, split=name, fitted=fitted)}
    sources = load_sources(parts.workload, fitted=parts.preprocessor, in_steps=True)
    if split is not None:
        if split not in sources:
            raise UsageError("--split", split, f"the run has the splits {', '.join(sources)}")
        refuse_endless(sources[split], split)
        return {split: sources[split]}
    others = {name: source for name, source in sources.items() if name != TRAIN}
    if not others:
        raise UsageError.problem(
            "the run", f"has no split to evaluate except {TRAIN}", "give --split train, or --data FILE"
        )
    return others


def _code(parts: ModelParts, run: TrainedRun, given: Any) -> UserCode:
    """Reference to the workload for gloo processes: its name, unless it is given as an object or class."""
    settings, base = parts.config.workload, run.about.get("base_dir")
    name = settings.name if given is None else given if isinstance(given, str) else None
    if parts.weights.workload_state is not None:
        name = None  # the object has it
    return UserCode(name, settings.args, Path(base) if base else None, parts.workload)


def _measured(
    task: Task, sources: Mapping[str, Source], workers: int, *, local: bool, code: UserCode
) -> dict[str, float]:
    config = task.job.config
    if local:
        if workers == 1:
            return evaluate_here(RankContext(), task, sources)
        with gloo_processes(workers, code, timeout_s=config.scale.collective_timeout_s) as processes:
            found: dict[str, float] = processes.run(workers, evaluate_here, task, sources, workload=task.job.workload)
            return found
    import ray

    check_option_fits("--workers", config, cluster.alive_nodes())
    ship_user_code(task.job.workload)
    arguments = (ray.put(task), ray.put(dict(sources)))
    with _place_for_ray_train(config) as (storage, name):
        found = fit_group(config, workers, evaluate_here, arguments, storage_path=storage, name=name)
    return found


def _on_what_is_there(config: RunConfig, *, local: bool, say: Say) -> RunConfig:
    """The config for the available devices, which may differ from the training's."""
    gpus = "auto" if config.scale.gpus and not local else 0
    config = config.changed({"scale.gpus_per_worker": gpus})
    if not local:
        config = with_gpus_decided(config, cluster.alive_nodes(), say=say)
    if config.scale.gpus:
        return config
    return config.changed({"precision": PrecisionSettings(dtype=config.precision.dtype)})  # TF32, float8


@contextlib.contextmanager
def _place_for_ray_train(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Storage path and name of a folder for Ray Train's own files."""
    name = f".evaluate-{secrets.token_hex(4)}"
    try:
        yield config.checkpoint.storage_path, name
    finally:
        with contextlib.suppress(OSError):
            store = Store(config.checkpoint.storage_path)
            for folder in store.names():
                if folder.startswith(name):
                    store.delete_folder(folder)


def _recorded(result: Evaluation, run: TrainedRun) -> Evaluation:
    """Write the result to the run in MLflow. Raises TrackingError."""
    named = {name: f"{SECTION}/{name}" for name in result.metrics}
    result = dataclasses.replace(result, recorded=named)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"{'-'.join(result.rows)}-{time.strftime('%Y%m%d-%H%M%S')}.json")
        file.write_text(result.to_json())
        values = {named[name]: value for name, value in result.metrics.items()}
        add_to_run(run.about, values, step=result.step or 0, files=[file], folder=SECTION)
    return result
