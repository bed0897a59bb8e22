"""One variant of a small training, judged by `scaleray verify`'s own code on the ranks of the pool, with a bug planted or without."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from small_runs import make_job, with_strategy

from scaleray.data import Input, Part, Split, StepStream
from scaleray.records.certificate import Outcome
from scaleray.strategies import STRATEGIES
from scaleray.training import loop
from scaleray.training.setup.rank_context import RankContext
from scaleray.verification import variants as verification
from scaleray.verification.variants import Assignment, Variant, short_job, verify_group

STEPS = 6  # of 8 rows; the fourth has the 2 that are left of 26
TRAINING_ON = [1]
"""How many ranks train right now, while `knows_who_trains`; rank 0 runs the single process, too, inside the same group."""


def judge(
    place: RankContext,
    workload: Any,
    flags: dict[str, Any],
    accumulation: int = 1,
    steps: int = STEPS,
    *,
    resumes: bool = False,
) -> Outcome:
    """The outcome beside one process in float64; `own` is the distance in the precision of the flags (default fp32).
    resumes: every run goes on from a checkpoint in the middle."""
    return judge_all(place, workload, flags, (accumulation,), steps, resumes=resumes)[0]


def judge_all(
    place: RankContext,
    workload: Any,
    flags: dict[str, Any],
    accumulations: tuple[int, ...],
    steps: int = STEPS,
    *,
    resumes: bool = False,
) -> list[Outcome]:
    """The outcomes of several numbers of micro-batches."""
    reference, sources = _variant(workload, {**flags, "strategy.name": "auto"}, 1, 1, steps)
    others = tuple(_variant(workload, flags, place.world_size, n, steps)[0] for n in accumulations)
    if resumes:
        reference, *others = (dataclasses.replace(v, later=v.job) for v in (reference, *others))
        others = tuple(others)
    return verify_group(place, Assignment(reference, others, 1e-9), {}, sources=sources)[0]


def judge_with(
    place: RankContext, plant: Callable[[], Any], workload: Any, flags: Any = None, accumulation: int = 1
) -> Outcome:
    """The same with a bug planted in every process; it must only strike where several ranks train."""
    with plant():
        return judge(place, workload, flags or {}, accumulation)


def found(outcome: Outcome) -> tuple[str, int, str | None]:
    """(cause, step, parameter) of a mismatch."""
    assert outcome.verdict == "differs", outcome
    return outcome.mismatch.cause, outcome.mismatch.step, outcome.mismatch.parameter


def many() -> bool:
    """Whether several ranks train right now."""
    return TRAINING_ON[0] > 1


@contextlib.contextmanager
def knows_who_trains() -> Iterator[None]:
    """Keeps TRAINING_ON."""
    run = loop.run

    def told(job: Any, place: RankContext, **kwargs: Any) -> Any:
        TRAINING_ON[0] = place.world_size
        try:
            return run(job, place, **kwargs)
        finally:
            TRAINING_ON[0] = 1

    with mock.patch.object(verification.loop, "run", told):
        yield


@contextlib.contextmanager
def broken_strategy(apply: Any) -> Iterator[None]:
    """The strategy that variants on several workers are trained with meanwhile."""
    with mock.patch.dict(STRATEGIES, {BROKEN: apply}), knows_who_trains():
        yield


BROKEN = "broken"


@contextlib.contextmanager
def every_rank_reads_the_same() -> Iterator[None]:
    """The forgotten DistributedSampler: all ranks read the part of rank 0."""
    opened = Input.open

    def broken(self: Input, split: Split, part: Part, *more: Any) -> StepStream:
        return opened(self, split, dataclasses.replace(part, rank=0), *more)

    with mock.patch.object(Input, "open", broken):
        yield


def _variant(
    workload: Any, flags: dict[str, Any], world_size: int, accumulation: int, steps: int
) -> tuple[Variant, Any]:
    size = flags.get("batch.global_size", 8) // world_size // accumulation
    more = {"scale.workers": world_size, "batch.micro_size": size}
    job, sources = make_job(workload, {"precision.dtype": "fp32", **flags, **more})
    if world_size > 1 and BROKEN in STRATEGIES:
        job = with_strategy(job, BROKEN)
    in_check, own = short_job(job, steps=steps, precision="fp64"), short_job(job, steps=steps)
    return Variant(job.recipe.strategy, world_size, accumulation, in_check, own), sources
