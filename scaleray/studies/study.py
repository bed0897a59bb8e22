"""`study`: measure how a training scales. Plans the sizes, measures the unknown ones, and draws conclusions.
Measurements are stored immediately, so the same command continues an interrupted study."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from scaleray.common.options import takes
from scaleray.common.progress import stage
from scaleray.common.stop_signals import sigterm_like_ctrl_c
from scaleray.config import RunConfig
from scaleray.config.base import Duration
from scaleray.config.brought import with_brought
from scaleray.config.compression import CompressionSettings
from scaleray.config.recipe.derive import derive
from scaleray.config.recipe.values import nearest_multiples
from scaleray.config.strategy import SharesSettings
from scaleray.config.strategy_traits import traits_of
from scaleray.data import TRAIN, RaySources, Split, load_sources
from scaleray.data.source_interface import Source
from scaleray.errors import ConfigError, DataError, first_line
from scaleray.launch.cluster import driver_guard
from scaleray.launch.cluster.connection import input_cpus
from scaleray.launch.cluster.gpu_workers import with_gpus_decided
from scaleray.launch.session.campaign import check_published
from scaleray.launch.session.conditions import check_same, conditions_of
from scaleray.launch.session.config_argument import Config, resolved
from scaleray.launch.session.experiment import check_policy
from scaleray.launch.session.opened import (
    check_learning_rate,
    check_local,
    check_started_once,
    connected_unless,
    own_folder,
    with_absolute_paths,
)
from scaleray.launch.workers.gloo import TELL, UserCode, gloo_processes
from scaleray.launch.workers.loaded_workload import ship_user_code
from scaleray.launch.workers.ray_train import fit_group
from scaleray.launch.workers.telling import handing_over
from scaleray.recording import store
from scaleray.recording.study_runs import key_of
from scaleray.records.run_record import Say
from scaleray.records.start import steady_time
from scaleray.records.study_record import Mode, StudyRecord
from scaleray.studies import noise as study_noise
from scaleray.studies.hardware import (
    OVERSUBSCRIBED,
    RELAUNCHED,
    check_one_kind,
    find_room,
    launch_config,
    nodes_of,
    num_cores,
    topology_of,
    workers_per_node,
)
from scaleray.studies.measure_sizes import OnResult, StudySize, measure_sizes
from scaleray.studies.noise import source_of
from scaleray.studies.running_study import RunningStudy
from scaleray.studies.study_options import MODES, StudyOptions
from scaleray.training.setup.job import TrainJob


def make_study_sizes(
    config: RunConfig, options: StudyOptions, workload: Any, sources: Mapping[str, Source], *, cores: int | None = None
) -> dict[str, StudySize]:
    """Every size with its recipe, by name, in the order of the curves. cores: number of cores that workers share if
    they have no devices; None: no size is marked. Raises UsageError for sizes that do not divide or options that
    conflict."""
    splits = {name: Split.of(name, source, workload) for name, source in sources.items()}
    _check(config, options, splits)
    study_sizes: dict[str, StudySize] = {}
    for mode in MODES:
        for workers in options.sizes if mode in options.modes else ():
            global_size = _global_size(config, mode, workers, options)
            is_as_given = global_size == config.batch.global_size
            spread = on_workers(config, workers, global_size, as_given=is_as_given or options.to_target)
            try:
                recipe = derive(spread, splits[TRAIN].size)
            except DataError as exc:
                if mode == "strong" or workers == options.sizes[0]:
                    raise
                # what is advised for a training's own batch would be multiplied by the number of workers here
                raise DataError(
                    "--world-sizes",
                    workers,
                    f"with --mode weak, {first_line(exc).rstrip('.')}",
                    "omit the size, or begin with a smaller batch.global_size",
                ) from exc
            job = TrainJob(spread, recipe, workload, splits, steady_time())
            name = f"w{workers:03d}-b{recipe.global_batch_size}-m{recipe.micro_batch_size}-{recipe.strategy}"
            name += "-relaunched" if options.relaunch else ""
            if name in study_sizes:
                study_sizes[name].modes.append(mode)
                continue
            is_crowded = cores is not None and not config.scale.gpus and workers > cores
            study_sizes[name] = StudySize(
                name=name,
                workers=workers,
                modes=[mode],
                job=job,
                num_turns=options.repeats,
                steps=options.steps,
                seconds=options.seconds,
                # occasional averagings count for every step
                period=spread.local_sgd.sync_every if traits_of(recipe.strategy).averages_now_and_then else 1,
                trains_to_target=options.to_target,
                measures_noise=source_of(job).name is not None,
                marks=[OVERSUBSCRIBED] * is_crowded + [RELAUNCHED] * options.relaunch,
            )
    return study_sizes


def on_workers(config: RunConfig, workers: int, global_size: int, *, as_given: bool) -> RunConfig:
    """Config of the training on this many workers with this global batch (in the config's unit).

    as_given: apply the learning-rate rule. Timing does not need it, so a rule that refuses the batch must not stop a
    study."""
    settings: dict[str, Any] = {"scale.workers": workers, "scale.max_failures": 0, "batch.global_size": global_size}
    if workers == 1:
        settings |= {"compression": CompressionSettings(), "shares": SharesSettings()}  # one process sends nothing
    if not as_given:
        settings |= {"optimizer.rule": "none", "schedule.warmup": Duration(0, "steps"), "schedule.length": None}
    return config.changed(settings)


def _check(config: RunConfig, options: StudyOptions, splits: Mapping[str, Split]) -> None:
    if splits[TRAIN].is_streamed:
        raise DataError(
            "the train data",
            "a Ray Dataset",
            "it is split once for a fixed number of workers, while every measurement needs its own split",
            "study rows that can be read by index: arrays, ParquetSource, TokenSource or a torch Dataset",
        )
    if config.memory.find_micro_size:
        raise ConfigError(
            "memory.find_micro_size",
            True,
            "every measurement would search again, and sizes with different micro-batches cannot form a curve",
            "set batch.micro_size to the result of a training on the smallest size, and omit memory.find_micro_size",
        )
    _check_shares(config, options)
    if options.to_target and config.stop.at is None:
        raise ConfigError(
            "stop.at",
            None,
            "--to-target needs a target to train to",
            "for example --stop.at 'val/loss <= 1.0' --evaluation.every '1 epoch'",
        )
    most = max(options.sizes)
    if config.scale.gpus and config.scale.gpus < 1 and most > 1:
        raise ConfigError("scale.gpus_per_worker", config.scale.gpus, "each of several workers needs a GPU")


def _check_shares(config: RunConfig, options: StudyOptions) -> None:
    if config.shares.by == "speed":
        raise ConfigError(
            "shares.by",
            "speed",
            "measurements end before shares settle, and each would settle on different shares",
            "use equal shares, or those of a training: shares.by given with shares.speeds",
        )
    speeds = config.shares.speeds
    if speeds is not None and (other := [n for n in options.sizes if n not in (1, len(speeds))]):
        raise ConfigError(
            "shares.speeds",
            list(speeds),
            f"{other[0]} workers need {other[0]} speeds",
            f"measure 1 and {len(speeds)} workers, or use equal shares",
        )


def _global_size(config: RunConfig, mode: Mode, workers: int, options: StudyOptions) -> int:
    size, base = config.batch.global_size, options.sizes[0]
    if mode == "strong":
        return size
    if size * workers % base:
        near = " or ".join(str(n) for n in nearest_multiples(size, base))
        raise ConfigError(
            "batch.global_size",
            size,
            f"weak scaling from {base} workers needs a multiple of {base}",
            f"nearest: {near}",
        )
    return size * workers // base


def measure_in_processes(
    code: UserCode,
    path: str,
    study_sizes: Sequence[StudySize],
    seed: int,
    tell: OnResult,
    config: RunConfig,
    sources: Mapping[str, Source],
) -> None:
    """Measure the sizes in gloo processes on this machine. path: the study's folder. Re-raises an error of a worker."""
    size, workload = max(one.workers for one in study_sizes), study_sizes[0].job.workload
    with gloo_processes(size, code, timeout_s=config.scale.collective_timeout_s, watched_in=path) as processes:
        processes.run(size, measure_sizes, study_sizes, seed, TELL, sources, workload=workload, on_message=tell)


def measure_under_ray(
    storage_path: str,
    study_sizes: Sequence[StudySize],
    seed: int,
    tell: OnResult,
    config: RunConfig,
    sources: Mapping[str, Source],
) -> None:
    """Measure the sizes with Ray Train workers. storage_path: for Ray Train's own files. Raises a worker's error."""
    import ray

    ship_user_code(study_sizes[0].job.workload)
    stored = RaySources({name: ray.put(source) for name, source in sources.items()}, input_cpus(config))
    size, name = max(one.workers for one in study_sizes), f"ray_study_{study_sizes[0].name}"
    with handing_over(tell) as put:
        fit_group(config, size, measure_sizes, (study_sizes, seed, put, stored), storage_path=storage_path, name=name)


@takes(StudyOptions)
def study(
    config: Config,
    workload: Any = None,
    *,
    options: StudyOptions,
    say: Say = lambda text: None,
    base_dir: Path | None = None,
    command: str = "",
) -> StudyRecord:
    """Measure the training on several numbers of workers, and write the report.

    config: a RunConfig, a YAML file, or a mapping of dotted keys or sections. workload: a class or an object; None
    loads the config's. say: called with lines on the progress. base_dir: folder to which a RunConfig's paths are
    relative. command: command that repeats the study, for its record.

    Raises UsageError for errors of use, RunFailedError if a worker failed, KeyboardInterrupt when stopped."""
    config, base_dir, workload = resolved(config, workload, base_dir)
    local = options.local
    started_at = steady_time()
    check_started_once(say)
    config = with_absolute_paths(study_noise.with_noise(config) if options.noise else config)
    store.check_reachable(store.resolve_uri(config.tracking.uri))
    check_published(config)
    check_policy(config)
    if local:
        check_local(config)
    more = [_read(folder) for folder in options.points_of]
    code = UserCode(config.workload.name if workload is None else None, config.workload.args, base_dir, workload)
    workload = code.load()
    config = with_brought(config, workload)
    check_learning_rate(config, workload)
    with connected_unless(config, local=local):
        nodes = None if local else nodes_of(config, options.sizes, workload, oversubscribe=options.oversubscribe)
        config = with_gpus_decided(config, nodes if nodes is not None else [], say=say)
        sources = load_sources(workload, in_steps=config.is_in_steps)
        room = find_room(config, options.sizes, workload, nodes, oversubscribe=options.oversubscribe)
        options = dataclasses.replace(options, world_sizes=room.sizes)
        study_sizes = make_study_sizes(config, options, workload, sources, cores=num_cores(nodes))
        spread = launch_config(config, room, nodes)
        conditions = conditions_of(config, workload, topology_of(config, nodes))
        for other in more:
            check_same(conditions, other.conditions, whose=other.name, configs=(config.to_dict(), other.config))
        with (
            own_folder(config, "study", started_at) as folder,
            sigterm_like_ctrl_c(),
            driver_guard.guarding(
                command="scaleray study",
                folder=folder.path,
                hint="the same command; finished measurements are stored",
                uri=store.resolve_uri(config.tracking.uri),
                experiment=config.tracking.experiment,
                key=key_of(folder.name, started_at),
            ),
        ):
            running = RunningStudy(
                config=config,
                options=options,
                study_sizes=study_sizes,
                sources=sources,
                conditions=conditions,
                folder=folder,
                say=say,
                command=command,
                started_at=started_at,
                workers_per_node=workers_per_node(config, nodes),
                left_out=room.left_out,
                more=more,
            )
            measure = (
                partial(measure_in_processes, code, folder.path) if local else partial(measure_under_ray, folder.path)
            )
            with running.kept_to_its_end():
                running.open()
                with running.published() as running.metrics:
                    record = _measured(running, measure, spread)
                    with stage("writing the report"):
                        return running.write(record)


def _measured(running: RunningStudy, measure: Callable[..., None], spread: RunConfig) -> StudyRecord:
    """Take the missing measurements and draw conclusions. measure: measures a group of sizes, given the config of its
    workers."""
    with running.kept_to_its_end():
        groups = running.begin()
        with (
            stage("measuring", total=running.total, unit="measurements") as running.under_way,
            running.shown_in_its_folder(),
        ):
            for group in groups:
                measure(group, running.options.seed, running.keep, spread, running.sources)
                check_one_kind(running.study_sizes.values())
        with stage("computing the conclusions"):
            running.count_for_planner()
            return running.record()


def _read(folder: str) -> StudyRecord:
    path = Path(folder, "record.json") if Path(folder).is_dir() else Path(folder)
    try:
        return StudyRecord.read(path)
    except (OSError, ValueError) as exc:  # pydantic's errors are ValueErrors
        raise ConfigError.problem(
            "--points-of",
            f"{folder} does not contain the record of a study: {first_line(exc)}",
            "name the folder of a finished study",
        ) from exc
