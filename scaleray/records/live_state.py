"""Live state of a run: `live.json` in its folder, and the answer of its recorder in a cluster.

Durations are seconds, `..._at` are seconds since 1970. Unknown values are None, empty or omitted, never 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from scaleray.common.printed import figures
from scaleray.records.alert_record import Alert
from scaleray.records.json_record import JsonRecord

FILE = "live.json"
STARTING, RUNNING, LOST = "STARTING", "RUNNING", "LOST"
"""Statuses of a run that has not ended; MLflow's statuses (FINISHED, FAILED, KILLED) are for ended runs. LOST: no
heartbeat for LOST_S, and no report of its end."""
LOST_S = 30.0


@dataclass(frozen=True)
class RecentSteps:
    """Measurements of a worker's last steps, over about a second."""

    step: int
    """Number of the last of these steps."""
    num_steps: int
    step_s: float
    """Mean step time; the phases are means, too."""
    phases: dict[str, float]
    """Mean seconds by the values of `Phase`; phases that took no time are omitted."""
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes: `resident_bytes` of its process, `peak_bytes` as in `MemoryPeak`, and on a GPU the numbers of
    `MemoryNumbers`."""


@dataclass(frozen=True)
class RankNow:
    """Activity of one worker."""

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
    """Lateness at collectives, per step: the longest wait of any rank minus its own wait. None with one rank, and if no
    rank waits for another.
    """
    memory: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class LiveState(JsonRecord):
    """State of a run at one moment."""

    name: str
    kind: str = "train"
    """Kind of its eventual record: `train`, `study` or `sweep`."""
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
    """Seconds left at the mean speed since its start."""
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    curve: list[tuple[float, float | None]] = field(default_factory=list)
    """Loss over the whole run as (step, loss), each the mean of some steps; None if it was not finite."""
    step_time_s: float | None = None
    """Mean of the last half minute, as are the next three."""
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    input_wait_share: float | None = None
    best_samples_per_s: float | None = None
    """Highest throughput in samples per second over half a minute so far."""
    expected_samples_per_s: float | None = None
    """Predicted throughput of this training, by a study or the planner."""
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
    """Share of its time so far spent in steps that count."""
    checkpoint_step: int | None = None
    checkpoint_at: float | None = None
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of each part of a step in the last second or so, by the values of `Phase`: mean over ranks."""
    ranks: list[RankNow] = field(default_factory=list)
    alerts: list[Alert] = field(default_factory=list)
    """Newest state of each alert."""
    events: list[str] = field(default_factory=list)
    """Latest warnings and other events, the newest last."""
    waiting_points: int = 0
    """Points that MLflow has not accepted yet."""
    done: float | None = None
    """Completed part of `total` of a study or a sweep, in `unit`."""
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
    """Lateness of each rank at the collectives of a step, from the seconds that each waits in them: the rank with the
    longest wait arrived first.
    """
    longest = max(waits, default=0.0)
    return [longest - wait for wait in waits]
