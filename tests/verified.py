"""One variant of a small training, judged by `scaleray verify`'s own code on the ranks of the pool."""

from __future__ import annotations

from typing import Any

from small_runs import make_job

from scaleray.launch.local import stream_opener
from scaleray.training.place import Place
from scaleray.training.verification import Assignment, Outcome, Variant, short_job, verify_group


def judged(place: Place, workload: Any, flags: dict[str, Any], accumulation: int = 1, steps: int = 6) -> Outcome:
    """The outcome beside one process in float64; `own` is the distance in the precision of the flags (default fp32)."""
    flags = {"precision.dtype": "fp32", **flags}
    alone = {k: v for k, v in flags.items() if not k.startswith(("strategy.", "fsdp."))}
    reference, sources = _variant(workload, alone, 1, 1, steps)
    variant, _ = _variant(workload, flags, place.world_size, accumulation, steps)
    opener = stream_opener(reference.job, sources, lambda message: None)
    outcomes, _ = verify_group(place, Assignment(reference, (variant,), 1e-9), {}, open_stream=opener)
    return outcomes[0]


def _variant(
    workload: Any, flags: dict[str, Any], world_size: int, accumulation: int, steps: int
) -> tuple[Variant, Any]:
    size = flags.get("batch.global_size", 8) // world_size // accumulation
    job, sources = make_job(workload, {**flags, "scale.workers": world_size, "batch.micro_size": size})
    in_check, own = short_job(job, steps=steps, precision="fp64"), short_job(job, steps=steps)
    return Variant(job.recipe.strategy, world_size, accumulation, in_check, own), sources
