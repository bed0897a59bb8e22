"""How many workers run, on what, and what the launch does when one fails."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from scaleray.config.base import Count, Duration, NonNegative, Positive, Settings, WorkerRange, above_zero


class ScaleSettings(Settings):
    """Resources of the Ray Train worker group."""

    workers: Annotated[int, Field(ge=1, le=100_000)] | WorkerRange = 1
    """Number of training workers (ranks). A range such as {min: 1, max: 4} is elastic: as many as the cluster has room for,
    more when a node comes, fewer when one goes."""
    on_resize: Literal["keep", "rescale"] = "keep"
    """When an elastic run changes its number of workers: keep the global batch, by accumulation, so that the training
    stays the same; or rescale it with the workers, and the learning rate by `optimizer.rule`."""
    resize_interval_s: Positive = 60.0
    """How often an elastic run looks whether more workers fit."""
    gpus_per_worker: Annotated[float, Field(ge=0, le=1)] = 0
    """1 trains on CUDA with NCCL; 0 on the CPU with gloo. A fraction shares a card, for one-worker trials only."""
    cpus_per_worker: Positive = 1.0
    """Ray CPUs reserved for each worker; also its number of torch threads, rounded down to at least 1."""
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Ray's placement strategy for the workers."""
    label_selector: dict[str, str] = Field(default_factory=dict)
    """Ray node labels that every worker's node must have, such as {zone: eu-1}."""
    max_failures: Annotated[int, Field(ge=0, le=1000)] = 3
    """Restarts of the worker group after a worker or node is lost, each from the newest checkpoint. An error of the
    workload itself is tried again once at a step, and not at all before the first one. Preemptions do not count."""
    launch_timeout_s: Positive = 120.0
    """How long the worker group may take to start before the launch counts as failed."""
    collective_timeout_s: Positive = 180.0
    """How long a worker may hang, in a collective or anywhere else in a step, before its group is started again
    (torch's own default is half an hour). Three times as long until the first step is complete, and while it compiles."""

    @property
    def max_workers(self) -> int:
        """The largest number of workers that the run may have."""
        return self.workers.max if isinstance(self.workers, WorkerRange) else self.workers

    @property
    def min_workers(self) -> int:
        """The smallest number of workers that the run may have."""
        return self.workers.min if isinstance(self.workers, WorkerRange) else self.workers

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers may change."""
        return self.min_workers < self.max_workers


class PrecisionSettings(Settings):
    """Arithmetic of the forward and backward pass. Parameters and optimizer state stay in the model's own dtype.

    Gradients are reduced in that dtype too, so in fp32 with bf16 and fp16: `fsdp.reduce_dtype` reduces them in less, and
    for DDP `compression.name` does.
    """

    dtype: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """bf16 and fp16 run under autocast, fp16 with dynamic loss scaling; fp64 converts the model, for checks."""
    initial_loss_scale: Positive = 65536.0
    """fp16 only: first value of the dynamic loss scale."""
    tf32: bool = False
    """fp32 on NVIDIA GPUs from Ampere on: matrix products and convolutions round their inputs to TF32 (10 bits of mantissa),
    several times faster. false computes them in full fp32, convolutions too, where torch's own default is TF32."""
    float8: Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp"] = "none"
    """With bf16, on NVIDIA GPUs from Ada or Hopper on, and torchao (extra `float8`): products of linear layers in float8, with
    one scale for a tensor (fastest), for each row, or for each row with the gradients of weights in bf16 (most accurate).
    Linear layers in the workload's `blocks`; where it names none, all but the last. Worth it for large layers, compiled."""
    float8_leave_out: tuple[str, ...] = ()
    """Names of linear layers that stay in bf16, such as `blocks.0.*`."""
    emulate_float8: bool = False
    """Round as float8 does and multiply in float32, on any device: shows what float8 does to a training, slowly."""

    @model_validator(mode="after")
    def _float8_is_possible(self) -> PrecisionSettings:
        if self.float8 != "none" and self.dtype != "bf16":
            raise ValueError(f"float8: its products give bf16, and precision.dtype is {self.dtype}; use dtype bf16")
        if self.emulate_float8 and self.float8 == "rowwise_with_gw_hp":
            raise ValueError(
                "emulate_float8: torchao 0.18 cannot emulate rowwise_with_gw_hp; use rowwise or tensorwise"
            )
        return self


class DataSettings(Settings):
    """The input pipeline."""

    shuffle: bool = True
    """A new order every epoch, from the run's seed."""
    window_rows: Count = 100_000
    """Sources without cheap random access (Parquet): rows shuffled together, from several row groups in random order."""
    chunk_mib: Positive = 16.0
    """Rows that one Ray Data task reads for one worker, in MiB; larger has less overhead, smaller starts sooner."""
    prefetch_mib: Positive = 256.0
    """How far the pipeline of one worker may run ahead of training."""
    reserved_cpus: NonNegative = 1.0
    """Ray CPUs kept free for input tasks. With 0 the input can starve when training takes every CPU."""
    timeout_s: Positive = 300.0
    """How long a step may wait for its input before the run fails; the wait is explained long before that. Of several
    workers, one fails a little before the others give up on it, which is after `scale.collective_timeout_s`."""


class CheckpointSettings(Settings):
    """Where a run's files go, and how often its whole state is saved so that it can be resumed."""

    storage_path: str = "~/scaleray"
    """Folder or s3:// URI for run folders; made absolute at once. On several nodes it must be shared."""
    save_final: bool = True
    """Save the final model weights (a plain state dict) in the run folder and in MLflow."""
    every: Duration | None = None
    """Distance between checkpoints, such as `500 steps` or `1 epoch`; the last step is saved too. None: by time alone."""
    every_minutes: Positive | None = 10.0
    """A checkpoint at the latest this long after the last one. None: only those of `every`."""
    is_asynchronous: bool = True
    """Copy and write beside the training. false: training waits until a checkpoint is complete."""
    keep_last: Count = 2
    """Newest checkpoints that stay."""
    keep_best: Annotated[int, Field(ge=0, le=1000)] = 1
    """Best checkpoints that stay as well, by `best`."""
    best: Annotated[str, Field(pattern=r"^[\w./-]+ (min|max)$")] | None = None
    """Metric of an evaluation and its direction, such as `val/loss min`: a state that evaluates as one of the `keep_best` best
    so far is saved at once. None: no checkpoint is better than another."""
    keep_every: Duration | None = None
    """A checkpoint every so far stays for good, such as `10 epochs`."""
    full_every: Count = 16
    """Between full checkpoints, tensors that have not changed are not written again. 1: every checkpoint is full."""
    copies: Literal[1, 2] = 1
    """2 writes each shard to `copy_path` too; a lost or damaged one is healed from there."""
    copy_path: str | None = None
    """Folder or s3:// URI of the second copy, on another disk, node or bucket."""
    grace_s: NonNegative = 2.5
    """After SIGTERM, how long the last checkpoint may take before the workers are ended. `ray job stop` kills after 3 s."""

    _check_every = field_validator("every", "keep_every")(above_zero)

    @property
    def best_metric(self) -> str | None:
        """The metric that `best` names."""
        return self.best.partition(" ")[0] if self.best is not None else None

    @property
    def is_higher_better(self) -> bool:
        """Its direction."""
        return self.best is not None and self.best.endswith(" max")

    @model_validator(mode="after")
    def _copies_have_a_place(self) -> CheckpointSettings:
        if (self.copies == 2) != (self.copy_path is not None):
            raise ValueError("checkpoint.copies 2 and checkpoint.copy_path belong together: give both or neither")
        return self


class TrackingSettings(Settings):
    """MLflow."""

    uri: str | None = None
    """Tracking URI. None: MLFLOW_TRACKING_URI if set, else an SQLite file mlflow.db in `~/scaleray`."""
    experiment: Annotated[str, Field(min_length=1, max_length=200)] = "scaleray"
    """Name of the MLflow experiment; made if it does not exist."""
    run_name: Annotated[str, Field(min_length=1, max_length=120, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = None
    """Name of the run and of its folder. None: derived from workload and size, with the time added. A name in use is refused."""
    every_steps: Count = 10
    """Steps between two points of the metrics in MLflow. The run folder's steps.csv has every step."""
    interval_s: Positive = 2.0
    """Seconds between two messages from a worker to the recorder, and between two lines on the terminal."""
    system_metrics: bool = True
    """Record CPU, memory, disk, network and GPU use of every node."""
