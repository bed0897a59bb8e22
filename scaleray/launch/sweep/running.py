"""A sweep under way: its trials run, each is kept on disk and in MLflow as it ends, and the record is made of all."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

from scaleray.config.base import without_password
from scaleray.config.idle_settings import used_settings
from scaleray.data import TRAIN
from scaleray.errors import MARKED_KILLED, RunFailedError
from scaleray.launch.cluster import connection as cluster
from scaleray.launch.cluster.capacity import num_concurrent
from scaleray.launch.session.conditions import conditions_of
from scaleray.launch.session.experiment import experiment_tags
from scaleray.launch.session.measured import published_while
from scaleray.launch.sweep.folder import RECORD_FILE, AskedSweep, SweepFolder
from scaleray.launch.sweep.guided import GuidedTrials
from scaleray.launch.sweep.plan import SweepPlan
from scaleray.launch.sweep.same_trainings import SameTrainings, counted_for, trained_by_key, training_key
from scaleray.launch.sweep.trial_records import make_trial, trial_line
from scaleray.launch.sweep.tune import remove_scraps, run_experiment
from scaleray.monitoring.live.measured_series import Measured
from scaleray.progress import Stage, stage
from scaleray.records.printed import quantity
from scaleray.records.run import Say
from scaleray.records.start import steady_time
from scaleray.records.sweep import SweepRecord, Trial
from scaleray.reproducibility.fingerprint import environment
from scaleray.scaling.sweeps.result import DIVERGED, FAILED, NOT_STARTED, common_causes, sentences, with_common_target
from scaleray.tracking.live_stage import written_while
from scaleray.tracking.measured_metrics import MeasuredMetrics
from scaleray.tracking.provenance import dataset, source_tags
from scaleray.tracking.study_runs import ParentRun

MAX_SHOWN = 50  # lines about trials that never fit


class RunningSweep:
    """A sweep between its beginning and its record: runs candidates, keeps each trial's record, and concludes.

    against: the record of the whole grid, for a guided sweep.
    """

    def __init__(
        self,
        plan: SweepPlan,
        asked: AskedSweep,
        files: SweepFolder,
        nodes: list[cluster.Node],
        tracking_uri: str,
        say: Say,
        started_at: float,
        *,
        against: SweepRecord | None = None,
    ) -> None:
        self.same = SameTrainings(plan)
        share = plan.question.guided_share
        self.guided = GuidedTrials(plan, share=share, against=against) if share is not None else None
        plan = self.guided.measured_plan() if self.guided is not None else plan
        self.plan, self.asked, self.files, self.nodes, self.say = plan, asked, files, nodes, say
        self.tracking_uri, self.started_at = tracking_uri, started_at
        self.trials: list[Trial] = files.read_trials()
        self._is_recorded = False
        self.running = Stage("trials")
        self.run: ParentRun | None = None

    def __enter__(self) -> RunningSweep:
        plan, asked = self.plan, self.asked
        config = plan.base
        self.run = ParentRun.open(
            self.tracking_uri,
            config.tracking.experiment,
            kind="sweep",
            name=self.files.folder.name,
            config=used_settings(config, config.strategy.name),
            tags=self._tags(),
            datasets=[
                dataset(name, source.describe(), workload=config.workload.name)
                for name, source in next(iter(plan.materials.values())).sources.items()
            ],
            continue_run_id=asked.run_id or None,
            started_at=asked.started_at,
        )
        if not asked.run_id:
            self.asked = dataclasses.replace(asked, run_id=self.run.run_id)
            self.files.write_asked(self.asked)
        for trial in self.trials:
            self.run.log_trial(trial)
        self._announce()
        for trial in list(self.trials):  # the sweep was interrupted before the record of another name
            self._count_for_others(trial)
        if not self.trials:
            for number, (settings, reason) in enumerate(self.asked.refused, start=len(plan.candidates)):
                self._keep(make_trial(plan, number, settings, status=NOT_STARTED, error=reason), is_said=False)
        return self

    def _tags(self) -> dict[str, str]:
        config, facts = self.plan.base, environment()
        return {
            "scaleray.config_hash": config.hash(),
            **source_tags(config.workload.name, facts["git"]),
            **experiment_tags(
                config,
                environment=facts,
                nodes=cluster.topology(self.nodes),
                data=next(iter(self.plan.materials.values())).sources[TRAIN].describe(),
                workers=self.plan.question.workers_per_trial,
            ),
        }

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self.run is None:
            return
        if error is not None and not self._is_recorded:
            self.run.finish(None, status="KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
            if isinstance(error, KeyboardInterrupt):
                path = without_password(self.files.folder.path)
                self.say(f"to continue: scaleray sweep --continue {path}")
                error.args = (MARKED_KILLED,)
        remove_scraps(self.files.folder.path)
        self.files.folder.complete()

    def run_all(self) -> None:
        """Run every trial that has no record yet, or those that a guided sweep chooses."""
        if self.guided is not None:
            self.guided.run(lambda: self.trials, self.run_numbers, self.say)
            return
        done = {trial.number for trial in self.trials}
        if self.plan.question.search == "optuna":
            self._fit_searched([t for t in self.trials if t.status != NOT_STARTED])
            return
        self.run_numbers([n for n in range(len(self.plan.candidates)) if n not in done])

    def run_numbers(self, numbers: list[int]) -> None:
        """Run these of the plan's candidates, each training once.

        Raises KeyboardInterrupt when stopped before all were done.
        """
        numbers = self.same.to_train(numbers, self.trials)
        if not numbers:
            return
        from scaleray.launch.sweep.search import listed, make_scheduler

        scheduler = make_scheduler(self.plan, [self.plan.candidates[n] for n in numbers])
        done = self._fit(space=listed(self.plan, numbers), scheduler=scheduler)
        if not done >= set(numbers):
            raise KeyboardInterrupt

    def finish(self) -> SweepRecord:
        """Conclude, and write the record and the report.

        Raises RunFailedError when no trial came to a result.
        """
        from scaleray.reports.records.sweep import write_sweep_report  # it imports matplotlib

        assert self.run is not None
        record = self._record()
        started = [t for t in self.trials if t.status != NOT_STARTED]
        all_failed = bool(started) and all(t.status in (FAILED, DIVERGED) for t in started)
        record = self.run.identify(record)
        record = dataclasses.replace(record, folder=without_password(self.files.folder.path))
        self.files.write_record(record)
        work_dir = Path(self.files.folder.work_dir)
        files = [work_dir / RECORD_FILE, *write_sweep_report(record, work_dir)]
        self._is_recorded = True
        missing = self.run.finish(record, status="FAILED" if all_failed else "FINISHED", files=files)
        if missing:
            self.say(f"warning: {missing}; the record on disk is complete: {record.folder}")
        if all_failed:
            cause, number = common_causes(started)[0]
            raise RunFailedError(
                f"all {len(started)} trials failed, {number} of them like this: {cause}\n"
                f"  the record: {record.folder}/record.json"
            )
        return record

    # how trials run

    def _fit_searched(self, known: list[Trial]) -> None:
        from scaleray.launch.sweep.search import OptunaSearcher, make_scheduler

        question = self.plan.question
        seeds = question.space.num_seeds
        asked = question.num_trials or 0
        left = asked - sum(trial.same_as is None for trial in known) // seeds
        if left <= 0:
            return
        searcher = OptunaSearcher(
            self.plan, num_trials=left, first_number=self._next_number(), known=[(t.settings, t.value) for t in known]
        )
        scheduler = make_scheduler(self.plan, self.plan.candidates)
        done = self._fit(space={}, scheduler=scheduler, searcher=searcher, num_samples=left * seeds)
        trained = trained_by_key(self.plan, self.trials)
        for settings in searcher.same:
            if (trial := trained.get(training_key(self.plan, settings))) is not None:
                self._keep(counted_for(self.plan, trial, self._next_number(), settings))
        for settings, reason in searcher.refused.values():
            number = self._next_number()
            self._keep(make_trial(self.plan, number, settings, status=NOT_STARTED, error=reason), is_said=False)
        if len(done) < left * seeds:
            if searcher.left > 0 and not searcher.has_running:
                self.say(f"the space gave {len(done)} trials that can run")
                return
            raise KeyboardInterrupt

    def _fit(self, **options: Any) -> set[int]:
        folder, asked = self.files.folder, self.asked
        before = sum(trial.status != NOT_STARTED for trial in self.trials)
        with (
            stage("trials", total=self._num_planned(), unit="trials", before=before) as self.running,
            written_while(
                lambda: self.running,
                Path(folder.work_dir),
                kind="sweep",
                name=folder.name,
                run_id=asked.run_id,
                started_at=asked.started_at,
            ),
        ):
            return run_experiment(self.plan, self.nodes, folder=folder.path, on_trial=self._keep, **options)

    def published(self) -> contextlib.AbstractContextManager[MeasuredMetrics]:
        """Context in which Prometheus finds the trials that have ended, and the sweep is judged."""
        assert self.run is not None
        return published_while(self._measured, self.plan.base, folder=self.files.folder, parent=self.run, say=self.say)

    def _measured(self) -> Measured:
        now, config = self.running, self.plan.base
        return Measured(
            "sweep", now.done, now.total, trials=self.trials, workers=self.plan.workers, strategy=config.strategy.name
        )

    def _keep(self, trial: Trial, *, is_said: bool = True) -> None:
        """Keep a trial's record: on disk first, then in MLflow, then on the terminal."""
        assert self.run is not None
        self.files.write_trial(trial)
        self.trials = sorted([*self.trials, trial], key=lambda t: t.number)
        self.run.log_trial(trial)
        self.running.advance()
        if is_said:
            num_started = sum(t.status != NOT_STARTED for t in self.trials)
            self.say(trial_line(trial, num_started, self._num_planned()))
        self._count_for_others(trial)

    def _count_for_others(self, trial: Trial) -> None:
        for other in self.same.counted(trial, self.trials):
            self._keep(other)

    def _next_number(self) -> int:
        return max((t.number + 1 for t in self.trials), default=0)

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
        workers = f"{quantity(plan.workers, 'worker')} each"
        fit = num_concurrent(plan.config(plan.candidates[0]), self.nodes)
        self.say(f"{start}: {plan.base.workload.name}")
        planned = self._num_planned()
        self.say(
            f"  {quantity(planned, 'trial')} ({question.search}, {question.scheduler}), {workers}, "
            f"up to {fit} at a time, "
            f"judged by {plan.metric} ({plan.direction})"
        )
        if question.guided_share is not None:
            self.say(
                f"  guided: of these, those that are worth it, for at most {question.guided_share:.0%} of their samples"
            )
        if self.same.num_shared:
            self.say(
                f"  {self.same.num_shared} of them are the same training as another, "
                "such as under every rule at the reference batch: "
                "each training runs once and counts for all"
            )
        if fit > 1:
            self.say(
                "  trials beside each other share the machine: "
                "their times compare with each other, not with a run alone"
            )
        causes = Counter(reason.splitlines()[0] for _, reason in self.asked.refused)
        for cause, number in causes.most_common(MAX_SHOWN):
            self.say(f"  not started: {quantity(number, 'combination')}, as {cause}")
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
        workload = next(iter(plan.materials.values())).workload
        topology = {"nodes": cluster.topology(self.nodes), "workers_per_trial": plan.workers}
        record = SweepRecord(
            name=self.files.folder.name,
            command=self.asked.command,
            config=config.to_dict(),
            conditions=conditions_of(config, workload, topology),
            metric=plan.metric,
            direction=plan.direction,
            target=str(config.stop.at) if config.stop.at is not None else None,
            scheduler=plan.question.scheduler,
            search=plan.question.search,
            trials=self.trials,
            started_at=self.asked.started_at,
            duration_s=steady_time() - self.started_at,
            folder=without_password(self.files.folder.path),
        )
        compared = with_common_target(record)
        words = sentences(
            compared,
            has_own_target=config.stop.at is not None,
            reference_batch_size=compared.reference_batch_size or plan.reference_batch_size,
        )
        record = dataclasses.replace(compared, words=words)
        return self.guided.conclude(record) if self.guided is not None else record
