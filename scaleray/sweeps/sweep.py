"""`sweep`: many trainings of one recipe under Ray Tune, and their joint result.

All input is checked before workers start. Only the driver writes records and MLflow; an interrupted sweep continues
with the trials that have no record yet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scaleray.common.options import takes
from scaleray.common.stop_signals import sigterm_like_ctrl_c
from scaleray.config import RunConfig
from scaleray.config.base import absolute_path
from scaleray.config.brought import with_brought
from scaleray.data import TRAIN, load_sources
from scaleray.errors import ConfigError, UsageError
from scaleray.launch.cluster import connection as cluster
from scaleray.launch.cluster import driver_guard
from scaleray.launch.cluster.awaited_nodes import nodes_for
from scaleray.launch.cluster.capacity import check_option_fits
from scaleray.launch.cluster.gpu_workers import with_gpus_decided
from scaleray.launch.session.campaign import check_published
from scaleray.launch.session.conditions import check_same_data
from scaleray.launch.session.config_argument import Config, whole_config
from scaleray.launch.session.experiment import check_policy
from scaleray.launch.session.opened import check_started_once, with_absolute_paths
from scaleray.launch.session.run_folder import RunFolder, unique_name
from scaleray.recording import store
from scaleray.recording.study_runs import key_of
from scaleray.records.run_record import Say
from scaleray.records.start import steady_time
from scaleray.records.sweep_record import SweepRecord
from scaleray.sweeps.guided import check_guided
from scaleray.sweeps.running_sweep import RunningSweep
from scaleray.sweeps.search_space import Settings
from scaleray.sweeps.sweep_folder import AskedSweep, SweepFolder, finished_record, grid_record, read_asked
from scaleray.sweeps.sweep_options import SweepOptions
from scaleray.sweeps.sweep_plan import (
    Material,
    SweepPlan,
    all_args,
    check_question,
    make_material,
    make_plan,
    material_key,
)
from scaleray.sweeps.sweep_question import SweepQuestion, question_of
from scaleray.sweeps.tune import quiet_tune
from scaleray.workload import make_workload


@takes(SweepOptions)
def sweep(
    config: Config | None = None,
    workload: Any = None,
    *,
    options: SweepOptions,
    tracking_uri: str | None = None,
    say: Say = lambda text: None,
    base_dir: Path | None = None,
    command: str = "",
) -> SweepRecord:
    """Train at many batch sizes and learning rates under Ray Tune, and write the report.

    config: a RunConfig, a YAML file, or a mapping of dotted keys or sections; None with `continue_`, as a sweep
    continues with its own config. workload: a class or an object; None loads the config's. tracking_uri: address of
    MLflow, if it differs from the config's. say: called with lines on the progress. base_dir: folder to which relative
    paths of a RunConfig refer. command: command that repeats the sweep, for its record.

    Raises UsageError for invalid input, RunFailedError if all trials failed (the record is still written),
    KeyboardInterrupt if stopped.
    """
    continue_folder = options.continue_
    against = grid_record(options.against_grid) if options.against_grid is not None else None
    if continue_folder is None:
        if config is None:
            raise UsageError.problem("A sweep", "needs a config, or continue_, the folder of an interrupted sweep")
        config, base_dir = whole_config(config, workload, base_dir)
        question = question_of(config, options=options)
    check_started_once(say)
    if continue_folder is not None and (finished := finished_record(absolute_path(continue_folder))) is not None:
        say(f"sweep {finished.name} has already finished; nothing to do")
        return finished
    started_at = steady_time()
    folder: RunFolder | None = None
    before = read_asked(absolute_path(continue_folder)) if continue_folder is not None else None
    if before is not None:
        config, question, command = RunConfig.model_validate(before.config), before.question, before.command
        base_dir = Path(before.base_dir) if before.base_dir else base_dir
    assert isinstance(config, RunConfig)
    config = with_absolute_paths(config)
    _check(config, question)
    tracking_uri = store.resolve_uri(tracking_uri or config.tracking.uri)
    store.check_reachable(tracking_uri)
    check_published(config)
    check_policy(config)
    workloads = _load_workloads(config, question, workload, base_dir)  # before a cluster is started
    for each in workloads.values():
        config = with_brought(config, each)
    try:
        if continue_folder is not None:
            folder = RunFolder.reopen(absolute_path(continue_folder))
        with quiet_tune(), _connected(config, question) as nodes, sigterm_like_ctrl_c():
            config = with_gpus_decided(config, nodes, say=say)
            in_steps = config.is_in_steps
            materials = {key: make_material(w, load_sources(w, in_steps=in_steps)) for key, w in workloads.items()}
            plan, candidates = make_plan(config, question, materials)
            check_option_fits("--workers-per-trial", plan.config(candidates.chosen[0]), nodes)
            if before is not None:
                check_data_of(before, _data_hashes(materials))
                plan = dataclasses.replace(plan, candidates=before.candidates)
            folder = folder or RunFolder.reserve(config, unique_name(f"sweep-{config.workload.stem}"))
            asked = before or _asked(plan, candidates.refused, command, base_dir, started_at)
            files = SweepFolder(folder)
            with (
                driver_guard.guarding(
                    command="scaleray sweep",
                    folder=folder.path,
                    hint=f"scaleray sweep --continue {shlex.quote(folder.path)}",
                    uri=tracking_uri,
                    experiment=config.tracking.experiment,
                    key=key_of(folder.name, asked.started_at),
                ),
                RunningSweep(plan, asked, files, nodes, tracking_uri, say, started_at, against=against) as running,
                running.published(),
            ):
                running.run_all()
                return running.finish()
    finally:
        if folder is not None:
            folder.remove_if_empty()
            folder.unlock()


def _check(config: RunConfig, question: SweepQuestion) -> None:
    check_question(config, question)
    if question.guided_share is not None:
        check_guided(config, question)
    if question.search == "optuna":
        from scaleray.sweeps.optuna_search import import_optuna

        import_optuna()


def _asked(
    plan: SweepPlan, refused: list[tuple[Settings, str]], command: str, base_dir: Path | None, started_at: float
) -> AskedSweep:
    """Describe a new sweep before it has an MLflow run."""
    return AskedSweep(
        config=plan.base.to_dict(),
        question=plan.question,
        candidates=plan.candidates,
        # Optuna may or may not suggest them
        refused=refused if plan.question.search != "optuna" else [],
        command=command,
        base_dir=str(base_dir) if base_dir else None,
        data=_data_hashes(plan.materials),
        started_at=started_at,
        run_id="",
    )


def _load_workloads(config: RunConfig, question: SweepQuestion, given: Any, base_dir: Path | None) -> dict[str, Any]:
    """Load the workload once for each combination of its arguments."""
    workloads = {}
    for args in all_args(config, question.space):
        if given is not None and not isinstance(given, type) and args != dict(config.workload.args):
            raise ConfigError.problem(
                "--vary workload.args",
                "requires a class: the workload is an object with fixed arguments",
                "pass its class",
            )
        workloads[material_key(args)] = make_workload(given, config.workload.name, args, base_dir=base_dir)
    return workloads


def _data_hashes(materials: Mapping[str, Material]) -> dict[str, str | None]:
    return {key: m.sources[TRAIN].describe().get("sha256") for key, m in materials.items()}


def check_data_of(before: AskedSweep, now: Mapping[str, str | None]) -> None:
    """Raise DataError if the training data differs from the data of the interrupted sweep.

    now: SHA-256 of the data, by the workload's arguments.
    """
    for key, digest in before.data.items():
        advice = "continue with the same data, or start a new sweep"
        check_same_data(digest, now.get(key), what="sweep", advice=advice)


@contextlib.contextmanager
def _connected(config: RunConfig, question: SweepQuestion) -> Iterator[list[cluster.Node]]:
    config = config.changed({"scale.workers": question.workers_per_trial})
    with cluster.connected(config):
        yield nodes_for(config, option="--workers-per-trial")
