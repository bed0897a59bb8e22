"""Results that a worker sends to the recorder, and the record that a run leaves for its readers.

`recorded_at` is the time of an event, in seconds since 1970, by the `steady_time` of the process in which it occurred.
Charts use it because a record may arrive much later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from scaleray.common import metric_names as names
from scaleray.common.parsing import inert_json, load_json
from scaleray.common.printed import figures, printable, quantity
from scaleray.records.alert_record import counted
from scaleray.records.json_record import JsonRecord, check_types, of_known_version
from scaleray.records.judged_metric import JudgedMetric, judged_metric
from scaleray.records.live_state import RecentSteps
from scaleray.records.profile_record import RankMeasurements, RunProfile
from scaleray.records.published import CountedFlops, LinksMeasured, RankSample
from scaleray.records.rows import Row
from scaleray.records.start import steady_time

EMULATED = "emulated"
"""Mark of results in which a timed sleep replaced the computation (`scaleray.emulation`)."""


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, as recorded by one rank; rank 0 sends its record. The loss is the global mean; times are the
    rank's own seconds.

    If a strategy trains replicas separately, loss and count cover only the rank's own samples between two
    synchronisations, and the gradient norm is always the rank's own."""

    step: int
    """Number of this step, from 1."""
    loss: float
    count: float
    """Number of samples or tokens over which the loss was summed on all workers."""
    num_samples: int
    learning_rate: float
    """Learning rate of the optimizer's first group in this step."""
    grad_norm: float | None
    """Norm before clipping; None unless it was requested."""
    step_time_s: float
    """Seconds since the previous step, without evaluations but with the observers' time."""
    input_wait_s: float
    epoch: float
    """Passes over the training data after this step, including the fraction of the current one."""
    is_finite: bool = True
    loss_scale: float | None = None
    world_size: int = 1
    sent_bytes: float = 0.0
    """Bytes of gradients, parameters and activations that the rank passed to collectives in this step."""
    more: dict[str, float] = field(default_factory=dict)
    """Metrics of the strategy or a transform, by name."""
    losses: dict[str, float] = field(default_factory=dict)
    """Each loss of a workload with several losses, whose sum is `loss`."""
    is_own: bool = False
    """Whether loss and count cover only the rank's own samples, in a local step without synchronisation."""
    nonfinite_steps: int = 0
    """Largest number of non-finite steps on any rank since the last synchronisation. Equal on all ranks and nonzero
    only in a synchronisation, so that all ranks react alike."""
    nonfinite_in_a_row: int = 0
    """Largest number of consecutive non-finite steps on any rank, up to this step. Valid in a synchronisation."""
    signals: tuple[float, ...] = ()
    """Sums of the signals that the ranks shared with this step."""
    recorded_at: float = field(default_factory=steady_time, compare=False)


@dataclass(frozen=True)
class EvaluationRecord:
    """Metrics of every evaluated split after `step` steps, named `split/metric`, over all workers."""

    step: int
    metrics: dict[str, float]
    duration_s: float
    recorded_at: float = field(default_factory=steady_time, compare=False)


@dataclass(frozen=True)
class SystemRecord:
    """Utilisation of one node, sampled by its first worker, under the keys of MLflow's own system metrics."""

    node: str
    step: int
    metrics: dict[str, float]
    recorded_at: float = field(default_factory=steady_time, compare=False)


@dataclass(frozen=True)
class CheckpointRecord:
    """A complete checkpoint. bytes_written: part of total_bytes that is new since the previous checkpoint."""

    step: int
    path: str
    bytes_written: int
    total_bytes: int
    duration_s: float
    """Seconds from the start of the checkpoint to its manifest, during the training."""
    stall_s: float
    """Seconds that training waited for the checkpoint on rank 0."""
    recorded_at: float = field(default_factory=steady_time, compare=False)


@dataclass(frozen=True)
class DerivedRecord:
    """Derived values in use, which only the workers know, since a workload's own optimizer may set others."""

    values: dict[str, Any]


@dataclass(frozen=True)
class ModelRecord:
    """Size of the model built by the first worker, and its device."""

    num_parameters: int
    device: str


@dataclass(frozen=True)
class EventRecord:
    """An event for users, reported once: a warning, a restart, or a weaker guarantee than usual."""

    text: str
    kind: str = "info"
    """Kind of event: `info`, `warning`, `hint`, or `resumed`, with the step from which a run continued."""
    step: int | None = None
    recorded_at: float = field(default_factory=steady_time, compare=False)


@dataclass(frozen=True)
class Heartbeat:
    """A heartbeat of one worker. phase: its activity for the last `since_s` seconds; tail: its last log lines."""

    rank: int
    node: str
    process: int
    step: int
    phase: str
    since_s: float
    tail: tuple[str, ...] = ()
    world_size: int = 1
    silent_s: float = 0.0
    """Seconds between the heartbeat's arrival and the time of reading."""
    recent: RecentSteps | None = None
    """Durations of its last steps; None before the second one."""


@dataclass(frozen=True)
class WorkerSummary:
    """Measurements of one worker over the whole run. Those of rank 0 represent the run."""

    rank: int
    node: str
    steps: int
    verdict: str
    """Reason for the end: `done`, `target reached` or `stopped: ...`."""
    samples_per_s: float | None
    """Global samples per second in steady state, excluding the first steps and evaluations."""
    tokens_per_s: float | None
    step_time_s: float | None
    """Median step time in steady state, in seconds."""
    input_wait_share: float | None
    time_to_first_step_s: float
    training_time_s: float
    peak_memory_bytes: int
    nonfinite_steps: int
    sample_order: str
    """What the input guarantees about the order of the samples."""
    strategy: str
    device: str
    model: dict[str, Any] = field(default_factory=dict)
    """Number of parameters, hash of their initial values, whether the computation is emulated, and attributes of the
    model's modules that changed in training."""
    hardware: dict[str, Any] = field(default_factory=dict)
    """Processor and accelerators of this worker's node."""
    compilation: dict[str, Any] = field(default_factory=dict)
    """Result of torch.compile: graphs, graph breaks and failures with file and line. Empty if it was not used."""
    memory: dict[str, Any] = field(default_factory=dict)
    """Parts of this worker's memory in bytes, and the result of the search for a micro-batch size."""
    noise: dict[str, Any] = field(default_factory=dict)
    """Gradient noise scale with its interval and how it was measured. Empty if not measured."""
    start: dict[str, float] = field(default_factory=dict)
    """Seconds of each part of the start, named as in `records/start.py`."""
    best: dict[str, Any] = field(default_factory=dict)
    """Best evaluation by `stop.watch` or `checkpoint.best`: metric, value and step. Empty without one."""
    profile: RankMeasurements | None = None
    """How this worker spent the time of its steps; None if not measured."""


@dataclass(frozen=True)
class LoggedMetrics:
    """Values by name, logged by user code after `step` steps."""

    step: int
    metrics: dict[str, float]
    recorded_at: float = field(default_factory=steady_time, compare=False)


@dataclass(frozen=True)
class LoggedFile:
    """A file logged by user code after `step` steps. path: below the run's `logged/`.

    shape: of an image whose raw bytes `data` are still to be encoded; None: `data` is the file's content.
    """

    step: int
    path: str
    data: bytes = field(repr=False)
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class RepeatedMessages:
    """Messages that another worker may not have sent before it was lost; those that have arrived are ignored."""

    messages: tuple[StepRecord | EvaluationRecord, ...]


WorkerMessage = (
    StepRecord
    | EvaluationRecord
    | SystemRecord
    | CheckpointRecord
    | DerivedRecord
    | ModelRecord
    | EventRecord
    | LoggedMetrics
    | LoggedFile
    | WorkerSummary
    | RankSample
    | LinksMeasured
    | CountedFlops
    | RepeatedMessages
)
Emit = Callable[[WorkerMessage], None]
"""Function that receives a worker's messages."""
Show = Callable[[Sequence[WorkerMessage | Heartbeat]], None]
"""Function that receives a run's messages as they arrive, and the activity of its first worker."""
Say = Callable[[str], None]
"""Function that receives lines of text for the user."""


@dataclass(frozen=True)
class RunRecord(JsonRecord):
    """A finished run, readable without the code that wrote it."""

    name: str
    status: str
    """Status as in MLflow: `FINISHED`, `FAILED` or `KILLED`."""
    verdict: str
    workers: int
    strategy: str
    steps: int
    final_loss: float | None
    metrics: dict[str, float]
    """Last value of every evaluation metric, `split/metric`."""
    samples_per_s: float | None
    tokens_per_s: float | None
    step_time_s: float | None
    input_wait_share: float | None
    time_to_first_step_s: float | None
    training_time_s: float | None
    total_time_s: float
    peak_memory_bytes: list[int]
    nonfinite_steps: int
    sample_order: str
    config: dict[str, Any]
    config_hash: str
    derived: dict[str, Any]
    data: dict[str, Any]
    environment: dict[str, Any]
    environment_hash: str
    tracking_uri: str
    experiment_id: str
    run_id: str
    mlflow_link: str
    run_dir: str
    """Folder with config.yaml, record.json, steps.csv and the final weights."""
    events: list[str] = field(default_factory=list)
    resumed_after: list[int] = field(default_factory=list)
    """Steps of the checkpoints from which the run continued after interruptions and lost workers."""
    compilation: dict[str, Any] = field(default_factory=dict)
    """Result of torch.compile on rank 0, see WorkerSummary."""
    memory: list[dict[str, Any]] = field(default_factory=list)
    """Parts of each worker's memory in bytes, by rank."""
    noise: dict[str, Any] = field(default_factory=dict)
    """Gradient noise scale measured by rank 0, see WorkerSummary."""
    marks: list[str] = field(default_factory=list)
    """Marks that qualify the run's results, such as `emulated`."""
    start: dict[str, float] = field(default_factory=dict)
    """Seconds of each part of the start on the first worker, see `records/start.py`. Empty in older records."""
    best: dict[str, Any] = field(default_factory=dict)
    """Best evaluation by `stop.watch` or `checkpoint.best`: metric, value, step, and the path of its checkpoint, if it
    is retained. Empty in older records."""
    profile: RunProfile | None = None
    """How every rank spent its time. None in older records, and if no step was measured."""
    alerts: list[dict[str, Any]] = field(default_factory=list)
    """Alerts that started firing, see `records/alert_record.py`. Empty in older records."""
    evaluations: dict[str, list[list[float | None]]] = field(default_factory=dict)
    """Step and value of every evaluation, by metric; null for a value that was not finite. Empty in older records."""
    weights: dict[str, dict[str, Any]] = field(default_factory=dict)
    """SHA-256 and size of each file of the final weights, by its name in the run's folder. Empty in older records."""
    checkpoints: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each checkpoint that a finished run retains, by its folder's name. It is the hash at the beginning of
    the manifest, which lists the hashes of the checkpoint's files. Empty in older records."""
    attributes: dict[str, bool | int | float | str | None] = field(default_factory=dict)
    """Attributes of the model's modules that changed in training, by `module/attribute`; they belong to the final
    weights. Empty in older records."""
    unsent_file: str | None = None
    """File of the metrics that MLflow did not accept; `scaleray tracking replay FILE` sends them."""

    def rows(self) -> list[Row]:
        """Measurements of the whole run, ending with the final evaluation values."""
        return [
            Row(names.RECORD_STEPS, self.steps),
            Row(names.RECORD_FINAL_LOSS, self.final_loss),
            Row(names.POINT_SAMPLES_PER_S, self.samples_per_s),
            Row(names.POINT_TOKENS_PER_S, self.tokens_per_s),
            Row(names.POINT_STEP_TIME_S, self.step_time_s),
            Row(names.INPUT_WAIT_SHARE, self.input_wait_share),
            Row(names.TIME_TO_FIRST_STEP_S, self.time_to_first_step_s),
            Row(names.RECORD_TRAINING_TIME_S, self.training_time_s),
            Row(names.RECORD_TOTAL_TIME_S, self.total_time_s),
            Row(names.PEAK_MEMORY_BYTES, max(self.peak_memory_bytes, default=None)),
            Row(names.NONFINITE_STEPS, self.nonfinite_steps or None),
            *(Row(names.evaluation(name), value) for name, value in sorted(self.metrics.items())),
        ]

    @property
    def judged(self) -> JudgedMetric | None:
        """Evaluation metric that measures the run's success; None without an evaluation."""
        return judged_metric(self.metrics, self.config)

    @property
    def result(self) -> str:
        """For a finished run, its judged metric, and its verdict unless that is `done`; otherwise its verdict."""
        if self.status != "FINISHED" or self.judged is None:
            return self.verdict
        metric = figures({self.judged.name: self.metrics[self.judged.name]})
        return metric if self.verdict == "done" else f"{metric}, {self.verdict}"

    def lines(self) -> list[str]:
        """Summary of the run: its kind, its result, and its folder."""
        steady = figures({"samples/s": self.samples_per_s, "tokens/s": self.tokens_per_s})
        lines = [
            f"run {self.name}: {self.result}",
            f"{quantity(self.workers, 'worker')}, {self.strategy}, "
            f"{quantity(self.steps, 'step')} in {self.total_time_s:.1f} s",
            figures({"final loss": self.final_loss}),
            figures(dict(sorted(self.metrics.items()))),
            f"{steady}, {1e3 * self.step_time_s:.4g} ms per step" if steady and self.step_time_s else steady,
            f"events: {len(self.events)}, last one: {self.events[-1].splitlines()[0]}" if self.events else "",
            f"alerts: {self.alerts_in_words()}" if self.alerts else "",
            f"status: {self.status}",
            f"MLflow: {self.mlflow_link}" if self.mlflow_link else "",
            f"folder: {self.run_dir}",
        ]
        return [line for line in lines if line]

    @property
    def summary(self) -> str:
        """Judged metric, verdict, length, speed and last evaluation."""
        more = [figures({"samples/s": self.samples_per_s}), figures(dict(sorted(self.metrics.items())))]
        return "; ".join([f"{self.result}: {quantity(self.steps, 'step')}", *filter(None, more)])

    def alerts_in_words(self) -> str:
        """Counts of each alert in one line; empty without any."""
        return counted(str(alert.get("name")) for alert in self.alerts)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parse the text of a record.json, in which null may represent a number that was not finite. Raises
        NewerRecord, or ValueError or TypeError if it is not a record. Unknown keys are ignored.
        """
        known = {one.name for one in dataclasses.fields(cls)}
        values = load_json(of_known_version(inert_json(text)))
        if not isinstance(values, dict):
            raise TypeError(f"it is a {type(values).__name__}, not a record")
        profile = RunProfile.of(values.pop("profile", None))
        values = {key: value for key, value in values.items() if key in known}
        check_types(cls, values)
        return cls(**{**values, "name": printable(values["name"])}, profile=profile)
