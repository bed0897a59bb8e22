"""Summary of a worker's training at its end."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from scaleray.common.fingerprint import hardware
from scaleray.common.watchers import Guard, Watcher
from scaleray.data import TRAIN
from scaleray.emulation import is_emulated
from scaleray.records.profile_record import RankMeasurements
from scaleray.records.run_record import WorkerSummary
from scaleray.training.health.clock import Clock
from scaleray.training.profile.used_memory import peak_bytes
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.model_setup import Setup
from scaleray.training.setup.rank_context import RankContext


class Ended(Protocol):
    """State of the loop at its end."""

    step: int
    nonfinite_steps: int

    @property
    def job(self) -> TrainJob: ...


def summary_of(
    state: Ended,
    place: RankContext,
    setup: Setup,
    clock: Clock,
    guard: Guard,
    *,
    first_step: int,
    verdict: str,
    compilation: dict[str, Any],
    memory: dict[str, Any],
    noise: dict[str, Any],
    best: dict[str, Any],
    profile: Callable[[], RankMeasurements],
    attributes: dict[str, Any],
) -> WorkerSummary:
    """Summarise the steps after `first_step`. Missing measurements are left out and reported by the guard."""
    job, step = state.job, state.step
    look = partial(guard, Watcher.SUMMARY)
    steady = look(clock.steady_state, None, part="steady state")
    samples_per_s = None
    if steady is not None:
        samples_per_s = sum(map(job.train_plan().num_rows, range(first_step + steady.first, step))) / steady.total_s
    tokens = job.splits[TRAIN].tokens_per_row
    return WorkerSummary(
        rank=place.rank,
        node=place.node,
        steps=step,
        verdict=verdict,
        samples_per_s=samples_per_s,
        tokens_per_s=samples_per_s * tokens if samples_per_s and tokens else None,
        step_time_s=steady.median_s if steady else None,
        input_wait_share=steady.wait_share if steady else None,
        time_to_first_step_s=clock.first_step_s,
        start=clock.begin.seconds(),
        training_time_s=clock.total_s,
        peak_memory_bytes=look(lambda: peak_bytes(place.device), 0, part="memory"),
        nonfinite_steps=state.nonfinite_steps,
        sample_order=job.sample_order,
        strategy=job.recipe.strategy,
        device=str(place.device),
        model={
            "num_parameters": setup.num_parameters,
            "initial_hash": setup.initial_hash,
            "attributes": attributes,
            "is_emulated": is_emulated(setup.parallel.module),
        },
        hardware=look(hardware, {}, part="hardware"),
        compilation=compilation,
        memory=memory,
        noise=noise,
        best=best,
        profile=look(profile, None, part="profile"),
    )
