"""Metrics that a run publishes while it trains but does not record: names, units and meanings.

`metric_names.py` has the whole table, including these. Metrics of the section `rank` have a series for every rank,
those of `live` one per run.
"""

from scaleray.common.metric import Metric, Where

RUN: tuple[Where, ...] = ("run",)
RANK: tuple[Where, ...] = ("rank",)

PHASE_S = Metric(
    "rank/phase_s", "s", "mean time of a step in one of its parts", None, published=RANK, labels=("phase",)
)
LATENESS_S = Metric(
    "rank/lateness_s",
    "s",
    "delay of this rank behind the earliest one at the collectives of a step, median of the last steps",
    "lower",
    published=RANK,
)
LINK_RATIO = Metric(
    "live/link_ratio",
    "1",
    "speed of the collectives that a step waits for with all ranks present, relative to the best in this run; of "
    "all links together, since ranks end a collective together",
    "higher",
    published=RUN,
)
SLOWEST_LINK_BYTES_PER_S = Metric(
    "live/slowest_link_bytes_per_s",
    "bytes/s",
    "bandwidth of the slowest link between two ranks, measured pair by pair when links were last found slow",
    "higher",
    published=RUN,
    labels=("source", "to"),
)
SLOWEST_LINK = Metric(
    "live/slowest_link",
    "1",
    "bandwidth of the slowest link over the median of all links, if there are three or more",
    "higher",
    published=RUN,
    labels=("source", "to"),
    prometheus="slowest_link_ratio",
)
MEMORY_BYTES = Metric(
    "rank/memory_bytes",
    "bytes",
    "memory of a rank: currently used, resident on the host, peak; held but not used: rounding, cached, stranded, and "
    "the largest hole",
    None,
    published=RANK,
    labels=("kind",),
)
MEMORY_LIMIT_BYTES = Metric(
    "rank/memory_limit_bytes", "bytes", "memory available to a rank: that of its GPU or its container", published=RANK
)
LAST_STEP_TIMESTAMP_S = Metric(
    "rank/last_step_timestamp_s", "s", "wall clock, since 1970, at the end of the rank's last step", published=RANK
)
LONG_PHASE_TIMESTAMP_S = Metric(
    "live/long_phase_timestamp_s",
    "s",
    "wall clock, since 1970, when the first worker was last in a phase that may outlast many steps: evaluation, "
    "checkpoint, compiling, end",
    published=RUN,
    labels=("phase",),
)
EXPOSED_COMMUNICATION_SHARE = Metric(
    "live/exposed_communication_share",
    "1",
    "share of step time that ranks spent waiting for communication, mean over all ranks",
    "lower",
    published=RUN,
)
SENT_BYTES_TOTAL = Metric(
    "live/sent_bytes",
    "bytes",
    "bytes that rank 0 passed to collectives, counting each payload once",
    published=RUN,
    kind="counter",
)
MFU = Metric(
    "live/mfu",
    "1",
    "model FLOPs per second over the peak of the devices, if both are known",
    "higher",
    published=RUN,
    prometheus="model_flops_utilization_ratio",
)
STEPS = Metric("live/steps", "steps", "number of the newest step, over all attempts", published=RUN, kind="counter")
STEPS_REPEATED = Metric(
    "live/steps_repeated",
    "steps",
    "steps that were repeated after a loss of workers or a resume",
    "lower",
    published=RUN,
    kind="counter",
)
STEPS_PLANNED = Metric(
    "live/steps_planned", "steps", "number of the last step, unless the training ends earlier", published=RUN
)
CHECKPOINT_AGE_S = Metric(
    "live/checkpoint_age_s",
    "s",
    "time of training since the newest checkpoint began, or since the first step, up to the last step or, while "
    "a checkpoint is waited for, up to now; without evaluations; absent if no checkpoints are made",
    "lower",
    published=RUN,
)
CHECKPOINT_INTERVAL_S = Metric(
    "live/checkpoint_interval_s", "s", "time from one checkpoint to the next, as configured", published=RUN
)
RESTARTS = Metric(
    "live/restarts",
    "restarts",
    "number of times that the training continued after a loss of workers or a resume",
    "lower",
    published=RUN,
    kind="counter",
)
EXPECTED_SAMPLES_PER_S = Metric(
    "live/expected_samples_per_s",
    "samples/s",
    "throughput that a study or the planner predicts: monitoring.expected_samples_per_s",
    published=RUN,
)
EFFICIENCY_OVER_PREDICTION = Metric(
    "live/efficiency_over_prediction",
    "1",
    "measured over predicted throughput",
    "higher",
    published=RUN,
    prometheus="efficiency_over_prediction_ratio",
)
RECORDER_SPOOLED_POINTS = Metric(
    "live/recorder_spooled_points", "points", "chart points that MLflow has not accepted yet", "lower", published=RUN
)
DISK_FREE = Metric(
    "live/disk_free",
    "1",
    "free share of the disk with the run's folder, on the driver's machine",
    "higher",
    published=RUN,
    prometheus="disk_free_ratio",
)
MEASURED = Metric(
    "live/measured", "1", "completed measurements of a study, or trials of a sweep", published=RUN, labels=("kind",)
)
MEASURED_PLANNED = Metric(
    "live/measured_planned",
    "1",
    "planned measurements of a study, or trials of a sweep",
    published=RUN,
    labels=("kind",),
)
RUN_INFO = Metric(
    "live/run_info",
    "1",
    "1, with labels about the run: its page in MLflow, its folder with report.html, its strategy, its job in Ray",
    published=RUN,
    labels=("mlflow_run", "report", "strategy", "job"),
)
RUN_FINISHED = Metric(
    "live/run_finished", "1", "1 once the run has ended as planned or was stopped by its user", published=RUN
)
RUN_FAILED = Metric("live/run_failed", "1", "1 once the run has failed", published=RUN)
EVAL = Metric(
    "live/eval", "unit of the metric", "last value of an evaluation metric", published=RUN, labels=("split", "metric")
)
"""Metrics of evaluations, which are named `split/metric` elsewhere."""

ALL = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
