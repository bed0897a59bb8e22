"""The steps of a training as steps.csv has them: which of them count for its speed."""

from __future__ import annotations

from dataclasses import dataclass

from scaleray.reports.run_report import step_rows
from scaleray.scaling.steady_state import steady_state
from scaleray.tracking.found_run import FoundRun


@dataclass(frozen=True)
class SteadySteps:
    """Times in s of the whole batches after the warm-up. why: why they are not steady, or ""."""

    step_times_s: list[float]
    samples_per_step: int
    why: str
    num_world_sizes: int

    @property
    def num_steps(self) -> int:
        """How many there are."""
        return len(self.step_times_s)

    def times(self, *, per_sample: bool) -> list[float]:
        """s per step, or per sample."""
        return [time / (self.samples_per_step if per_sample else 1) for time in self.step_times_s]

    def described(self) -> str:
        """`no step times`, or how many there are."""
        return (
            f"{self.num_steps} steady steps, too few"
            if self.step_times_s
            else "no step times: its steps.csv is missing or empty"
        )


def steady_steps(run: FoundRun) -> SteadySteps:
    """The steps after the warm-up. The last batch of an epoch may be smaller; only those of full size are compared."""
    rows = [row for row in step_rows(run.steps) if row.get("step_time_s", 0.0) > 0]
    size = int(max((row["num_samples"] for row in rows), default=0))
    whole = [row for row in rows if row["num_samples"] == size]
    times = [row["step_time_s"] for row in whole]
    steady = steady_state(times)
    sizes = {row["world_size"] for row in whole if "world_size" in row}
    return SteadySteps(times[steady.first :], size, steady.why, len(sizes))
