"""`verify --resume`: does a resumed run equal an uninterrupted one? Each variant is interrupted once."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scaleray.common.progress import stage
from scaleray.common.stop_signals import sigterm_like_ctrl_c
from scaleray.config import RunConfig
from scaleray.data import TRAIN
from scaleray.data.source_interface import Source
from scaleray.errors import ConfigError
from scaleray.launch.cluster.lean_node import variables
from scaleray.launch.workers.gloo import gloo_processes
from scaleray.launch.workers.loaded_workload import ship_user_code
from scaleray.launch.workers.ray_train import fit_group
from scaleray.records.certificate import ResumeCertificate, ResumeOutcome
from scaleray.records.run_record import Say
from scaleray.training.setup.rank_context import RankContext
from scaleray.verification.certificate import common_facts, keep, recorded, with_reach
from scaleray.verification.interrupted_runs import Interruption, interruption_job, verify_resume
from scaleray.verification.preparation import Verification, prepared
from scaleray.verification.verification_plan import Plan
from scaleray.verification.verify_options import VerifyOptions

CPP_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
"""Variable of torch. "ERROR" silences DDP's warning about its search for unused parameters, which fixes buckets."""


def verify_resumes(
    config: RunConfig,
    options: VerifyOptions,
    workload: Any = None,
    *,
    say: Say = lambda text: None,
    base_dir: Path | None = None,
) -> ResumeCertificate:
    """Interrupt every requested variant at a random step, resume it, and compare it with the uninterrupted run.

    Runs are in their own precision, use deterministic algorithms, and must agree to the bit. Raises UsageError for
    errors of use and RunFailedError for a group that died."""
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    with prepared(config, options, workload, base_dir=base_dir, say=say) as verification:
        config, steps = verification.config, verification.plan.reference.job.recipe.total_steps
        if steps < 2:
            raise ConfigError("--steps", steps, "an interruption needs a step before and after it", "use 2 or more")
        say(
            f"verify --resume {config.workload.name}: {steps} steps in {config.precision.dtype}, "
            f"interrupted at random (seed {seed})"
        )
        outcomes = []
        with recorded(verification, kind="verify-resume") as (folder, run):
            todo = _interruptions(verification.plan, random.Random(seed), folder.path)
            with stage("interrupting and resuming", total=len(todo), unit="variants") as resuming:
                for outcome in _outcomes(todo, verification, folder.path):
                    say(f"  {line(outcome)}")
                    outcomes.append(outcome)
                    resuming.advance()
            passed, words = verdict(outcomes)
            certificate = ResumeCertificate(
                passed=passed,
                verdict=with_reach(words, passed, verification.workload, steps),
                bound=0.0,
                precision=config.precision.dtype,
                steps=steps,
                seed=seed,
                outcomes=outcomes,
                **common_facts(verification, folder, run),
            )
            params = ("config_hash", "environment_hash", "bound", "steps", "seed")
            keep(certificate, folder, run, params=params, say=say)
    return certificate


def _interruptions(plan: Plan, draw: random.Random, path: str) -> list[Interruption]:
    """One interruption of each variant, after a random step, with a folder below `path` for its checkpoints."""
    variants = [(world_size, variant) for world_size, group in plan.groups.items() for variant in group]
    last = plan.reference.job.recipe.total_steps - 1
    return [
        Interruption(
            variant.label,
            interruption_job(variant.own or variant.job),
            world_size,
            draw.randint(1, last),
            f"{path}/resume-{number}",
        )
        for number, (world_size, variant) in enumerate(variants)
    ]


def line(outcome: ResumeOutcome) -> str:
    """One outcome as text."""
    what = f"{outcome.label}: interrupted after step {outcome.interrupt_at} of {outcome.steps}, resumed"
    if outcome.not_run:
        return f"{outcome.label}: not run: {' '.join(outcome.not_run.split())}"
    if outcome.is_equal:
        return f"{what}: bit-identical ({outcome.duration_s:.0f} s)"
    first = outcome.comparison.divergence
    where = f"first at step {first.step}: the {first.quantity}" if first else "in the final state"
    return f"{what}: differs, {where}; guilty: {', '.join(outcome.guilty)}"


def verdict(outcomes: list[ResumeOutcome]) -> tuple[bool, str]:
    """Whether at least one run was interrupted and every resumed run is equal, and the verdict as text."""
    ran = [outcome for outcome in outcomes if not outcome.not_run]
    if bad := [outcome for outcome in ran if not outcome.is_equal]:
        guilty = ", ".join(sorted({name for outcome in bad for name in outcome.guilty}))
        words = f"a resumed run is not the same: {len(bad)} of {len(outcomes)} variants differ (guilty: {guilty})"
        return False, words
    if not ran:
        return False, "nothing was compared: no variant can run this workload"
    left_out = f", {len(outcomes) - len(ran)} not run" if len(ran) < len(outcomes) else ""
    return True, f"a resumed run is the same to the bit: {len(ran)} interruptions{left_out}"


def _outcomes(todo: list[Interruption], verification: Verification, path: str) -> Iterator[ResumeOutcome]:
    workload, train = verification.workload, {TRAIN: verification.sources[TRAIN]}
    if verification.options.local:
        timeout_s = verification.config.scale.collective_timeout_s
        world_size = max(i.world_size for i in todo)
        with (
            variables({CPP_LOG_LEVEL: os.environ.get(CPP_LOG_LEVEL, "ERROR")}),
            gloo_processes(world_size, verification.code, timeout_s=timeout_s, watched_in=path) as processes,
        ):
            for interruption in todo:
                yield processes.run(interruption.world_size, resume_here, interruption, train, workload=workload)
        return
    import ray

    ship_user_code(workload)
    read = ray.put(train)
    by_size: dict[int, list[Interruption]] = {}
    for interruption in todo:
        by_size.setdefault(interruption.world_size, []).append(interruption)
    with sigterm_like_ctrl_c():
        for world_size, group in by_size.items():
            config = group[0].job.config
            yield from fit_group(config, world_size, resumes_here, (group, read), storage_path=path, name="ray_verify")


def resume_here(place: RankContext, interruption: Interruption, sources: dict[str, Source]) -> ResumeOutcome:
    """One worker's part of one interruption. It reads its own rows."""
    import torch

    torch.set_num_threads(1)
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        return verify_resume(place, interruption, sources=sources)
    finally:
        torch.use_deterministic_algorithms(was_deterministic)


def resumes_here(place: RankContext, group: list[Interruption], sources: dict[str, Source]) -> list[ResumeOutcome]:
    """One worker's part of several interruptions."""
    return [resume_here(place, interruption, sources) for interruption in group]
