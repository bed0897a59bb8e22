"""Every metric that scaleray records: its name, unit and meaning, once.

The part before the slash becomes a section in MLflow. Evaluation metrics are named `<split>/<metric>`
and come from the workload.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A metric's name as recorded, its unit and one line of help."""

    name: str
    unit: str
    help: str


LOSS = Metric("train/loss", "loss per sample or token", "summed loss of the global batch divided by its count")
LEARNING_RATE = Metric("train/learning_rate", "1", "learning rate used in this step")
GRAD_NORM = Metric("train/grad_norm", "1", "global norm of the gradient before clipping")
EPOCH = Metric("train/epoch", "epochs", "passes over the training data, with fraction")
NONFINITE_STEPS = Metric("train/nonfinite_steps", "steps", "steps whose loss or gradient was NaN or infinite")
LOSS_SCALE = Metric("train/loss_scale", "1", "dynamic loss scale of fp16")
SAMPLES_PER_S = Metric("perf/samples_per_s", "samples/s", "samples of all workers per second since the last point")
TOKENS_PER_S = Metric("perf/tokens_per_s", "tokens/s", "tokens of all workers per second since the last point")
STEP_TIME_S = Metric("perf/step_time_s", "s", "mean time of a step since the last point")
INPUT_WAIT_SHARE = Metric("perf/input_wait_share", "1", "share of step time that rank 0 waited for its input")
SENT_BYTES = Metric("perf/sent_bytes", "bytes", "bytes a step that rank 0 gave to collectives, each payload once")
CONSENSUS_DISTANCE = Metric(
    "train/consensus_distance", "1", "root mean square distance of the replicas from their mean, relative to its norm"
)
COMPRESSION_RATIO = Metric(
    "compression/ratio", "1", "bytes that rank 0 gave to collectives for gradients, relative to whole gradients"
)
SPARSITY = Metric("train/sparsity", "1", "share of the prunable weights that are zero")
BUBBLE_SHARE = Metric(
    "perf/bubble_share", "1", "share of a step's passes in which a pipeline's workers had nothing to do, their mean"
)
NOISE_SCALE = Metric(
    "noise/scale", "samples", "gradient noise scale, trace over |G|^2: the batch at which noise equals signal"
)
NOISE_GRAD_SQ = Metric(
    "noise/grad_sq", "1", "average of the unbiased estimate of |G|^2, the squared norm of the gradient"
)
NOISE_TRACE = Metric("noise/trace", "1", "average of the trace of the covariance of one sample's gradient")
WORKERS = Metric("perf/workers", "workers", "number of workers, which changes in an elastic run")
CHECKPOINT_STALL_S = Metric("checkpoint/stall_s", "s", "how long training waited for this checkpoint")
CHECKPOINT_DURATION_S = Metric("checkpoint/duration_s", "s", "from its beginning to its manifest, beside the training")
CHECKPOINT_WRITTEN_BYTES = Metric("checkpoint/written_bytes", "bytes", "what had changed since the last checkpoint")
WORLD_SIZE = Metric("point/world_size", "workers", "number of workers of the run")
POINT_SAMPLES_PER_S = Metric("point/samples_per_s", "samples/s", "steady-state throughput of the whole run")
POINT_TOKENS_PER_S = Metric("point/tokens_per_s", "tokens/s", "steady-state token throughput of the whole run")
TIME_TO_FIRST_STEP_S = Metric(
    "point/time_to_first_step_s", "s", "from the command's start to the end of the first step"
)
PEAK_MEMORY_BYTES = Metric("point/peak_memory_bytes", "bytes", "largest peak memory of any worker process or device")
VERIFY_LOSS_DIFFERENCE = Metric(
    "verify/loss_difference", "1", "largest relative difference of a step's loss to one process"
)
VERIFY_GRAD_NORM_DIFFERENCE = Metric("verify/grad_norm_difference", "1", "the same of the gradient's norm")
VERIFY_PARAMETER_DIFFERENCE = Metric(
    "verify/parameter_difference", "1", "the same of the final parameters, relative to each tensor's largest"
)
VERIFY_MISMATCHES = Metric(
    "verify/mismatches", "variants", "variants that are not the training that they promise to be"
)

COMPRESSION_SHARES = tuple(
    Metric(f"compression/share_{name}", "1", f"adaptive: share of the gradients, by bytes, that went as {name}")
    for name in ("none", "fp16", "bf16", "int8", "powersgd", "topk")
)

ALL = tuple(value for value in list(globals().values()) if isinstance(value, Metric)) + COMPRESSION_SHARES


def compression_share(method: str) -> Metric:
    """The share of the gradients that adaptive compression sends by `method`."""
    return next(metric for metric in COMPRESSION_SHARES if metric.name == f"compression/share_{method}")
