"""Idle time of a pipeline's workers, by schedule.

Times are per micro-batch and worker, over all stages of that worker. Used by strategies.pipeline.apply, which also
reports the measured share. Communication is ignored, and stages are assumed to take equally long.
"""

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")


def bubble_over_ideal(
    schedule: str, *, num_workers: int, num_micro_batches: int, stages_per_worker: int = 1, weight_share: float = 1 / 3
) -> float:
    """Idle time of a worker relative to its working time, for one step.

    gpipe and 1f1b: (p - 1) / m (Huang et al. 2019, arXiv:1811.06965; Narayanan et al. 2021, arXiv:2104.04473, section
    2.2). interleaved_1f1b: (p - 1) / (v m), the same paper, with v stages a worker. zero_bubble: (p - 1) (F + B - W) /
    (v m (F + B + W)) for forward F, gradients of inputs B and of weights W (Qi et al. 2023, arXiv:2401.10241, table 2,
    ZB-H1; the v is that of interleaving). weight_share: W / (F + B + W).
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"{schedule} is not one of {', '.join(SCHEDULES)}")
    if min(num_workers, num_micro_batches, stages_per_worker) < 1 or not 0 <= weight_share <= 0.5:
        raise ValueError("numbers must be at least 1, and weight_share between 0 and 1/2")
    if schedule in ("gpipe", "1f1b"):
        stages_per_worker = 1
    idle = (num_workers - 1) / (stages_per_worker * num_micro_batches)
    return idle * (1 - 2 * weight_share) if schedule == "zero_bubble" else idle


def bubble_share(schedule: str, **sizes: float) -> float:
    """Idle share of a worker's step: b / (1 + b) of `bubble_over_ideal`, (p - 1) / (m + p - 1) for 1f1b."""
    over_ideal = bubble_over_ideal(schedule, **sizes)  # type: ignore[arg-type]
    return over_ideal / (1 + over_ideal)


def suits(schedule: str, *, num_workers: int, num_micro_batches: int) -> bool:
    """Whether torch's schedule supports this number of micro-batches.

    interleaved_1f1b and zero_bubble use equal rounds of at least `num_workers` micro-batches.
    """
    if schedule in ("gpipe", "1f1b"):
        return num_micro_batches >= 1
    return num_micro_batches >= 1 and num_micro_batches % max(1, num_micro_batches // num_workers) == 0


def runs(schedule: str, *, num_workers: int, num_micro_batches: int) -> list[int]:
    """Split the micro-batches into sizes to run through the schedule in turn, if it does not support all at once."""
    left, found = num_micro_batches, []
    while left:
        size = next(n for n in range(left, 0, -1) if suits(schedule, num_workers=num_workers, num_micro_batches=n))
        found.append(size)
        left -= size
    return found
