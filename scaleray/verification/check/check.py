"""`check`: test data, model, loss and gradients with one batch, the speed of the input, and two processes against one.

Everything but the last check, which uses gloo processes, runs in this process, without Ray, MLflow or a run folder.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch import nn

from scaleray.common.printed import quantity
from scaleray.common.progress import stage
from scaleray.common.seeding import same_switches
from scaleray.config import RunConfig
from scaleray.config.brought import with_brought
from scaleray.config.checkpoint import NOTHING_SAVED
from scaleray.config.parallel import Degrees
from scaleray.config.recipe.derive import derive
from scaleray.data import TRAIN, Split, load_sources
from scaleray.data.iterable import ENDLESS
from scaleray.data.source_interface import Source
from scaleray.errors import ScaleRayError, WorkloadError
from scaleray.launch.session.config_argument import Config, whole_config
from scaleray.launch.session.opened import forbid_ray, with_absolute_paths
from scaleray.launch.workers.forks import OF_A_CHECK, begin_imports
from scaleray.launch.workers.gloo import TELL, UserCode, gloo_processes
from scaleray.records.certificate import Outcome
from scaleray.records.check_record import DOUBTFUL, GOOD, WRONG, CheckRecord, Finding
from scaleray.records.hangs import HANGS
from scaleray.records.run_record import Say
from scaleray.records.start import steady_time
from scaleray.training.setup.job import TrainJob
from scaleray.verification.causes.cause_classes import Cause
from scaleray.verification.check.data_checks import InputCheck, columns_of_splits, constant, repeatable, sendable
from scaleray.verification.check.model_checks import ModelCheck, built_alike
from scaleray.verification.variants import Assignment
from scaleray.verification.verification_plan import make_plan
from scaleray.verification.verify import verify_here
from scaleray.verification.verify_options import VerifyOptions
from scaleray.workload import make_workload, no_exit

Result = TypeVar("Result")


def check(
    config: Config,
    workload: Any = None,
    *,
    processes: bool = True,
    base_dir: Path | None = None,
    say: Say = lambda text: None,
) -> CheckRecord:
    """Check a workload before training it: one batch of its data, its model, loss, gradients and metrics, memory, the
    speed of the input, and whether two processes equal one.

    config: a RunConfig, a YAML file, or a mapping of dotted keys. workload: an instance or class; None loads
    `config.workload`. processes: also compare two processes with one, for two steps in float64. say: receives a line
    for each finding as it is made. Takes about ten seconds, mostly for the processes; needs neither Ray nor MLflow. The
    user's mistakes become findings in the record, not errors; raises ConfigError for a config that cannot be read."""
    whole, base_dir = whole_config(config, workload, base_dir)
    forbid_ray()
    return _Check(with_absolute_paths(whole), workload, base_dir, say).run(processes=processes)


class _Check:
    def __init__(self, config: RunConfig, workload: Any, base_dir: Path | None, say: Say) -> None:
        self.config, self.given, self.base_dir, self.say = config, workload, base_dir, say
        self.record = CheckRecord(config.workload.name)

    def run(self, *, processes: bool) -> CheckRecord:
        started = time.perf_counter()
        if processes:
            begin_imports(OF_A_CHECK)
        with same_switches():
            self._look(processes=processes)
        return replace(self.record, duration_s=time.perf_counter() - started)

    def _look(self, *, processes: bool) -> None:
        settings = self.config.workload
        workload = self._step(
            "workload", lambda: make_workload(self.given, settings.name, settings.args, base_dir=self.base_dir)
        )
        if workload is None or self._step("settings", lambda: self._settle(workload)) is None:
            return
        sources = self._step("data", lambda: load_sources(workload, in_steps=self.config.is_in_steps))
        if sources is None:
            return
        self.record.figures["rows"] = {name: source.num_rows for name, source in sources.items()}
        self._add(*sendable(sources), *columns_of_splits(sources), *repeatable(workload, sources))
        job = self._step("recipe", lambda: self._job(workload, sources))
        if job is None:
            return
        look = InputCheck(job, sources)
        batch = self._step("first batch", look.first_batch)
        if batch is None:
            return
        self.record.columns.extend(look.columns(batch))
        self._add(look.speed(self.record.figures))
        self._step("build_model", lambda: self._add(built_alike(job)))
        model = ModelCheck(job, sources, batch)
        with model.opened() as opened:
            if self._step("model", opened) is None:
                return
            embeds = any(isinstance(part, nn.Embedding | nn.EmbeddingBag) for part in model.module.modules())
            self._step("first batch", lambda: self._add(*constant(look.first_rows(batch), embeds=embeds)))
            if self._step("loss", lambda: self._add(*model.loss(self.record.figures))) is None:
                return
            self._step("gradients", lambda: self._add(*model.gradients(self.record.figures)))
            self._step("metrics", lambda: self._add(*model.metrics()))
            self._step("evaluation", model.evaluated)
            self._step("extreme rows", lambda: self._add(*model.extremes()))
        if processes and self.record.passed:
            name, own = (settings.name, None) if self.given is None else (None, workload)
            code = UserCode(name, settings.args, self.base_dir, own)
            with stage("comparing two processes with one"):
                self._step("two processes", lambda: self._add(two_processes(self.config, workload, sources, code)))

    def _settle(self, workload: Any) -> None:
        """Adopt the settings that the workload brings."""
        self.config = with_brought(self.config, workload)

    def _job(self, workload: Any, sources: Mapping[str, Source]) -> TrainJob:
        """The training on one worker; the config's own number of workers must be valid as well."""
        splits = {name: Split.of(name, source, workload) for name, source in sources.items()}
        recipe = derive(self.config, splits[TRAIN].size)
        here = {"scale.workers": 1, "scale.gpus_per_worker": 0, "strategy.name": "auto", **NOTHING_SAVED}
        config = self.config.changed(here)
        alone = replace(recipe, strategy="single", degrees=Degrees())
        job = TrainJob(config, alone, workload, splits, steady_time())
        self.record.figures["global_batch_size"] = recipe.global_batch_size
        self.record.figures["micro_batch_size"] = recipe.micro_batch_size
        steps = f"{quantity(recipe.total_steps, 'step')} of {quantity(recipe.global_batch_size, 'sample')}"
        self._add(Finding("recipe", GOOD, steps))
        self._add(Finding("data", GOOD, f"{_rows(sources[TRAIN])} to train on, {job.sample_order}"))
        return job

    def _step(self, subject: str, look: Callable[[], Result]) -> Result | None:
        """Result of a check; if the user's code fails, add a finding and return None."""
        try:
            with no_exit("the workload's code"):
                found = look()
        except ScaleRayError as exc:
            self._add(Finding(subject, WRONG, str(exc)))
            return None
        return found if found is not None else True  # type: ignore[return-value]

    def _add(self, *findings: Finding) -> None:
        for finding in findings:
            self.record.findings.append(finding)
            self.say(f"  {finding.verdict:<8} {finding.subject}: {finding.text}")


def _rows(source: Source) -> str:
    return "an endless stream of rows" if source.num_rows == ENDLESS else f"{source.num_rows} rows"


STEPS = 2
ROWS = 4
"""Samples of a global batch in this check: two for each process, as batch normalisation needs."""
SUBJECT = "two processes"
PRECISIONS = {"fp64": "float64", "fp32": "float32"}


def two_processes(config: RunConfig, workload: Any, sources: Mapping[str, Source], code: UserCode) -> Finding:
    """Compare the first steps of ddp on two gloo processes with one process. Raises UsageError."""
    try:
        return _compared(config, workload, sources, code, precision="fp64")
    except WorkloadError as exc:
        # it trains in its own precision: a part that the workload makes in float32 does not meet weights in float64
        try:
            found = _compared(config, workload, sources, code, precision="fp32")
        except WorkloadError:
            raise exc from None
        return replace(found, text=f"{found.text}; the workload does not run in float64")


def _compared(
    config: RunConfig,
    workload: Any,
    sources: Mapping[str, Source],
    code: UserCode,
    *,
    precision: Literal["fp64", "fp32"],
) -> Finding:
    options = VerifyOptions(strategies=("ddp",), world_sizes=(2,), accumulation=(1,), steps=STEPS, precision=precision)
    train = {TRAIN: sources[TRAIN]}  # an evaluation of all rows may take longer than everything else
    config = config.changed({"stop.at": None})
    if config.batch.unit == "samples" and config.batch.global_size > ROWS:
        config = config.changed({"batch.global_size": ROWS, "batch.micro_size": None})
    plan = make_plan(config, options, workload, train)
    variants = [variant for group in plan.groups.values() for variant in group]
    if not variants:
        why = plan.refused[0].words if plan.refused else "no variant runs"
        return Finding(SUBJECT, DOUBTFUL, f"not compared: {why}")
    outcomes: list[Outcome] = []
    folder = tempfile.mkdtemp(prefix="scaleray-check-")  # stays where an error says to look into it
    timeout_s = config.scale.collective_timeout_s
    with gloo_processes(2, code, timeout_s=timeout_s, watched_in=folder) as processes:
        assignment = Assignment(plan.reference, tuple(variants), options.allowed)
        try:
            outcomes, _ = processes.run(2, verify_here, assignment, {}, train, TELL, workload=workload)
        finally:
            if not os.path.isdir(f"{folder}/{HANGS}"):
                shutil.rmtree(folder, ignore_errors=True)
    return judged(outcomes, precision=precision)


def judged(outcomes: list[Outcome], *, precision: str = "fp64") -> Finding:
    """Finding that describes a comparison."""
    [outcome] = outcomes
    if outcome.verdict == "refused":
        return Finding(SUBJECT, DOUBTFUL, f"not compared: {outcome.words}")
    if (found := outcome.mismatch) is not None:
        where = f"step {found.step}: {found.quantity}{f' of {found.parameter}' if found.parameter else ''}"
        if found.cause == Cause.CUT:
            return Finding(SUBJECT, DOUBTFUL, f"they differ from one process because of the loss itself: {found.why}")
        text = f"they differ from one process: {where} is {found.difference:.1e} apart; {found.cause}: {found.why}"
        return Finding(SUBJECT, WRONG, f"{text}\n  scaleray verify --local gives details")
    largest = outcome.comparison.largest
    text = f"equal one process within {largest:.1e} over {STEPS} steps in {PRECISIONS[precision]}"
    return Finding(SUBJECT, GOOD, f"{text}; {outcome.words}" if outcome.words else text)
