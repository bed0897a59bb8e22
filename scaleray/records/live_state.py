"""Live state of a run, as in `live.json` in its folder and in its recorder's answer in a cluster.

Durations are in seconds; `..._at` are times in seconds since 1970. Unknown values are None, empty or omitted, never 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from scaleray.common.printed import figures
from scaleray.records.alert_record import Alert
from scaleray.records.json_record import JsonRecord

FILE = "live.json"
STARTING, RUNNING, LOST = "STARTING", "RUNNING", "LOST"
"""Statuses of a run that has not ended; ended runs have MLflow's (FINISHED, FAILED, KILLED). LOST: no heartbeat for
LOST_S seconds, and no report of its end."""
LOST_S = 30.0


@dataclass(frozen=True)
class RecentSteps:
    """Measurements of a worker's last steps, over about a second."""

    step: int
    """Number of the last of these steps."""
    num_steps: int
    step_s: float
    """Mean step time; the phases are means as well."""
    phases: dict[str, float]
    """Mean seconds of each phase, by the values of `Phase`; phases without time are omitted."""
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes: `resident_bytes` of its process, `peak_bytes` as in `MemoryPeak`, and on a GPU the numbers of
    `MemoryNumbers`."""


@dataclass(frozen=True)
class RankNow:
    """What one worker is doing."""

    rank: int
    node: str
    step: int
    phase: str
    since_s: float
    """Seconds in the current phase."""
    silent_s: float
    """Seconds since its last heartbeat."""
    step_time_s: float | None = None
    late_s: float | None = None
    """Lateness at collectives per step: the longest wait of any rank minus its own wait. None with one rank, or if no
    rank waits for another.
    """
    memory: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class LiveState(JsonRecord):
    """State of a run at a point in time."""

    name: str
    kind: str = "train"
    """Kind of its future record: `train`, `study` or `sweep`."""
    status: str = STARTING
    """`STARTING`, `RUNNING`, `LOST`, or, after its end, `FINISHED`, `FAILED` or `KILLED`."""
    verdict: str = ""
    """Reason for its end, as text."""
    run_id: str = ""
    """Id in MLflow."""
    mlflow_link: str = ""
    run_dir: str = ""
    strategy: str = ""
    workers: int = 0
    started_at: float | None = None
    seen_at: float | None = None
    """Time of the run's last report."""
    step: int = 0
    total_steps: int | None = None
    epoch: float | None = None
    left_s: float | None = None
    """Estimated seconds left, at the mean speed since its start."""
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    curve: list[tuple[float, float | None]] = field(default_factory=list)
    """Loss over the whole run as (step, loss), each the mean of some steps; None if it was not finite."""
    step_time_s: float | None = None
    """Mean over the last half minute, as are the next three fields."""
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    input_wait_share: float | None = None
    best_samples_per_s: float | None = None
    """Highest throughput so far over any half minute, in samples per second."""
    expected_samples_per_s: float | None = None
    """Throughput of this training as predicted by a study or the planner."""
    metrics: dict[str, float | None] = field(default_factory=dict)
    """Last evaluation, by `split/metric`."""
    judged_by: str = ""
    """Evaluation metric that measures the run's success."""
    best: float | None = None
    """Best value of `judged_by` so far; None if the better direction is unknown."""
    nonfinite_steps: int = 0
    attempts: int = 1
    """Number of starts, including restarts after lost workers."""
    repeated_steps: int = 0
    goodput: float | None = None
    """Share of its time so far that was spent in steps that count."""
    checkpoint_step: int | None = None
    checkpoint_at: float | None = None
    phases: dict[str, float] = field(default_factory=dict)
    """Mean seconds over ranks of each part of a step, during about the last second, by the values of `Phase`."""
    ranks: list[RankNow] = field(default_factory=list)
    alerts: list[Alert] = field(default_factory=list)
    """Newest state of each alert."""
    events: list[str] = field(default_factory=list)
    """Latest warnings and other events, newest last."""
    waiting_points: int = 0
    """Points that MLflow has not accepted yet."""
    done: float | None = None
    """Number of completed units of a study or a sweep, out of `total`, in `unit`."""
    total: float | None = None
    unit: str = ""
    notes: list[str] = field(default_factory=list)
    """Notes on this state, such as files that could not be read."""

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended."""
        return self.status not in (STARTING, RUNNING, LOST)

    @property
    def firing(self) -> list[Alert]:
        """Alerts that are still firing."""
        return [alert for alert in self.alerts if alert.is_firing]

    def lines(self) -> list[str]:
        """Summary of the run in a few lines."""
        of = f" of {self.total_steps}" if self.total_steps else ""
        return [
            f"{self.kind} {self.name}: {self.status}",
            f"step {self.step}{of}" + (f", about {self.left_s:.0f} s left" if self.left_s is not None else ""),
            figures({"loss": self.loss, "samples/s": self.samples_per_s}),
            *(f"{alert.severity}: {alert.summary}" for alert in self.firing),
            *([self.verdict.splitlines()[0]] if self.verdict else []),
        ]


def late_s(waits: Sequence[float]) -> list[float]:
    """Lateness of each rank at the collectives of a step, given the seconds that each waits in them. The rank with the
    longest wait arrived first.
    """
    longest = max(waits, default=0.0)
    return [longest - wait for wait in waits]
