"""Frozen results of studies and sweeps: what they measured and concluded, for fits, MLflow and reports. JSON both ways.

A `Point` is measured by a study, a `Trial` by a sweep. Intervals are those in which the true value lies with 95 %
confidence, from a bootstrap over repeated turns unless said otherwise.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from scaleray.records import jsonable

Mode = Literal["strong", "weak"]


@dataclass(frozen=True)
class Estimate:
    """A value with its interval, low <= value <= high."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What must be the same for points to stand on one curve, as hashes to compare and as facts to show the difference."""

    config_hash: str
    """Of what decides the training, without the number of workers and what follows from it."""
    code_hash: str
    """Of scaleray's version, the git commit, and the workload's own source."""
    environment_hash: str
    topology_hash: str
    environment: dict[str, Any] = field(default_factory=dict)
    topology: dict[str, Any] = field(default_factory=dict)
    """Nodes with their cores, accelerators and where the workers were placed."""


@dataclass(frozen=True, kw_only=True)
class ToTarget:
    """What a training to the config's target took. Numbers up to the evaluation that reached it, or to the end."""

    is_reached: bool
    steps: int
    samples: int
    time_s: float
    """Of training; evaluations are left out."""
    metric: str
    value: float
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """(samples, seconds, value of the metric) of each evaluation."""
    recorded_at: list[float] = field(default_factory=list)
    """Wall clock of each of these, in seconds since 1970. Empty in older records."""


@dataclass(frozen=True, kw_only=True)
class NoiseCourse:
    """The gradient noise scale over a training or its beginning, in samples: the batch size at which noise equals signal."""

    scale: float | None
    """Average at the end; None: larger than could be resolved."""
    interval: tuple[float, float | None] | None = None
    """95 %, by Fieller's method; None as its upper end is infinite. None for fewer than 3 measurements."""
    way: str
    """From what it was measured: `workers`, `first micro-batch`, or `consecutive steps`, which makes it too small."""
    num_measurements: int
    covers: str
    """`its first steps`, or `the training to the target`."""
    curve: list[tuple[int, float | None]] = field(default_factory=list)
    """(samples trained on before, average so far) of each measurement, or of every second, fourth ... of many."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of a number of workers, as it was measured: raw, the warm-up included."""

    step_times_s: list[float]
    """Of every optimizer step on the first worker, from step to step."""
    input_waits_s: list[float]
    """Part of each of these in which the first worker waited for its input."""
    input_share: float
    """Share of the steady time spent waiting for input, on the worker where it is largest."""
    alone_s: float | None = None
    """Median step of the same micro-batches and update without any communication, on the same workers at the same time,
    input left out: mean over the workers. None where one worker alone cannot do its part of a step."""
    slowest_alone_s: float | None = None
    """The same of the slowest worker of each step."""
    comm_s: float | None = None
    """What a step gives to collectives, sent with nothing beside it. None where that is not known."""
    sent_bytes: float = 0.0
    """A step, by the first worker."""
    peak_memory_bytes: int = 0
    """Of the worker that needed most."""
    hardware: list[dict[str, Any]] = field(default_factory=list)
    """Each kind of worker once."""
    is_emulated: bool = False
    measured_at: float
    """Seconds since 1970."""
    study: str = ""
    """Name of the study that measured it."""
    round: int | None = None
    """Of that study: turns of one round were taken one after the other, by the same workers. None for a turn launched alone."""

    @property
    def round_name(self) -> str:
        """Equal for turns of one round and for no others; "" where nothing was measured beside it."""
        return "" if self.round is None else f"{self.study}/{self.round}"


@dataclass(frozen=True, kw_only=True)
class Point:
    """A number of workers, measured. Times are seconds of one optimizer step."""

    mode: Mode
    workers: int
    strategy: str
    global_batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    turns: list[list[float]]
    """Step times in steady state, a list for each turn."""
    rounds: list[str] = field(default_factory=list)
    """The round of each turn, see `Turn.round_name`; turns of two points in one round can be compared pair by pair."""
    num_warmup_steps: int
    """Steps left out in each turn."""
    step_time_s: Estimate
    """Median over the steps of all turns."""
    samples_per_s: Estimate
    tokens_per_s: Estimate | None = None
    compute_s: float
    """With `exposed_comm_s`, `input_wait_s` and `other_s` it adds up to the step time."""
    exposed_comm_s: float | None
    """Communication that the step waits for, with what goes with it (copies, reductions). None where it cannot be told
    from computing: under tensor and pipeline parallelism, whose `compute_s` holds both."""
    input_wait_s: float
    other_s: float = 0.0
    """Waiting for the slowest worker of a step."""
    comm_s: float | None = None
    """All communication, hidden or not; None where it cannot be told."""
    sent_bytes: float = 0.0
    mfu: float | None = None
    """Model FLOPs a second over the peak of the devices; None where the peak is not known."""
    peak_memory_bytes: int = 0
    cost_per_million_samples: float | None = None
    noise_scale: float | None = None
    noise: NoiseCourse | None = None
    """How `noise_scale` was measured, and its course."""
    to_target: ToTarget | None = None
    marks: list[str] = field(default_factory=list)
    """Conditions that every figure of the point must show: `oversubscribed`, `emulated`, `relaunched`."""
    reused_from: str | None = None
    """The study that measured it, where this one did not."""
    measured_at: float
    """Seconds since 1970."""
    run_id: str = ""
    """Of the point in MLflow."""


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """A point beside the curve's base. Strong efficiency: n0 t(n0) / (n t(n)); weak: t(n0) / t(n)."""

    point: Point
    speedup: Estimate
    """Throughput over that of the base, times the base's workers: n on an ideal curve."""
    efficiency: Estimate


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A law fitted to a curve. `held_out_error`: mean relative error of the speed-up of points that were left out of the fit."""

    law: str
    """`amdahl`, `gustafson`, `usl` or `planner`."""
    parameters: dict[str, Estimate]
    held_out_error: float | None
    band: list[tuple[float, Estimate]] = field(default_factory=list)
    """(workers, speed-up) along the curve, one doubling further than the points."""


@dataclass(frozen=True, kw_only=True)
class NextDoubling:
    """What twice the workers would give over the largest point."""

    workers: int
    gain: Estimate
    """Throughput at `workers` over that of the largest point; 2 is ideal."""
    efficiency: Estimate
    cost_factor: float
    """Price of a second over that of the largest point."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The points of one mode by number of workers, and what follows from them."""

    mode: Mode
    base_workers: int
    points: list[CurvePoint]
    fits: list[Fit] = field(default_factory=list)
    best_law: str | None = None
    next_doubling: NextDoubling | None = None
    limit: str = ""
    """What limits the largest point: `communication`, `input`, `contention`, `compute`, `computing or communication` (which
    some strategies cannot tell apart) or `nothing yet`."""
    verdict: str = ""
    """One or two sentences: the next doubling, or why nothing is said about it, and what to change."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training of a sweep. status: `finished`, `stopped early`, `target reached`, `target missed`, `diverged` (its loss or
    gradient became NaN or infinite), `failed` or `never fits`."""

    number: int
    status: str
    batch_size: int
    rule: str
    learning_rate: float
    """After the rule."""
    optimizer: str
    warmup: str
    seed: int
    workers: int
    settings: dict[str, Any] = field(default_factory=dict)
    """Every key that the trial sets, dotted."""
    metric: str = ""
    value: float | None = None
    """Last value of the metric."""
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """(samples, seconds of training, value of the metric) of each evaluation."""
    recorded_at: list[float] = field(default_factory=list)
    """Wall clock of each of these, in seconds since 1970. Empty in older records."""
    samples_to_target: int | None = None
    time_to_target_s: float | None = None
    samples: int = 0
    training_time_s: float = 0.0
    total_time_s: float = 0.0
    """From when the trial had its workers to its end."""
    ended_at: float | None = None
    """Seconds since 1970; None in older records."""
    samples_per_s: float | None = None
    noise_scale: float | None = None
    """The one that stands for the whole training, see `NoiseWindows.effective`; None with an interval: larger than could be resolved."""
    noise_interval: tuple[float, float | None] | None = None
    """95 %; None as its upper end is infinite."""
    goodput: float | None = None
    """Samples of the reference batch that a second of this training was worth, by samples to the target."""
    error: str = ""
    run_id: str = ""
    same_as: int | None = None
    """Number of the trial whose training this one's settings come to as well: it was trained once, and the figures are that one's."""


@dataclass(frozen=True, kw_only=True)
class GoodputPoint:
    """A batch size as a guided sweep sees it. Efficiency and goodput are relative to `batch_size` examples at the reference."""

    batch_size: int
    samples_per_s: Estimate
    statistical_efficiency: Estimate
    goodput: Estimate
    predicted_steps: float | None
    predicted_samples: float | None
    is_trusted: bool
    """Within 4 times a batch size whose noise was measured."""
    is_measured: bool = False


@dataclass(frozen=True, kw_only=True)
class SweepRecord:
    """A finished sweep."""

    name: str
    command: str
    config: dict[str, Any]
    conditions: Conditions
    metric: str
    direction: Literal["min", "max"]
    target: str | None
    scheduler: str
    search: str
    trials: list[Trial]
    goodput: list[GoodputPoint] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)
    """As of a point, where they are true of the whole sweep."""
    words: list[str] = field(default_factory=list)
    """The result in sentences: fastest, cheapest, the knee, where each rule stopped holding."""
    started_at: float
    duration_s: float
    tracking_uri: str = ""
    experiment_id: str = ""
    run_id: str = ""
    mlflow_link: str = ""
    folder: str = ""

    def to_json(self) -> str:
        """The record as indented JSON."""
        return _to_json(self)

    @classmethod
    def read(cls, path: str | Path) -> SweepRecord:
        """Read what `to_json` wrote. Raises pydantic's ValidationError for anything else."""
        return TypeAdapter(cls).validate_json(Path(path).read_text())


@dataclass(frozen=True, kw_only=True)
class StudyRecord:
    """A finished scaling study."""

    name: str
    command: str
    """How to repeat it."""
    config: dict[str, Any]
    conditions: Conditions
    curves: list[Curve]
    price_per_worker_hour: float | None = None
    currency: str = ""
    marks: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    """Every curve's verdict, and what else a reader should know."""
    noise: list[tuple[int, float]] = field(default_factory=list)
    """(samples, noise scale) over the training of the point with most measurements, where it was measured."""
    started_at: float
    duration_s: float
    tracking_uri: str = ""
    experiment_id: str = ""
    run_id: str = ""
    mlflow_link: str = ""
    folder: str = ""

    def to_json(self) -> str:
        """The record as indented JSON."""
        return _to_json(self)

    @classmethod
    def read(cls, path: str | Path) -> StudyRecord:
        """Read what `to_json` wrote. Raises pydantic's ValidationError for anything else."""
        return TypeAdapter(cls).validate_json(Path(path).read_text())


def _to_json(record: Any) -> str:
    return json.dumps(jsonable(dataclasses.asdict(record)), indent=2)
