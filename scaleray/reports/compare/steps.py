"""The steps of a training as steps.csv has them: which of them count for its speed."""

from __future__ import annotations

from dataclasses import dataclass

from scaleray.scaling.curves.steady_state import steady_state
from scaleray.tracking.find_record import FoundRun
from scaleray.tracking.steps_file import step_rows


@dataclass(frozen=True)
class SteadySteps:
    """Times in s of the whole batches after the warm-up. why: why they are not steady, or ""."""

    step_times_s: list[float]
    samples_per_step: int
    why: str
    num_world_sizes: int

    @property
    def num_steps(self) -> int:
        """Number of steady steps."""
        return len(self.step_times_s)

    def times(self, *, per_sample: bool) -> list[float]:
        """Seconds per step, or per sample."""
        return [time / (self.samples_per_step if per_sample else 1) for time in self.step_times_s]

    def described(self) -> str:
        """The number of steady steps in words, or `no step times` with the reason."""
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
