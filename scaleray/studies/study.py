"""`study`: measure how a training scales. Plans the sizes, measures unknown ones, and draws conclusions. Measurements
are stored immediately, so the same command continues an interrupted study."""

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
from scaleray.config.brought import with_brought
from scaleray.data import RaySources, load_sources
from scaleray.data.source_interface import Source
from scaleray.errors import ConfigError, first_line
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
from scaleray.records.study_record import StudyRecord
from scaleray.studies import noise as study_noise
from scaleray.studies.hardware import (
    check_one_kind,
    find_room,
    launch_config,
    nodes_of,
    num_cores,
    topology_of,
    workers_per_node,
)
from scaleray.studies.measure_sizes import OnResult, StudySize, measure_sizes
from scaleray.studies.running_study import RunningStudy
from scaleray.studies.study_options import StudyOptions
from scaleray.studies.study_sizes import make_study_sizes


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
                hint="the same command; finished measurements are kept",
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
            f"{folder} has no record of a study: {first_line(exc)}",
            "name the folder of a finished study",
        ) from exc
