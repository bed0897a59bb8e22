"""`sweep`: many trainings of one recipe under Ray Tune, and what they say together.

Everything that can be refused is refused before workers start. The driver alone writes records and MLflow; a sweep that
was interrupted goes on with the trials that have no record yet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from scaleray import __version__
from scaleray.config import RunConfig
from scaleray.config.base import absolute_path, without_password
from scaleray.config.changes import training_values
from scaleray.errors import ConfigError, DataError, RunFailedError
from scaleray.launch import cluster
from scaleray.launch.run import load_sources
from scaleray.launch.run_folder import RunFolder
from scaleray.launch.sweep_folder import RECORD_FILE, AskedSweep, SweepFolder, named, read_asked
from scaleray.launch.sweep_plan import (
    PAUSING,
    Material,
    SweepPlan,
    all_args,
    check_keys,
    make_material,
    make_plan,
    material_key,
)
from scaleray.launch.trial_capacity import check_trial_fits, num_concurrent
from scaleray.launch.trial_records import make_trial, trial_line
from scaleray.launch.verify import sigterm_like_ctrl_c
from scaleray.reproducibility.fingerprint import environment, environment_hash
from scaleray.scaling.search_space import Settings
from scaleray.scaling.sweep_question import SweepQuestion
from scaleray.scaling.sweep_result import DIVERGED, FAILED, NOT_STARTED, common_causes, sentences, with_common_target
from scaleray.study_records import Conditions, SweepRecord, Trial
from scaleray.tracking import store
from scaleray.tracking.study_runs import ParentRun
from scaleray.training.job import TRAIN
from scaleray.workload import build_workload, load_workload, user_modules

Say = Callable[[str], None]
WriteReport = Callable[[SweepRecord, Path], list[Path]]
RETRIES = 1  # of a trial whose process was lost
MAX_SHOWN = 50  # lines about trials that never fit
TUNE_ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # a trial's record is ours
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "RAY_AIR_NEW_OUTPUT": "0",  # the new one prints every result, whatever `verbose` says
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",  # the driver says each, once
    "TUNE_GLOBAL_CHECKPOINT_S": "86400",  # a sweep is continued from its own records
}
PENDING_VARIABLE = "TUNE_MAX_PENDING_TRIALS_PG"
FEW_PENDING = "2"  # placement groups that wait; finished trials hand theirs on


def sweep(
    config: RunConfig | None, question: SweepQuestion | None, workload: Any = None, *, continue_folder: str | None = None,
    tracking_uri: str | None = None, command: str = "", say: Say = lambda text: None, base_dir: Path | None = None,
    write_report: WriteReport | None = None,
) -> SweepRecord:  # fmt: skip
    """Run the trials that `question` asks for, each a training of `config` with other settings.

    continue_folder: of an interrupted sweep, whose question and config are then taken. tracking_uri: where MLflow is, if not
    where the config says. command: how to repeat it. write_report: called with the record and a folder, gives the files it wrote. Raises UsageError for what the user can mend, RunFailedError when all trials failed
    (the record is written all the same), KeyboardInterrupt when stopped.
    """
    with opened(
        config, question, workload, continue_folder=continue_folder, tracking_uri=tracking_uri, command=command, say=say,
        base_dir=base_dir,
    ) as running:  # fmt: skip
        if running.finished is not None:
            return running.finished
        running.run_all()
        return running.finish(write_report)


@contextlib.contextmanager
def opened(
    config: RunConfig | None, question: SweepQuestion | None, workload: Any = None, *, continue_folder: str | None = None,
    tracking_uri: str | None = None, command: str = "", say: Say = lambda text: None, base_dir: Path | None = None,
) -> Iterator[RunningSweep]:  # fmt: skip
    """A sweep with its cluster, folder and MLflow run, ready to run trials; ended in order with the context. See `sweep`."""
    started_at = time.time()
    before: AskedSweep | None = None
    folder: RunFolder | None = None
    if continue_folder is not None:
        before = read_asked(absolute_path(continue_folder))
        config, question, command = RunConfig.model_validate(before.config), before.question, before.command
        base_dir = Path(before.base_dir) if before.base_dir else base_dir
    assert config is not None and question is not None
    config = _with_absolute_paths(config)
    check_keys(config, question)
    tracking_uri = store.resolve_uri(tracking_uri or config.tracking.uri)
    store.check_reachable(tracking_uri)
    given = workload
    try:
        if continue_folder is not None:
            folder = RunFolder.reopen(absolute_path(continue_folder))
        with _quiet_tune(), _connected(config, question) as nodes, sigterm_like_ctrl_c():
            materials = _load_materials(config, question, given, base_dir)
            plan, candidates = make_plan(config, question, materials)
            check_trial_fits(plan.config(candidates.chosen[0]), nodes)
            if before is not None:
                _check_same_data(before, _data_hashes(materials))
                plan = dataclasses.replace(plan, candidates=before.candidates)
            folder = folder or RunFolder.reserve(named(config, time.strftime("%Y%m%d-%H%M%S"), secrets.token_hex(2)))
            asked = before or AskedSweep(
                config=config.to_dict(), question=question, candidates=plan.candidates,
                # Optuna meets them, or does not
                refused=candidates.refused if question.search != "optuna" else [],
                command=command, base_dir=str(base_dir) if base_dir else None, data=_data_hashes(materials),
                started_at=started_at, run_id="",
            )  # fmt: skip
            running = RunningSweep(plan, asked, SweepFolder(folder), nodes, tracking_uri, say, started_at)
            with running:
                yield running
    finally:
        if folder is not None:
            folder.remove_if_empty()
            folder.unlock()


class RunningSweep:
    """A sweep between its beginning and its record. finished: the record of a sweep that was complete already."""

    def __init__(
        self, plan: SweepPlan, asked: AskedSweep, files: SweepFolder, nodes: list[cluster.Node], tracking_uri: str,
        say: Say, started_at: float,
    ) -> None:  # fmt: skip
        self.plan, self.asked, self.files, self.nodes, self.say = plan, asked, files, nodes, say
        self.tracking_uri, self.started_at = tracking_uri, started_at
        self.trials: list[Trial] = files.read_trials()
        self.earlier_s = max((t.total_time_s for t in self.trials), default=0.0)
        self.finished = files.read_record() if files.has_record() else None
        self._num_fits = 0
        self._is_recorded = False
        self.run: ParentRun | None = None

    def __enter__(self) -> RunningSweep:
        if self.finished is not None:
            self.say(f"sweep {self.finished.name} is finished already; nothing is left to do")
            return self
        plan, asked = self.plan, self.asked
        config = plan.base
        self.run = ParentRun.open(
            self.tracking_uri, config.tracking.experiment, kind="sweep", name=self.files.folder.name, config=config.to_dict(),
            tags={"scaleray.workload": config.workload.name, "scaleray.config_hash": config.hash()},
            continue_run_id=asked.run_id or None, started_at=asked.started_at,
        )  # fmt: skip
        if not asked.run_id:
            self.asked = dataclasses.replace(asked, run_id=self.run.run_id)
            self.files.write_asked(self.asked)
        for trial in self.trials:
            self.run.log_trial(trial)
        self._announce()
        if not self.trials:
            for number, (settings, reason) in enumerate(self.asked.refused, start=len(plan.candidates)):
                self._keep(make_trial(plan, number, settings, status=NOT_STARTED, error=reason), is_said=False)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self.run is None:
            return
        if error is not None and not self._is_recorded:
            self.run.finish(None, status="KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
            if isinstance(error, KeyboardInterrupt):
                path = without_password(self.files.folder.path)
                self.say(f"to continue: scaleray sweep --continue {path}")
        self._remove_scraps()
        self.files.folder.complete()

    def run_all(self) -> None:
        """Run every trial that has no record yet."""
        done = {trial.number for trial in self.trials}
        if self.plan.question.search == "optuna":
            ran = [t for t in self.trials if t.status != NOT_STARTED]
            self._fit_searched(ran)
            return
        self.run_numbers([n for n in range(len(self.plan.candidates)) if n not in done])

    def run_candidates(self, candidates: list[Settings]) -> list[Trial]:
        """Run more candidates than were planned; gives their trials."""
        first = max([len(self.plan.candidates), *(t.number + 1 for t in self.trials)])
        missing = first - len(self.plan.candidates)
        numbers = list(range(first, first + len(candidates)))
        filled = [*self.plan.candidates, *([{}] * missing), *candidates]
        self.plan = dataclasses.replace(self.plan, candidates=filled)
        self.run_numbers(numbers)
        return [t for t in self.trials if t.number in numbers]

    def run_numbers(self, numbers: list[int]) -> None:
        """Run these of the plan's candidates. Raises KeyboardInterrupt when stopped before all were done."""
        if not numbers:
            return
        from scaleray.launch.sweep_search import listed, make_scheduler

        scheduler = make_scheduler(self.plan, [self.plan.candidates[n] for n in numbers])
        done = self._fit(listed(self.plan, numbers), scheduler, searcher=None, num_samples=1)
        if not done >= set(numbers):
            raise KeyboardInterrupt

    def finish(self, write_report: WriteReport | None = None) -> SweepRecord:
        """Conclude, and write the record and what `write_report` makes of it. Raises RunFailedError when no trial came to a result."""
        assert self.run is not None
        record = self._record()
        started = [t for t in self.trials if t.status != NOT_STARTED]
        all_failed = bool(started) and all(t.status in (FAILED, DIVERGED) for t in started)
        record = self.run.identify(record)
        record = dataclasses.replace(record, folder=without_password(self.files.folder.path))
        self.files.write_record(record)
        work_dir = Path(self.files.folder.work_dir)
        files = [work_dir / RECORD_FILE, *(write_report(record, work_dir) if write_report is not None else [])]
        self._is_recorded = True
        missing = self.run.finish(record, status="FAILED" if all_failed else "FINISHED", files=files)
        if missing:
            self.say(f"warning: {missing}; the record on disk is complete: {record.folder}")
        if all_failed:
            cause, number = common_causes(started)[0]
            raise RunFailedError(
                f"all {len(started)} trials failed, {number} of them like this: {cause}\n  the record: {record.folder}/record.json"
            )
        return record

    # how trials run

    def _fit_searched(self, known: list[Trial]) -> None:
        from scaleray.launch.sweep_search import OptunaSearcher, make_scheduler

        question = self.plan.question
        seeds = question.space.num_seeds
        asked = question.num_trials or 0
        left = asked - len(known) // seeds
        if left <= 0:
            return
        first = max((t.number + 1 for t in self.trials), default=0)
        searcher = OptunaSearcher(
            self.plan, num_trials=left, first_number=first, known=[(t.settings, t.value) for t in known]
        )
        scheduler = make_scheduler(self.plan, self.plan.candidates)
        done = self._fit({}, scheduler, searcher=searcher, num_samples=left * seeds)
        for settings, reason in searcher.refused.values():
            number = max((t.number + 1 for t in self.trials), default=0)
            self._keep(make_trial(self.plan, number, settings, status=NOT_STARTED, error=reason), is_said=False)
        if len(done) < left * seeds:
            if searcher.left > 0 and not searcher.has_running:
                self.say(f"the space gave {len(done)} trials that can run")
                return
            raise KeyboardInterrupt

    def _fit(self, space: dict[str, Any], scheduler: Any, *, searcher: Any, num_samples: int) -> set[int]:
        """Run one Tune experiment; gives the numbers of trials that ended."""
        import ray
        from ray import cloudpickle, tune
        from ray.tune.execution.placement_groups import PlacementGroupFactory

        from scaleray.launch.sweep_trial import VALUE, SharedPlan, SweepTrial
        from scaleray.launch.trainer import worker_resources
        from scaleray.launch.trial_collector import TrialCollector

        plan, scale = self.plan, self.plan.base.scale
        for material in plan.materials.values():
            for module in user_modules(material.workload):
                cloudpickle.register_pickle_by_value(module)
        shipped = dataclasses.replace(plan, materials={key: _shipped(m) for key, m in plan.materials.items()})
        shared = SharedPlan(
            shipped, pauses=plan.question.scheduler != "fifo", state_path=f"{self.files.folder.path}/states"
        )
        labels = {"bundle_label_selector": [dict(scale.label_selector)] * plan.workers} if scale.label_selector else {}
        resources = PlacementGroupFactory(
            [worker_resources(plan.base)] * plan.workers, strategy=scale.placement, **labels
        )
        trainable = tune.with_resources(tune.with_parameters(SweepTrial, shared=[ray.put(shared)]), resources)
        collector = TrialCollector(plan, self._keep)
        pauses = plan.question.scheduler in PAUSING
        self._num_fits += 1
        tuner = tune.Tuner(
            trainable,
            param_space=space,
            tune_config=tune.TuneConfig(
                metric=None if searcher is not None else VALUE, mode=None if searcher is not None else plan.direction,
                scheduler=scheduler, search_alg=searcher, num_samples=num_samples, reuse_actors=True,
                # trials that are set aside count as running: with a limit they would wait for each other for ever
                max_concurrent_trials=None if pauses else num_concurrent(plan.config(plan.candidates[0]), self.nodes),
                trial_name_creator=_trial_name, trial_dirname_creator=_trial_name,
            ),
            run_config=tune.RunConfig(
                name=f"tune-{self._num_fits}-{secrets.token_hex(2)}", storage_path=f"{self.files.folder.path}/ray_tune",
                callbacks=[collector], verbose=0, failure_config=tune.FailureConfig(max_failures=RETRIES),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            ),
        )  # fmt: skip
        with _pending(None if pauses else FEW_PENDING):
            tuner.fit()
        return collector.done

    def _keep(self, trial: Trial, *, is_said: bool = True) -> None:
        """A trial has its record: on disk first, then in MLflow, then on the terminal."""
        assert self.run is not None
        self.files.write_trial(trial)
        self.trials = sorted([*self.trials, trial], key=lambda t: t.number)
        self.run.log_trial(trial)
        if is_said:
            num_started = sum(t.status != NOT_STARTED for t in self.trials)
            self.say(trial_line(trial, num_started, self._num_planned()))

    def _num_planned(self) -> int:
        question = self.plan.question
        if question.search == "optuna":
            return (question.num_trials or 0) * question.space.num_seeds
        return len(self.plan.candidates)

    # words

    def _announce(self) -> None:
        plan, question = self.plan, self.plan.question
        done = sum(t.status != NOT_STARTED for t in self.trials)
        start = (
            f"continuing sweep {self.files.folder.name}, {done} trials are done"
            if self.trials
            else f"sweep {self.files.folder.name}"
        )
        workers = f"{plan.workers} worker{'s' if plan.workers > 1 else ''} each"
        fit = num_concurrent(plan.config(plan.candidates[0]), self.nodes)
        self.say(f"{start}: {plan.base.workload.name}")
        self.say(
            f"  {self._num_planned()} trials ({question.search}, {question.scheduler}), {workers}, up to {fit} at a time, "
            f"judged by {plan.metric} ({plan.direction})"
        )
        if fit > 1:
            self.say(
                "  trials beside each other share the machine: their times compare with each other, not with a run alone"
            )
        causes = Counter(reason.splitlines()[0] for _, reason in self.asked.refused)
        for cause, number in causes.most_common(MAX_SHOWN):
            self.say(f"  not started: {number} combination{'s' if number > 1 else ''}, as {cause}")
        asked = question.num_trials
        if (
            asked is not None
            and question.search == "random"
            and asked * question.space.num_seeds > len(plan.candidates)
        ):
            num = len(plan.candidates) // question.space.num_seeds
            self.say(f"  --trials is {asked}; there are {num} combinations that can run, and each runs once")

    def _record(self) -> SweepRecord:
        plan, config = self.plan, self.plan.base
        facts = environment()
        nodes = cluster.topology(self.nodes)
        record = SweepRecord(
            name=self.files.folder.name, command=self.asked.command, config=config.to_dict(),
            conditions=Conditions(
                config_hash=_hash(training_values(config.to_dict())),
                code_hash=_hash([__version__, facts.get("git"), config.workload.name]),
                environment_hash=environment_hash({"environment": facts}), topology_hash=_hash(nodes),
                environment=facts, topology={"nodes": nodes, "workers_per_trial": plan.workers},
            ),
            metric=plan.metric, direction=plan.direction,
            target=str(config.stop.at) if config.stop.at is not None else None,
            scheduler=plan.question.scheduler, search=plan.question.search, trials=self.trials,
            started_at=self.asked.started_at, duration_s=time.time() - self.started_at,
            folder=without_password(self.files.folder.path),
        )  # fmt: skip
        compared = with_common_target(record)
        words = sentences(
            compared, has_own_target=config.stop.at is not None, reference_batch_size=plan.reference_batch_size
        )
        return dataclasses.replace(compared, words=words)

    def _remove_scraps(self) -> None:
        """Tune's own files and the states of trials, which nothing reads any more."""
        import pyarrow.fs

        for name in ("ray_tune", "states"):
            with contextlib.suppress(Exception):
                filesystem, inner = pyarrow.fs.FileSystem.from_uri(f"{self.files.folder.path}/{name}")
                filesystem.delete_dir(inner)


def _load_materials(
    config: RunConfig, question: SweepQuestion, given: Any, base_dir: Path | None
) -> dict[str, Material]:  # fmt: skip
    materials = {}
    for args in all_args(config, question.space):
        if given is None:
            workload = load_workload(config.workload.name, args, base_dir=base_dir)
        elif isinstance(given, type):
            workload = build_workload(given, args, name=given.__name__)
        elif args == dict(config.workload.args):
            workload = given
        else:
            raise ConfigError(
                "--vary", "workload.args", "the workload is an object that exists already", "give its class"
            )
        materials[material_key(args)] = make_material(workload, load_sources(workload))
    return materials


def _shipped(material: Material) -> Material:
    """The material as it travels: the workload as bytes, of which every trial makes its own, and references to the data."""
    import ray
    from ray import cloudpickle

    references = {name: ray.put(source) for name, source in material.sources.items()}
    return dataclasses.replace(material, workload=cloudpickle.dumps(material.workload), sources=references)


def _data_hashes(materials: Mapping[str, Material]) -> dict[str, str | None]:
    return {key: m.sources[TRAIN].describe().get("sha256") for key, m in materials.items()}


def _check_same_data(before: AskedSweep, now: Mapping[str, str | None]) -> None:
    for key, digest in before.data.items():
        other = now.get(key)
        if digest and other and digest != other:
            raise DataError(
                "the training data", f"SHA-256 {other[:16]}...", f"the interrupted sweep read other data, {digest[:16]}...",
                "continue with the same data, or start a new sweep",
            )  # fmt: skip


@contextlib.contextmanager
def _connected(config: RunConfig, question: SweepQuestion) -> Iterator[list[cluster.Node]]:
    workers = config.scale.model_copy(update={"workers": question.workers_per_trial})
    with cluster.connected(config.model_copy(update={"scale": workers})):
        yield cluster.alive_nodes()


@contextlib.contextmanager
def _quiet_tune() -> Iterator[None]:
    """Tune's settings of this process, as they were afterwards."""
    before = {name: os.environ.get(name) for name in TUNE_ENVIRONMENT}
    os.environ |= TUNE_ENVIRONMENT
    loggers = {name: logging.getLogger(name) for name in ("ray.tune", "ray.train", "ray.air")}
    levels = {name: logger.level for name, logger in loggers.items()}
    for logger in loggers.values():
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        _restore(before)
        for name, logger in loggers.items():
            logger.setLevel(levels[name])


@contextlib.contextmanager
def _pending(number: str | None) -> Iterator[None]:
    before = {PENDING_VARIABLE: os.environ.get(PENDING_VARIABLE)}
    if number is not None:
        os.environ[PENDING_VARIABLE] = number
    try:
        yield
    finally:
        _restore(before)


def _restore(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    storage = {"storage_path": absolute_path(config.checkpoint.storage_path)}
    weights = absolute_path(config.workload.weights) if config.workload.weights is not None else None
    return config.model_copy(
        update={
            "checkpoint": config.checkpoint.model_copy(update=storage),
            "workload": config.workload.model_copy(update={"weights": weights}),
        }
    )


def _trial_name(trial: Any) -> str:
    return f"trial-{trial.trial_id}"


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
