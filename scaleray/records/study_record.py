"""Records of scaling studies: measurements and conclusions, as used by fits, MLflow and reports.

Intervals contain the true value with 95 % confidence, from a bootstrap over repeated measurements unless stated
otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

from scaleray.common import metric_names as names
from scaleray.common.metric import Metric
from scaleray.common.printed import quantity, shortened
from scaleray.records.json_record import JsonRecord
from scaleray.records.rows import Row

Mode = Literal["strong", "weak"]


@dataclass(frozen=True)
class Estimate:
    """A value with its interval, low <= value <= high."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"

    def row(self, metric: Metric) -> Row:
        """The value and its interval as a row of a record."""
        return Row(metric, self.value, (self.low, self.high))


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Conditions that points on one curve must share, as hashes for comparison and as facts that show differences."""

    config_hash: str
    """Hash of the keys that determine the training, without the number of workers and values derived from it."""
    code_hash: str
    """Hash of scaleray's version, the git commit, and the workload's own source."""
    environment_hash: str
    topology_hash: str
    environment: dict[str, Any] = field(default_factory=dict)
    topology: dict[str, Any] = field(default_factory=dict)
    """Nodes with their cores, accelerators and placement of the workers."""


@dataclass(frozen=True, kw_only=True)
class ToTarget:
    """Steps, samples and time of a training up to the evaluation that reached the config's target, or up to its end."""

    is_reached: bool
    steps: int
    samples: int
    time_s: float
    """Seconds of training, without evaluations."""
    metric: str
    value: float
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """(samples, seconds, value of the metric) of each evaluation."""
    recorded_at: list[float] = field(default_factory=list)
    """Wall clock of each evaluation in `curve`, in seconds since 1970. Empty in older records."""


@dataclass(frozen=True, kw_only=True)
class NoiseHistory:
    """Gradient noise scale over a training or its beginning, in samples. It is the batch size at which noise equals
    signal."""

    scale: float | None
    """Average of the noise scale at the end; None if it is too large to resolve."""
    interval: tuple[float, float | None] | None = None
    """95 % interval by Fieller's method; an upper end of None is infinite. None for fewer than 3 measurements."""
    way: str
    """Gradients used for the measurement: `workers`, `first micro-batch`, or `consecutive steps`, which underestimate
    it."""
    num_measurements: int
    covers: str
    """Measured part of the training: `its first steps`, or `the training to the target`."""
    curve: list[tuple[int, float | None]] = field(default_factory=list)
    """(samples trained so far, average so far) of each measurement, or of every second, fourth ... one if there are
    many."""


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """One measurement at a number of workers: raw values, including those of the warm-up."""

    step_times_s: list[float]
    """Seconds of every optimizer step on the first worker."""
    input_waits_s: list[float]
    """Seconds of each of these steps that the first worker spent waiting for input."""
    input_share: float
    """Share of the steady time spent waiting for input, on the worker with the largest share."""
    alone_s: float | None = None
    """Median seconds of a step with the same micro-batches and update but without communication and input, on the same
    workers at the same time; mean over the workers. None if a worker cannot do its part of a step alone."""
    slowest_alone_s: float | None = None
    """The same quantity, on the slowest worker of each step."""
    comm_s: float | None = None
    """Seconds of a step's collectives, run without any other work. None if unknown."""
    sent_bytes: float = 0.0
    """Bytes sent by the first worker in a step."""
    peak_memory_bytes: int = 0
    """Peak memory of the worker with the highest peak."""
    hardware: list[dict[str, Any]] = field(default_factory=list)
    """Hardware of the workers, each type once."""
    is_emulated: bool = False
    measured_at: float
    """Time of the measurement, in seconds since 1970."""
    study: str = ""
    """Name of the study that took the measurement."""
    round: int | None = None
    """Round of that study. The same workers took all measurements of a round in succession. None for a measurement that
    was launched separately."""
    placement: dict[str, int] = field(default_factory=dict)
    """Number of workers on each node. Empty for measurements by older versions."""

    @property
    def round_name(self) -> str:
        """Name that only measurements of the same round share; "" if the round has no other measurement."""
        return "" if self.round is None else f"{self.study}/{self.round}"


@dataclass(frozen=True, kw_only=True)
class Point:
    """Measurements at one number of workers. Times are seconds of one optimizer step."""

    mode: Mode
    workers: int
    strategy: str
    global_batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    turns: list[list[float]]
    """Step times in steady state, in seconds, one list per measurement."""
    rounds: list[str] = field(default_factory=list)
    """Name of each measurement's round, see `Repeat.round_name`; measurements of two points in the same round can be
    compared in pairs."""
    num_warmup_steps: int
    """Number of omitted initial steps in each measurement."""
    step_time_s: Estimate
    """Median step time over the steps of all measurements."""
    samples_per_s: Estimate
    tokens_per_s: Estimate | None = None
    compute_s: float
    """Computing time. With `exposed_comm_s`, `input_wait_s` and `other_s` it sums to the step time."""
    exposed_comm_s: float | None
    """Time that the step waits for communication, including copies and reductions. None if it cannot be separated from
    computing, as in tensor and pipeline parallelism, where `compute_s` includes both.
    """
    input_wait_s: float
    other_s: float = 0.0
    """Time spent waiting for the slowest worker of a step."""
    comm_s: float | None = None
    """Time of all communication, hidden or not; None if unknown."""
    sent_bytes: float = 0.0
    mfu: float | None = None
    """Model FLOPs per second divided by the devices' peak; None if the peak is unknown."""
    peak_memory_bytes: int = 0
    cost_per_million_samples: float | None = None
    noise_scale: float | None = None
    noise: NoiseHistory | None = None
    """Method of measuring `noise_scale`, and its history over the training."""
    to_target: ToTarget | None = None
    marks: list[str] = field(default_factory=list)
    """Conditions to show with all values of the point: `oversubscribed`, `emulated`, `relaunched`."""
    reused_from: str | None = None
    """Name of the study that measured the point, if it was a different one."""
    measured_at: float
    """Time of the measurement, in seconds since 1970."""
    run_id: str = ""
    """Id of the point's run in MLflow."""

    def rows(self) -> list[Row]:
        """Measurements of the point."""
        return _rows(self, [])


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """A point relative to the base of its curve. Efficiency: n0 t(n0) / (n t(n)) if strong, t(n0) / t(n) if weak."""

    point: Point
    speedup: Estimate
    """Throughput relative to the base, times the base's workers: n on an ideal curve."""
    efficiency: Estimate

    def rows(self) -> list[Row]:
        """Measurements of the point, and its values relative to the base."""
        return _rows(self.point, self.relative_rows())

    def relative_rows(self) -> list[Row]:
        """Values of the point relative to the base."""
        return [self.speedup.row(names.POINT_SPEEDUP), self.efficiency.row(names.POINT_EFFICIENCY)]


def _rows(point: Point, relative: Sequence[Row]) -> list[Row]:
    to = point.to_target
    reached = to if to and to.is_reached else None
    return [
        point.step_time_s.row(names.POINT_STEP_TIME_S),
        point.samples_per_s.row(names.POINT_SAMPLES_PER_S),
        # its interval is that of samples/s, times the tokens per sample
        Row(names.POINT_TOKENS_PER_S, point.tokens_per_s.value if point.tokens_per_s else None),
        *relative,
        Row(names.POINT_COMPUTE_S, point.compute_s),
        Row(names.POINT_EXPOSED_COMM_S, point.exposed_comm_s),
        Row(names.POINT_INPUT_WAIT_S, point.input_wait_s),
        Row(names.POINT_OTHER_S, point.other_s),
        Row(names.RECORD_COMM_S, point.comm_s),
        Row(names.RECORD_SENT_BYTES, point.sent_bytes),
        Row(names.POINT_MFU, point.mfu),
        Row(names.PEAK_MEMORY_BYTES, point.peak_memory_bytes),
        Row(names.POINT_COST, point.cost_per_million_samples),
        Row(names.POINT_NOISE_SCALE, point.noise_scale),
        Row(names.RECORD_TARGET_REACHED, to.is_reached if to else None),
        Row(names.POINT_SAMPLES_TO_TARGET, reached.samples if reached else None),
        Row(names.POINT_TIME_TO_TARGET_S, reached.time_s if reached else None),
    ]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A law fitted to a curve. `held_out_error`: mean relative error of its speed-up at points left out of the fit."""

    law: str
    """Name of the law: `amdahl`, `gustafson`, `usl` or `planner`."""
    parameters: dict[str, Estimate]
    held_out_error: float | None
    band: list[tuple[float, Estimate]] = field(default_factory=list)
    """(workers, speed-up) along the curve, to one doubling beyond the points."""


@dataclass(frozen=True, kw_only=True)
class NextDoubling:
    """Prediction for twice as many workers as the largest point has."""

    workers: int
    gain: Estimate
    """Throughput at `workers` relative to that of the largest point; 2 is ideal."""
    efficiency: Estimate
    cost_factor: float
    """Cost per second relative to that of the largest point."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Points of one mode by number of workers, and the conclusions from them."""

    mode: Mode
    base_workers: int
    points: list[CurvePoint]
    fits: list[Fit] = field(default_factory=list)
    best_law: str | None = None
    next_doubling: NextDoubling | None = None
    limit: str = ""
    """What limits the largest point: `communication`, `input`, `contention`, `compute`, `computing or communication`
    (which some strategies cannot separate) or `nothing yet`.
    """
    verdict: str = ""
    """One or two sentences on the next doubling, or on why it is not predicted, and on what to change."""


@final
@dataclass(frozen=True, kw_only=True)
class StudyRecord(JsonRecord):
    """A finished scaling study."""

    name: str
    command: str
    """Command that repeats the study."""
    config: dict[str, Any]
    conditions: Conditions
    curves: list[Curve]
    price_per_worker_hour: float | None = None
    currency: str = ""
    marks: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    """Verdicts of all curves, and further notes for the reader."""
    model_profile: dict[str, Any] | None = None
    """Counted costs of the model for the planner, in the form of `records/workload_profile.py`. None if they were not
    counted."""
    noise: list[tuple[int, float]] = field(default_factory=list)
    """(samples, noise scale) over the training of the point with most measurements, if measured."""
    started_at: float
    duration_s: float
    tracking_uri: str = ""
    experiment_id: str = ""
    run_id: str = ""
    mlflow_link: str = ""
    folder: str = ""

    @property
    def summary(self) -> str:
        """Verdict of the first curve."""
        return self.curves[0].verdict if self.curves else ""

    def lines(self) -> list[str]:
        """Lines with each point of the curves, the conclusions, and the location of the study."""
        points = [
            f"{curve.mode}, {quantity(one.point.workers, 'worker')}: "
            f"{one.point.samples_per_s.value:.4g} samples/s, speed-up {one.speedup.value:.3g}"
            for curve in self.curves
            for one in curve.points
        ]
        where = [f"MLflow: {self.mlflow_link}" if self.mlflow_link else "", f"folder: {self.folder}"]
        return [f"study {self.name}", *shortened(points), *shortened(self.words, 2), *filter(None, where)]
