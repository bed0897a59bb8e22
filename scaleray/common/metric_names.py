"""All metrics that scaleray records or publishes: names, units and meanings.

The part before the slash becomes a section in MLflow. Evaluation metrics are named `<split>/<metric>` and come from the
workload. A record provides its values under these names, see `records.rows`. Names and labels in Prometheus are derived
by `metric.prometheus_name` and `Metric.all_labels`; metrics that exist only there are in `live_metrics.py`.
"""

import re
from collections.abc import Mapping

from scaleray.common import live_metrics
from scaleray.common.metric import Better, Metric, Where, prometheus_name

ONCE: tuple[Where, ...] = ("mlflow", "run")
RECORD: tuple[Where, ...] = ("record",)
OF_MEASURED = {"point": ("mode", "workers"), "trial": ("trial", "batch_size", "learning_rate", "rule", "status")}
"""Labels in Prometheus that distinguish points of a study and trials of a sweep."""


def _measured(
    name: str, unit: str, help: str, better: Better | None = None, label: str = "", *, ending: str = ""
) -> Metric:
    """A metric of points or trials that is also in Prometheus, under its full name and a suffix."""
    labels = OF_MEASURED[name.partition("/")[0]]
    return Metric(name, unit, help, better, label, ONCE, labels=labels, prometheus=name.replace("/", "_") + ending)


LOSS = Metric(
    "train/loss",
    "loss per sample or token",
    "summed loss of the global batch divided by its count",
    "lower",
    published=ONCE,
)
LEARNING_RATE = Metric("train/learning_rate", "1", "learning rate used in this step", published=ONCE)
GRAD_NORM = Metric("train/grad_norm", "1", "global norm of the gradient before clipping", published=ONCE)
EPOCH = Metric("train/epoch", "epochs", "passes over the training data, with decimals", published=ONCE)
NONFINITE_STEPS = Metric(
    "train/nonfinite_steps",
    "steps",
    "steps whose loss or gradient was NaN or infinite",
    "lower",
    "steps not finite",
    published=ONCE,
    kind="counter",
)
LOSS_SCALE = Metric("train/loss_scale", "1", "dynamic loss scale of fp16", published=ONCE)
SAMPLES_PER_S = Metric(
    "perf/samples_per_s",
    "samples/s",
    "samples of all workers per second since the last point",
    "higher",
    published=ONCE,
)
TOKENS_PER_S = Metric(
    "perf/tokens_per_s", "tokens/s", "tokens of all workers per second since the last point", "higher", published=ONCE
)
STEP_TIME_S = Metric(
    "perf/step_time_s", "s", "mean time of a step since the last point", "lower", published=("mlflow", "rank")
)
INPUT_WAIT_SHARE = Metric(
    "perf/input_wait_share",
    "1",
    "share of step time that rank 0 spent waiting for its input",
    "lower",
    "waits for input",
    published=ONCE,
)
SENT_BYTES = Metric(
    "perf/sent_bytes", "bytes", "bytes per step that rank 0 passed to collectives, payloads counted once"
)
GOODPUT = Metric(
    "profile/goodput",
    "1",
    "share of the run's time, over all attempts, that was spent in steps that count",
    "higher",
    published=ONCE,
    prometheus="goodput_ratio",
)
PART_SHARE = Metric(
    "profile/PART_share", "1", "share of a step that one of its parts took, by the part's name; mean over all ranks"
)
PROFILE_GAP = Metric(
    "profile/gap", "1", "relative difference of a step from its parts on the worst rank; above 0.01 they are unreliable"
)
CONSENSUS_DISTANCE = Metric(
    "train/consensus_distance", "1", "RMS distance of the replicas from their mean, relative to the mean's norm"
)
COMPRESSION_RATIO = Metric(
    "compression/ratio", "1", "bytes that rank 0 passed to collectives for gradients, relative to uncompressed ones"
)
SPARSITY = Metric("train/sparsity", "1", "share of the prunable weights that are zero")
BUBBLE_SHARE = Metric(
    "perf/bubble_share",
    "1",
    "share of a step's passes in which a pipeline's workers are idle, mean over the workers",
    "lower",
)
NOISE_GRAD_SQ = Metric(
    "train/noise_grad_sq", "1", "average of the unbiased estimate of |G|^2, the squared norm of the gradient"
)
NOISE_TRACE = Metric("train/noise_trace", "1", "average of the trace of the covariance of one sample's gradient")
WORKERS = Metric(
    "perf/workers",
    "workers",
    "number of workers, which changes in an elastic run",
    published=ONCE,
    prometheus="world_size",
)
CHECKPOINT_STALL_S = Metric("checkpoint/stall_s", "s", "time that training waited for this checkpoint", "lower")
CHECKPOINT_DURATION_S = Metric(
    "checkpoint/duration_s",
    "s",
    "time from the start of the checkpoint to its manifest, concurrent with the training",
    "lower",
    published=ONCE,
    prometheus="checkpoint_duration_s",
)
CHECKPOINT_WRITTEN_BYTES = Metric("checkpoint/written_bytes", "bytes", "bytes that changed since the last checkpoint")
WORLD_SIZE = _measured("point/world_size", "workers", "number of workers of the run")
POINT_SAMPLES_PER_S = _measured(
    "point/samples_per_s", "samples/s", "steady-state throughput of the whole run", "higher", "samples/s"
)
POINT_TOKENS_PER_S = Metric(
    "point/tokens_per_s", "tokens/s", "steady-state token throughput of the whole run", "higher", "tokens/s"
)
TIME_TO_FIRST_STEP_S = Metric(
    "point/time_to_first_step_s",
    "s",
    "time from the command's start to the end of the first step",
    "lower",
    "time to first step",
)
PEAK_MEMORY_BYTES = Metric(
    "point/peak_memory_bytes", "bytes", "largest peak memory of any worker process or device", "lower", "peak memory"
)
POINT_STEP_TIME_S = _measured("point/step_time_s", "s", "median time of a step in steady state", "lower", "step time")
POINT_COMPUTE_S = Metric("point/compute_s", "s", "part of the step in which the worker computes")
POINT_EXPOSED_COMM_S = Metric("point/exposed_comm_s", "s", "part of the step that waits for communication", "lower")
POINT_INPUT_WAIT_S = Metric("point/input_wait_s", "s", "part of the step that waits for input", "lower")
POINT_OTHER_S = Metric("point/other_s", "s", "remaining part of the step", "lower")
POINT_MFU = Metric("point/mfu", "1", "model FLOPs per second over the peak of the devices", "higher")
POINT_COST = Metric(
    "point/cost_per_million_samples",
    "currency",
    "price of a million samples at the worker's price in the config",
    "lower",
)
POINT_NOISE_SCALE = Metric("point/noise_scale", "samples", "gradient noise scale of the point's training")
POINT_SAMPLES_TO_TARGET = Metric("point/samples_to_target", "samples", "samples until the target was reached", "lower")
POINT_TIME_TO_TARGET_S = Metric("point/time_to_target_s", "s", "time of training until the target was reached", "lower")
POINT_SPEEDUP = Metric(
    "point/speedup", "1", "throughput relative to the curve's base, times the base's workers", "higher"
)
POINT_EFFICIENCY = _measured(
    "point/efficiency", "1", "scaling efficiency in the point's mode, strong or weak", "higher", ending="_ratio"
)
TRIAL_BATCH_SIZE = Metric("trial/batch_size", "samples", "global batch size of the trial")
TRIAL_LEARNING_RATE = Metric("trial/learning_rate", "1", "learning rate of the trial after applying its rule")
TRIAL_VALUE = _measured("trial/value", "unit of the metric", "last value of the sweep's metric")
TRIAL_SAMPLES = Metric("trial/samples", "samples", "samples that the trial trained on")
TRIAL_SAMPLES_TO_TARGET = _measured(
    "trial/samples_to_target", "samples", "samples until the target was reached", "lower"
)
TRIAL_TIME_TO_TARGET_S = Metric("trial/time_to_target_s", "s", "time of training until the target was reached", "lower")
TRIAL_TRAINING_TIME_S = Metric("trial/training_time_s", "s", "time of training")
TRIAL_TOTAL_TIME_S = Metric("trial/total_time_s", "s", "time from when the trial had its workers to its end")
TRIAL_SAMPLES_PER_S = _measured("trial/samples_per_s", "samples/s", "steady-state throughput of the trial", "higher")
TRIAL_NOISE_SCALE = Metric("trial/noise_scale", "samples", "gradient noise scale of the trial's training")
TRIAL_GOODPUT = Metric("trial/goodput", "samples/s", "throughput times statistical efficiency", "higher")
SCALING_IDEAL = Metric("scaling/ideal_speedup", "1", "number of workers relative to the curve's base; step: workers")
NOISE_SCALE = Metric(
    "train/noise_scale",
    "samples",
    "gradient noise scale, trace over |G|^2: the batch at which noise equals signal; "
    "step: samples, if a study or sweep wrote it",
)
BATCH_SAMPLES_PER_S = Metric(
    "batch/samples_per_s", "samples/s", "throughput at a batch size; step: batch size", "higher"
)
BATCH_EFFICIENCY = Metric(
    "batch/statistical_efficiency", "1", "progress per sample at this batch size; step: batch size", "higher"
)
BATCH_GOODPUT = Metric(
    "batch/goodput", "samples/s", "throughput times statistical efficiency; step: batch size", "higher"
)
BATCH_PREDICTED_SAMPLES = Metric(
    "batch/predicted_samples", "samples", "predicted samples to the target; step: batch size", "lower"
)
VERIFY_LOSS_DIFFERENCE = Metric(
    "verify/loss_difference", "1", "largest relative difference of a step's loss from one process", "lower"
)
VERIFY_GRAD_NORM_DIFFERENCE = Metric(
    "verify/grad_norm_difference", "1", "largest difference of gradient norms", "lower"
)
VERIFY_PARAMETER_DIFFERENCE = Metric(
    "verify/parameter_difference", "1", "largest difference of final parameters, by each tensor's largest", "lower"
)
VERIFY_MISMATCHES = Metric("verify/mismatches", "variants", "variants that do not keep their guarantees", "lower")

WORKER_HOURS = Metric("cost/worker_hours", "h", "total hours of all workers, from their start to their end", "lower")
COST = Metric("cost/price", "currency", "price of the workers' hours at study.price_per_worker_hour", "lower")

RECORD_STEPS = Metric("record/steps", "steps", "optimizer steps of the run", None, "steps", published=RECORD)
RECORD_FINAL_LOSS = Metric(
    "record/final_loss", "loss per sample or token", "loss of the last step", "lower", "final loss", published=RECORD
)
RECORD_TRAINING_TIME_S = Metric(
    "record/training_time_s", "s", "time of training without evaluations", "lower", "training time", published=RECORD
)
RECORD_TOTAL_TIME_S = Metric(
    "record/total_time_s", "s", "time from the command's start to its end", "lower", "total time", published=RECORD
)
RECORD_COMM_S = Metric("record/comm_s", "s", "time of a step's communication, hidden or not", "lower", published=RECORD)
RECORD_SENT_BYTES = Metric(
    "record/sent_bytes", "bytes", "bytes per step that a worker passes to collectives", "lower", published=RECORD
)
RECORD_TARGET_REACHED = Metric(
    "record/target_reached", "1", "whether training reached the target", "higher", published=RECORD
)

COMPRESSION_SHARES = tuple(
    Metric(f"compression/share_{name}", "1", f"adaptive: share of the gradients, by bytes, that were sent as {name}")
    for name in ("none", "fp16", "bf16", "int8", "powersgd", "topk")
)

CURVES = tuple(
    Metric(f"scaling/{mode}_{name}", unit, f"{mode} scaling: {help}; step: workers")
    for mode in ("strong", "weak")
    for name, unit, help in (
        ("speedup", "1", "throughput relative to the base, times the base's workers"),
        ("speedup_low", "1", "lower end of its 95 % interval"),
        ("speedup_high", "1", "upper end of its 95 % interval"),
        ("efficiency", "1", "efficiency"),
        ("efficiency_low", "1", "lower end of its 95 % interval"),
        ("efficiency_high", "1", "upper end of its 95 % interval"),
        ("fit", "1", "speed-up of the fitted law, up to one doubling beyond the points"),
        ("samples_per_s", "samples/s", "throughput"),
        ("step_time_s", "s", "median time of a step"),
        ("exposed_comm_share", "1", "share of the step that waits for communication"),
        ("cost_per_million_samples", "currency", "price of a million samples"),
        ("time_to_target_s", "s", "time of training to the target"),
    )
)

BY_RULE = {
    name: Metric(f"batch/{name}_RULE", unit, f"{help}, by learning-rate rule; step: batch size")
    for name, unit, help in (
        ("best_value", "unit of the metric", "best value of the sweep's metric at a batch size"),
        ("best_learning_rate", "1", "learning rate of the best setting at a batch size"),
        ("samples_to_target", "samples", "fewest samples to the target at a batch size"),
        ("time_to_target_s", "s", "time of training to the target, of the same setting"),
        ("steps_to_target", "steps", "steps to the target, of the same setting"),
    )
}
"""Curves of a sweep; MLflow has one for each rule, whose name replaces RULE."""

LOSS_OF = Metric(
    "train/loss_NAME", "loss per sample or token", "each of several losses, whose sum is train/loss", "lower"
)
GRAD_NORM_OF = Metric("train/grad_norm_NAME", "1", "norm of the gradient of each of several losses, before clipping")
"""Metrics that MLflow has for each of a workload's several losses, whose name replaces NAME."""
SYSTEM = Metric(
    "system/NODE/FIGURE", "%, W or MB", "use of a node's CPU, memory, disk, network and GPUs, under MLflow's own names"
)

TABLE = (
    tuple(value for value in list(globals().values()) if isinstance(value, Metric))
    + COMPRESSION_SHARES
    + CURVES
    + tuple(BY_RULE.values())
    + live_metrics.ALL
)
"""All metrics, wherever they are published."""
ALL = tuple(metric for metric in TABLE if metric.is_in_mlflow)
"""Metrics in MLflow."""
IN_PROMETHEUS = {prometheus_name(metric): metric for metric in TABLE if metric.is_in_prometheus}
"""Metrics in Prometheus, by their name there."""

_PLACEHOLDERS = re.compile("NAME|PART|RULE|NODE|FIGURE")
_PATTERNS = [(re.compile(_PLACEHOLDERS.sub(".+", re.escape(metric.name))), metric) for metric in TABLE]


def find(name: str) -> Metric | None:
    """Return the metric recorded under this name; None for a metric of user code, such as an evaluation's."""
    exact = next((metric for metric in TABLE if metric.name == name), None)
    return exact or next((metric for pattern, metric in _PATTERNS if pattern.fullmatch(name)), None)


def by_loss(metric: Metric, values: Mapping[str, float]) -> dict[str, float]:
    """Values of `LOSS_OF` or `GRAD_NORM_OF`, given by the name of the loss, under their own names."""
    return {metric.name.replace("NAME", name): value for name, value in values.items()}


def of_system(node: str, values: Mapping[str, float]) -> dict[str, float]:
    """Values of `SYSTEM` of one node, given by quantity, under their own names."""
    return {SYSTEM.name.replace("NODE", node).replace("FIGURE", figure): value for figure, value in values.items()}


def of_user_code(name: str) -> str:
    """Name of a value that user code logged in a training step as `name`."""
    return f"train/{name}"


def evaluation(name: str) -> Metric:
    """Metric of an evaluation, `<split>/<metric>`, defined by the workload."""
    return Metric(name, "unit of the metric", "last value of an evaluation", label=name)


def scaling_curve(mode: str, what: str) -> str:
    """Name of a study's curve, such as `efficiency_low` of mode `strong`.

    Raises StopIteration for a curve that is not in CURVES.
    """
    return next(metric.name for metric in CURVES if metric.name == f"scaling/{mode}_{what}")


def is_scaling_curve(mode: str, what: str) -> bool:
    """Whether a study has this curve."""
    return any(metric.name == f"scaling/{mode}_{what}" for metric in CURVES)


def batch_curve(what: str, rule: str) -> str:
    """Name of a sweep's curve for one learning-rate rule. Raises KeyError for a curve that is not in BY_RULE."""
    return BY_RULE[what].name.replace("RULE", rule)


def compression_share(method: str) -> Metric:
    """Metric of the share of the gradients that adaptive compression sends by `method`."""
    return next(metric for metric in COMPRESSION_SHARES if metric.name == f"compression/share_{method}")
