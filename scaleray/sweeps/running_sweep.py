"""A running sweep, which runs its trials, stores each on disk and in MLflow as it ends, and makes the final record."""

from __future__ import annotations

import dataclasses
import shlex
from collections import Counter
from typing import Any

from scaleray.common.fingerprint import environment
from scaleray.common.printed import quantity
from scaleray.common.progress import Stage, stage
from scaleray.config.base import without_password
from scaleray.errors import MARKED_KILLED, RunFailedError
from scaleray.launch.cluster import connection as cluster
from scaleray.launch.cluster.capacity import num_concurrent
from scaleray.launch.session.campaign import Campaign
from scaleray.launch.session.conditions import conditions_of
from scaleray.live.state.measured_series import Measured
from scaleray.records.run_record import Say
from scaleray.records.start import steady_time
from scaleray.records.sweep_record import SweepRecord, Trial
from scaleray.sweeps.guided import GuidedTrials
from scaleray.sweeps.result import DIVERGED, FAILED, NOT_STARTED, common_causes, sentences, with_common_target
from scaleray.sweeps.same_trainings import SameTrainings, counted_for, trained_by_key, training_key
from scaleray.sweeps.sweep_folder import AskedSweep, SweepFolder
from scaleray.sweeps.sweep_plan import SweepPlan
from scaleray.sweeps.trial_records import make_trial, trial_line
from scaleray.sweeps.tune import remove_scraps, run_experiment

MAX_SHOWN = 50  # most lines about trials that cannot run


class RunningSweep(Campaign):
    """A sweep from its start to its record: runs candidates, stores each trial's record, and concludes.

    against: record of the whole grid, for a guided sweep.
    """

    kind = "sweep"

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
        super().__init__(
            config=plan.base, folder=files.folder, say=say, started_at=asked.started_at, under_way=Stage("trials")
        )
        self.plan, self.asked, self.files, self.nodes = plan, asked, files, nodes
        self.tracking_uri, self.continued_at = tracking_uri, started_at
        self.trials: list[Trial] = files.read_trials()
        self.places: dict[int, int] = {}
        """Position of each trial's line, by trial number."""
        self._is_recorded = False

    def __enter__(self) -> RunningSweep:
        plan, asked = self.plan, self.asked
        self.open_run(
            next(iter(plan.materials.values())).sources,
            environment(),
            config_hash=plan.base.hash(),
            nodes=cluster.topology(self.nodes),
            workers=plan.question.workers_per_trial,
            run_id=asked.run_id,
            uri=self.tracking_uri,
        )
        if not asked.run_id:
            self.asked = dataclasses.replace(asked, run_id=self.mlflow.run_id)
            self.files.write_asked(self.asked)
        for trial in self.trials:
            self.mlflow.log_trial(trial)
        self._announce()
        for trial in list(self.trials):  # the sweep may have been interrupted between the records of one training
            self._count_for_others(trial)
        if not self.trials:
            for number, (settings, reason) in enumerate(self.asked.refused, start=len(plan.candidates)):
                self._keep(make_trial(plan, number, settings, status=NOT_STARTED, error=reason), is_said=False)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not self.has_run:
            return
        if error is not None and not self._is_recorded:
            self.mlflow.finish(None, status="KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
            if isinstance(error, KeyboardInterrupt):
                path = shlex.quote(without_password(self.folder.path))
                self.say(f"to continue: scaleray sweep --continue {path}")
                error.args = (MARKED_KILLED,)
        remove_scraps(self.folder.path)
        self.folder.complete()

    def run_all(self) -> None:
        """Run every trial that has no record yet, or the trials chosen by a guided sweep."""
        if self.guided is not None:
            self.guided.run(lambda: self.trials, self.run_numbers, self.say)
            return
        done = {trial.number for trial in self.trials}
        if self.plan.question.search == "optuna":
            self._fit_searched([t for t in self.trials if t.status != NOT_STARTED])
            return
        self.run_numbers([n for n in range(len(self.plan.candidates)) if n not in done])

    def run_numbers(self, numbers: list[int]) -> None:
        """Run the given candidates of the plan, each training once.

        Raises KeyboardInterrupt if stopped before all were done.
        """
        numbers = self.same.to_train(numbers, self.trials)
        if not numbers:
            return
        from scaleray.sweeps.optuna_search import listed
        from scaleray.sweeps.schedulers import make_scheduler

        scheduler = make_scheduler(self.plan, [self.plan.candidates[n] for n in numbers])
        done = self._fit(space=listed(self.plan, numbers), scheduler=scheduler)
        if not done >= set(numbers):
            raise KeyboardInterrupt

    def finish(self) -> SweepRecord:
        """Conclude the sweep, and write the record and the report.

        Raises RunFailedError if no trial has a result.
        """
        from scaleray.sweeps.sweep_page import write_sweep_report  # imports matplotlib

        record = self._record()
        started = [t for t in self.trials if t.status != NOT_STARTED]
        all_failed = bool(started) and all(t.status in (FAILED, DIVERGED) for t in started)
        record = self.write_with(record, write_sweep_report, "FAILED" if all_failed else "FINISHED")
        self._is_recorded = True
        if all_failed:
            cause, number = common_causes(started)[0]
            raise RunFailedError(
                f"all {len(started)} trials failed, {number} of them with: {cause}\n"
                f"  the record: {record.folder}/record.json"
            )
        return record

    # how trials run

    def _fit_searched(self, known: list[Trial]) -> None:
        from scaleray.sweeps.optuna_search import OptunaSearcher
        from scaleray.sweeps.schedulers import make_scheduler

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
                self.say(f"the search space has {len(done)} trials that can run")
                return
            raise KeyboardInterrupt

    def _fit(self, **options: Any) -> set[int]:
        before = sum(trial.status != NOT_STARTED for trial in self.trials)
        with (
            stage("trials", total=self._num_planned(), unit="trials", before=before) as self.under_way,
            self.shown_in_its_folder(),
        ):
            return run_experiment(self.plan, self.nodes, folder=self.folder.path, on_trial=self._keep, **options)

    def measured(self) -> Measured:
        """Results of the trials so far."""
        now, config = self.under_way, self.config
        return Measured(
            "sweep", now.done, now.total, trials=self.trials, workers=self.plan.workers, strategy=config.strategy.name
        )

    def _keep(self, trial: Trial, *, is_said: bool = True) -> None:
        """Store a trial's record: on disk first, then in MLflow, then on the terminal."""
        self.files.write_trial(trial)
        self.trials = sorted([*self.trials, trial], key=lambda t: t.number)
        self.mlflow.log_trial(trial)
        self.under_way.advance()
        if is_said:
            num_started = sum(t.status != NOT_STARTED for t in self.trials)
            self.places[trial.number] = num_started
            same_as = self.places.get(-1 if trial.same_as is None else trial.same_as)
            self.say(trial_line(trial, num_started, self._num_planned(), same_as=same_as))
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
            f"continuing sweep {self.folder.name}, {done} trials are done"
            if self.trials
            else f"sweep {self.folder.name}"
        )
        workers = f"{quantity(plan.workers, 'worker')} each"
        fit = num_concurrent(plan.config(plan.candidates[0]), self.nodes)
        self.say(f"{start}: {plan.base.workload.name}")
        planned = self._num_planned()
        self.say(
            f"  {quantity(planned, 'trial')} ({question.search}, {question.scheduler}), {workers}, "
            f"up to {fit} at a time, "
            f"ranked by {plan.metric} ({plan.direction})"
        )
        if question.guided_share is not None:
            self.say(f"  guided: runs only the useful ones, for at most {question.guided_share:.0%} of their samples")
        if self.same.num_shared:
            self.say(
                f"  {self.same.num_shared} of them {'is' if self.same.num_shared == 1 else 'are'} the same training as "
                f"another trial, for example under every rule at the reference batch; each training runs once and "
                "counts for all"
            )
        if fit > 1:
            self.say("  concurrent trials share the machine: compare their times only with each other")
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
            self.say(f"  --trials is {asked}; only {num} combinations can run, each once")

    def _record(self) -> SweepRecord:
        plan, config = self.plan, self.plan.base
        workload = next(iter(plan.materials.values())).workload
        topology = {"nodes": cluster.topology(self.nodes), "workers_per_trial": plan.workers}
        record = SweepRecord(
            name=self.folder.name,
            command=self.asked.command,
            config=config.to_dict(),
            conditions=conditions_of(config, workload, topology),
            metric=plan.metric,
            direction=plan.direction,
            target=str(config.stop.at) if config.stop.at is not None else None,
            scheduler=plan.question.scheduler,
            search=plan.question.search,
            trials=self.trials,
            started_at=self.started_at,
            duration_s=steady_time() - self.continued_at,
            folder=without_password(self.folder.path),
        )
        compared = with_common_target(record)
        words = sentences(
            compared,
            has_own_target=config.stop.at is not None,
            reference_batch_size=compared.reference_batch_size or plan.reference_batch_size,
        )
        record = dataclasses.replace(compared, words=words)
        return self.guided.conclude(record) if self.guided is not None else record
