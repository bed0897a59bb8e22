"""`verify`: is the distributed run still the same training? Plans and runs the variants, and writes the certificate.

Each number of workers is one launch of Ray Train or of plain gloo processes. The first launch also runs the single
process that all variants must equal."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from scaleray.checkpoints.storage import Store
from scaleray.common.options import takes
from scaleray.common.printed import quantity
from scaleray.common.progress import stage
from scaleray.common.stop_signals import sigterm_like_ctrl_c
from scaleray.data.source_interface import TRAIN, Source
from scaleray.errors import RunFailedError, WorkloadError
from scaleray.launch.session.config_argument import Config, resolved
from scaleray.launch.session.opened import check_local
from scaleray.launch.session.run_folder import RunFolder
from scaleray.launch.workers.gloo import TELL, GlooProcesses, OnFirst, gloo_processes
from scaleray.launch.workers.loaded_workload import ship_user_code
from scaleray.launch.workers.ray_train import fit_group
from scaleray.launch.workers.telling import handing_over
from scaleray.records.certificate import EqualityCertificate, Outcome, ResumeCertificate
from scaleray.records.run_record import Say
from scaleray.training.setup.rank_context import RankContext
from scaleray.verification.certificate import keep, largest_differences, make_certificate, recorded
from scaleray.verification.preparation import Verification, prepared
from scaleray.verification.printed_certificate import as_text
from scaleray.verification.repeatable.narrow_casts import narrow_casts
from scaleray.verification.repeatable.narrow_casts import to_text as casts_text
from scaleray.verification.variants import Assignment, References, Tell, verify_group
from scaleray.verification.verdicts.verdict_texts import lost
from scaleray.verification.verification_plan import events_text
from scaleray.verification.verify_options import VerifyOptions
from scaleray.verification.verify_resume import verify_resumes

RunGroup = Callable[[int, Assignment, References, Tell], tuple[list[Outcome], References]]
"""Function that runs the variants of one number of workers, and reports each as it is done."""
CHECKPOINTS = "compared"
"""Folder for checkpoints that groups of different sizes share; deleted at the end."""
PARAMS = (
    "config_hash", "environment_hash", "bound", "precision", "own_precision", "steps", "strategies", "world_sizes",
    "accumulation", "global_batch_size", "where",
)  # fmt: skip
"""Fields of the certificate that become params of the MLflow run."""


@takes(VerifyOptions)
def verify(
    config: Config,
    workload: Any = None,
    *,
    options: VerifyOptions,
    say: Say = lambda text: None,
    base_dir: Path | None = None,
) -> EqualityCertificate | ResumeCertificate:
    """Check that strategies and numbers of workers repeat the training of one process, step by step.

    config: a RunConfig, a YAML file, or a mapping of dotted keys or sections. workload: a class or an object; None
    loads the config's. say: receives lines on the progress. base_dir: folder to which a RunConfig's paths are relative.
    Returns the certificate; a mismatch raises no error but makes `passed` false. Raises UsageError for errors of use,
    and RunFailedError for a group that died."""
    whole, base_dir, workload = resolved(config, workload, base_dir)
    if options.resume:
        return verify_resumes(whole, options, workload, say=say, base_dir=base_dir)
    if options.local:
        check_local(whole)
    with prepared(whole, options, workload, base_dir=base_dir, say=say) as verification:
        return _compared(verification, say)


def _compared(verification: Verification, say: Say) -> EqualityCertificate:
    """Run the first steps of a training in every requested way, and compare each with a single process."""
    _announce(verification, say)
    with recorded(verification) as (folder, run):
        is_local = verification.options.local
        run_groups = _local_groups(verification, folder) if is_local else _ray_groups(verification, folder)
        try:
            with run_groups as run_group, _naming_casts(verification):
                outcomes = [
                    *_outcomes(verification, run_group, say, f"{folder.path}/{CHECKPOINTS}"),
                    *verification.plan.refused,
                ]
        finally:
            with contextlib.suppress(OSError):
                Store(folder.path).delete_folder(CHECKPOINTS)
        outcomes = _with_casts(outcomes, verification)
        certificate = make_certificate(verification, outcomes, folder, run)
        table = {"verification.txt": as_text(certificate)}
        metrics = largest_differences(outcomes)
        keep(certificate, folder, run, params=PARAMS, metrics=metrics, more_files=table, say=say)
    return certificate


@contextlib.contextmanager
def _naming_casts(verification: Verification) -> Iterator[None]:
    """Add the casts that leave float64, if any, to the error of a workload that fails in float64."""
    try:
        yield
    except WorkloadError as exc:
        if words := casts_text(_casts(verification)):
            raise WorkloadError(exc.what, exc.found, exc.allowed, f"{exc.hint}\n  {words}") from exc
        raise


def _with_casts(outcomes: list[Outcome], verification: Verification) -> list[Outcome]:
    """The outcomes, to which the casts that leave float64 are added if they differ."""
    if not any(outcome.verdict == "differs" for outcome in outcomes):
        return outcomes
    words = casts_text(_casts(verification))
    return [
        dataclasses.replace(one, words="; ".join(filter(None, (one.words, words)))) if one.verdict == "differs" else one
        for one in outcomes
    ]


def _casts(verification: Verification) -> list[str]:
    if verification.options.precision != "fp64":
        return []
    rows = verification.sources[TRAIN].read(np.arange(min(4, verification.sources[TRAIN].num_rows)))
    gives_tuples = verification.plan.reference.job.splits[TRAIN].gives_tuples
    return narrow_casts(verification.workload, rows, gives_tuples=gives_tuples)


def _announce(verification: Verification, say: Say) -> None:
    options, reference = verification.options, verification.plan.reference.job
    say(
        f"verify {verification.config.workload.name}: {reference.recipe.total_steps} steps "
        f"of {reference.recipe.global_batch_size} samples "
        f"in {options.precision}, bound {options.allowed:g}"
    )
    say(f"  {events_text(verification.plan)}")
    if not verification.options.local:
        cpus = reference.config.scale.cpus_per_worker
        say(f"  each worker requests {cpus:g} CPU, since numbers are compared and not speeds")


def _outcomes(verification: Verification, run_group: RunGroup, say: Say, checkpoints: str) -> Iterator[Outcome]:
    plan, allowed = verification.plan, verification.options.allowed
    references: References = {}
    for world_size, variants in plan.groups.items():
        labels = "; ".join(v.label for v in variants) or "the reference"
        workers = quantity(world_size, "worker")
        say(f"  {workers}: {labels} ...")
        started = time.monotonic()
        assignment = Assignment(plan.reference, tuple(variants), allowed, checkpoints)
        with stage(f"comparing on {workers}", total=len(variants), unit="variants") as comparing:
            outcomes, references = _survived(run_group, world_size, assignment, references, comparing.advance)
        bad = sum(outcome.verdict == "differs" for outcome in outcomes)
        found = f"{bad} of {len(outcomes)} differ" if bad else "no mismatch"
        say(f"    {found}, {time.monotonic() - started:.0f} s")
        yield from outcomes


def _survived(
    run_group: RunGroup, world_size: int, assignment: Assignment, references: References, advance: Callable[[], None]
) -> tuple[list[Outcome], References]:
    """The outcomes of a group. If a variant hangs or ends a process, the group restarts with the variants after it.
    Raises RunFailedError if the reference itself fails."""
    outcomes: list[Outcome] = []
    while True:
        received: list[Outcome | None] = []

        def take(outcome: Outcome | None) -> None:
            received.append(outcome)  # noqa: B023
            if outcome is not None:
                advance()

        left = assignment.variants[len(outcomes) :]
        try:
            found, references = run_group(world_size, dataclasses.replace(assignment, variants=left), references, take)
            return [*outcomes, *found], references
        except RunFailedError as exc:
            done = [outcome for outcome in received if outcome is not None]
            if not received or len(done) == len(left):
                raise
            variant = left[len(done)]
            failed = dataclasses.replace(variant.outcome, verdict="differs", mismatch=lost(exc))
            outcomes += [*done, failed]
            advance()
            if len(outcomes) == len(assignment.variants):
                return outcomes, references


# without Ray


@contextlib.contextmanager
def _local_groups(verification: Verification, folder: RunFolder) -> Iterator[RunGroup]:
    timeout_s = verification.config.scale.collective_timeout_s
    workload, read = verification.workload, _read(verification)
    with contextlib.ExitStack() as stack:
        running: list[GlooProcesses] = []

        def run_group(world_size: int, assignment: Assignment, references: References, tell: Tell) -> Any:
            if not running:
                size = max(verification.plan.groups)
                opened = gloo_processes(size, verification.code, timeout_s=timeout_s, watched_in=folder.path)
                running.append(stack.enter_context(opened))
            arguments = (assignment, OnFirst(references), read, TELL)
            try:
                return running[0].run(world_size, verify_here, *arguments, workload=workload, on_message=tell)
            except RunFailedError:  # one may hang still
                running.clear()
                stack.close()
                raise

        yield run_group


def _read(verification: Verification) -> dict[str, Source]:
    """The sources of the splits to read."""
    return {name: verification.sources[name] for name in verification.plan.reference.job.splits}


def verify_here(
    place: RankContext, assignment: Assignment, references: References | None, sources: Mapping[str, Source], tell: Tell
) -> tuple[list[Outcome], References]:
    """One worker's part of the verification. It reads its own rows, so that only the training differs. references:
    needed only on rank 0."""
    import torch

    torch.set_num_threads(1)
    return verify_group(place, assignment, references or {}, sources=sources, tell=tell)


# under Ray


@contextlib.contextmanager
def _ray_groups(verification: Verification, folder: RunFolder) -> Iterator[RunGroup]:
    import ray

    ship_user_code(verification.workload)
    read = ray.put(_read(verification))

    def run_group(world_size: int, assignment: Assignment, references: References, tell: Tell) -> Any:
        config = (assignment.variants or (assignment.reference,))[0].job.config
        with handing_over(tell) as put:
            arguments = (assignment, ray.put(references), read, put)
            return fit_group(config, world_size, verify_here, arguments, storage_path=folder.path, name="ray_verify")

    with sigterm_like_ctrl_c():
        yield run_group
