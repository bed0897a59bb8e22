"""Records of sweeps: all trials, the goodput of batch sizes, and the conclusions.

Intervals are as in `scaleray.records.study_record`.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal, final

from scaleray.common import metric_names as names
from scaleray.common.printed import quantity, shortened
from scaleray.records.json_record import JsonRecord
from scaleray.records.rows import Row
from scaleray.records.study_record import Conditions, Estimate


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training of a sweep. status: `finished`, `stopped early`, `target reached`, `target missed`, `diverged` (its
    loss or gradient became NaN or infinite), `failed` or `never fits`."""

    number: int
    status: str
    batch_size: int
    rule: str
    learning_rate: float
    """Learning rate after applying the rule."""
    optimizer: str
    warmup: str
    seed: int
    workers: int
    settings: dict[str, Any] = field(default_factory=dict)
    """All keys set by the trial, as dotted names, with their values."""
    metric: str = ""
    value: float | None = None
    """Last value of the metric."""
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """(samples, seconds of training, value of the metric) of each evaluation."""
    recorded_at: list[float] = field(default_factory=list)
    """Wall clock of each evaluation in `curve`, in seconds since 1970. Empty in older records."""
    samples_to_target: int | None = None
    time_to_target_s: float | None = None
    samples: int = 0
    training_time_s: float = 0.0
    total_time_s: float = 0.0
    """Seconds during which the trial had its workers."""
    ended_at: float | None = None
    """Time of the trial's end, in seconds since 1970; None in older records."""
    samples_per_s: float | None = None
    noise_scale: float | None = None
    """Noise scale that represents the whole training, see `NoiseWindows.effective`. None with an interval means that it
    is too large to resolve.
    """
    noise_interval: tuple[float, float | None] | None = None
    """95 % interval of the noise scale; an upper end of None is infinite."""
    goodput: float | None = None
    """Goodput of this training, in reference-batch samples per second, derived from its samples to the target."""
    error: str = ""
    run_id: str = ""
    same_as: int | None = None
    """Number of the trial whose training and measurements this trial shares, as both lead to the same training."""

    def rows(self) -> list[Row]:
        """Measurements of the trial."""
        return [
            Row(names.TRIAL_VALUE, self.value),
            Row(names.TRIAL_SAMPLES_TO_TARGET, self.samples_to_target),
            Row(names.TRIAL_TIME_TO_TARGET_S, self.time_to_target_s),
            Row(names.TRIAL_SAMPLES, self.samples),
            Row(names.TRIAL_TRAINING_TIME_S, self.training_time_s),
            Row(names.TRIAL_TOTAL_TIME_S, self.total_time_s),
            Row(names.TRIAL_SAMPLES_PER_S, self.samples_per_s),
            Row(names.TRIAL_NOISE_SCALE, self.noise_scale, self.noise_interval or (None, None)),
            Row(names.TRIAL_GOODPUT, self.goodput),
        ]


@dataclass(frozen=True, kw_only=True)
class GoodputPoint:
    """Estimates for a batch size in a guided sweep. Efficiency and goodput are relative to `batch_size` samples at the
    reference."""

    batch_size: int
    samples_per_s: Estimate
    statistical_efficiency: Estimate
    goodput: Estimate
    predicted_steps: float | None
    predicted_samples: float | None
    is_trusted: bool
    """Whether the batch size is within a factor of 4 of one with measured noise."""
    is_measured: bool = False

    def rows(self) -> list[Row]:
        """Rows of values for the batch size."""
        return [
            self.samples_per_s.row(names.BATCH_SAMPLES_PER_S),
            self.statistical_efficiency.row(names.BATCH_EFFICIENCY),
            self.goodput.row(names.BATCH_GOODPUT),
            Row(names.BATCH_PREDICTED_SAMPLES, self.predicted_samples),
        ]


@final
@dataclass(frozen=True, kw_only=True)
class SweepRecord(JsonRecord):
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
    """Marks, as on points, that apply to the whole sweep."""
    words: list[str] = field(default_factory=list)
    """Result in sentences: the fastest and the cheapest setting, the knee, and the limit of each rule."""
    started_at: float
    duration_s: float
    tracking_uri: str = ""
    experiment_id: str = ""
    run_id: str = ""
    mlflow_link: str = ""
    folder: str = ""

    @property
    def asked_sizes(self) -> dict[int, int]:
        """Batch sizes in samples by requested size, if that is in tokens; otherwise empty."""
        if (self.config.get("batch") or {}).get("unit") != "tokens":
            return {}
        known = (t for t in self.trials if "batch.global_size" in t.settings and t.status != "never fits")
        return dict(sorted((int(t.settings["batch.global_size"]), t.batch_size) for t in known))

    @property
    def reference_batch_size(self) -> int | None:
        """Batch size, in samples as in trials, for which the config's learning rate was tuned."""
        optimizer, batch = (self.config.get(key) or {} for key in ("optimizer", "batch"))
        asked: int | None = optimizer.get("reference_batch_size") or batch.get("global_size")
        sizes = self.asked_sizes
        if asked is None or not sizes:
            return asked
        nearest = min(sizes, key=lambda size: abs(size - asked))
        return max(1, round(asked / nearest * sizes[nearest]))

    @property
    def summary(self) -> str:
        """The first two conclusions: the fastest setting, and what the search saved."""
        return " ".join(self.words[:2])

    def lines(self) -> list[str]:
        """Lines with the number of trials, the conclusions, and the location of the sweep."""
        counts = Counter(trial.status for trial in self.trials)
        number = quantity(len(self.trials), "trial")
        where = [f"MLflow: {self.mlflow_link}" if self.mlflow_link else "", f"folder: {self.folder}"]
        return [
            f"sweep {self.name}: {number}, ranked by {self.metric} ({self.direction})",
            ", ".join(f"{count} {status}" for status, count in counts.most_common()),
            *shortened(self.words, 5),
            *filter(None, where),
        ]
