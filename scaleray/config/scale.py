"""Settings of the workers: their number, their resources, and the response to failures."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from scaleray.config.base import NonNegative, Positive, Settings, WorkerRange


class ScaleSettings(Settings):
    """Resources of the Ray Train worker group."""

    workers: Annotated[int, Field(ge=1, le=100_000)] | WorkerRange = 1
    """Number of training workers (ranks). A range such as {min: 1, max: 4} is elastic: as many workers as fit on the
    cluster, more when a node joins, fewer when one leaves."""
    on_resize: Literal["keep", "rescale"] = "keep"
    """Action of an elastic run when its number of workers changes: keep the global batch by accumulation, so that the
    training stays the same; or rescale it with the workers, and the learning rate by `optimizer.rule`.
    """
    resize_interval_s: Positive = 60.0
    """Seconds between two checks of whether more workers fit in an elastic run."""
    gpus_per_worker: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = "auto"
    """GPUs per worker. 1 trains on CUDA with NCCL; 0 on the CPU with gloo. A fraction shares a GPU between one-worker
    trials. auto: 1 if the cluster has GPUs, otherwise 0; the number is recorded."""
    cpus_per_worker: Positive = 1.0
    """Ray CPUs reserved for each worker; also its number of torch threads, rounded down to at least 1."""
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Ray's placement strategy for the workers."""
    label_selector: dict[str, str] = Field(default_factory=dict)
    """Ray node labels that every worker's node must have, such as {zone: eu-1}."""
    max_failures: Annotated[int, Field(ge=0, le=1000)] = 3
    """Restarts of the worker group after a worker or node is lost, each from the newest checkpoint. An error of the
    workload itself is retried once per step, and never before the first step. Preemptions do not count."""
    launch_timeout_s: Positive = 120.0
    """Seconds that the worker group may take to start before the launch fails."""
    wait_for_nodes_s: NonNegative = 0.0
    """Seconds to wait for nodes if the cluster is too small for the run, for example while an autoscaler, which is
    asked for them, adds some. 0 rejects such a run immediately. GPUs must then be stated (gpus_per_worker: 1)."""
    collective_timeout_s: Positive = 180.0
    """Seconds that a worker may hang, in a collective or anywhere else in a step, before its group is restarted
    (torch's default is half an hour). Three times as long until the first step is complete, and during compilation."""
    dashboard: bool = False
    """Start Ray's dashboard if the run starts Ray itself: about 1 CPU second at the start, 2 more soon after, and 280
    MB. An existing cluster has its own."""

    @property
    def gpus(self) -> float:
        """GPUs per worker as a number; 0 until `auto` has been resolved on the cluster."""
        return 0 if self.gpus_per_worker == "auto" else self.gpus_per_worker

    @property
    def backend(self) -> str:
        """The process group's backend, as torch writes it."""
        # gloo beside NCCL: collectives on CPU tensors need a backend of their own
        return "cpu:gloo,cuda:nccl" if self.gpus else "gloo"

    @property
    def may_have_gpus(self) -> bool:
        """Whether workers have GPUs, or may get them by `auto`."""
        return self.gpus_per_worker != 0

    @property
    def max_workers(self) -> int:
        """Largest number of workers that the run may have."""
        return self.workers.max if isinstance(self.workers, WorkerRange) else self.workers

    @property
    def min_workers(self) -> int:
        """Smallest number of workers that the run may have."""
        return self.workers.min if isinstance(self.workers, WorkerRange) else self.workers

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers may change."""
        return self.min_workers < self.max_workers


class RecoverySettings(Settings):
    """Recovery from the loss of a worker in the memory of the others, without a restart and without a lost step."""

    spares: Annotated[int, Field(ge=0, le=1000)] = 0
    """Workers in addition to `scale.workers` that wait, with everything loaded, to replace a lost one. The others keep
    their state in memory, and the current step is repeated: weights and losses are bit for bit those of an undisturbed
    run. Meanwhile, Ray replaces the lost worker. Strategies other than ddp also need `checkpoint.memory`. 0: a loss
    restarts all workers from the newest state."""
    on_loss: Literal["spare", "shrink", "restart"] = "spare"
    """Action when a worker is lost. spare: a spare takes its place, or the others wait for the process that Ray starts.
    shrink: without a spare, the others continue at once with the same samples in each step, equal within rounding, and
    add the process that Ray starts. restart: all workers restart from the newest state, as without spares."""
    silent_s: Positive = 5.0
    """Seconds without a heartbeat after which a worker counts as lost and its process is ended. The end of a process is
    noticed at once."""

    @property
    def is_on(self) -> bool:
        """Whether the loss of a worker leaves the others alive."""
        return self.spares > 0 or self.on_loss == "shrink"

    @model_validator(mode="after")
    def _restart_needs_no_spares(self) -> RecoverySettings:
        if self.spares and self.on_loss == "restart":
            raise ValueError("recovery.on_loss restart and recovery.spares exclude each other: omit one of them")
        return self
