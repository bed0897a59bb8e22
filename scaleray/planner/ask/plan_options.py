"""Options of `scaleray plan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

from scaleray.common.options import File, Words


@dataclass(frozen=True, kw_only=True)
class LayoutOptions:
    """Model, hardware, recipe and measurements, which determine the layouts."""

    model: str | None = None
    """Model by name (llama-70b, gpt2-xl, resnet-50) or size (gpt-13b)."""
    profile: File | None = None
    """File with a workload's counted costs, as written by training.flop_counter."""
    cluster: str | None = None
    """GPU:PERNODExNODES[,net=...][,link=...][,price=...], as in h100:8x16 or a100-80:8x64,net=200G; or a YAML file."""
    here: bool = False
    """The GPUs of this machine instead of --cluster."""
    address: str | None = None
    """With --here: use the GPUs of the Ray cluster at this address (host:port, ray://host:port or auto)."""
    network: str | None = None
    """Network between that cluster's nodes, which Ray does not report: a name, 100G or 8x400G; default: the usual
    one."""
    hardware: File | None = None
    """YAML file with your own GPUs, links and networks."""
    collectives: File | None = None
    """All-reduces measured on the cluster: output of nccl-tests' all_reduce_perf or CSV (ranks,nodes,bytes,seconds)."""
    global_batch: int | None = None
    """Samples per optimizer step over all GPUs; default: the config's, or about 4 million tokens (32 images per
    GPU)."""
    sequence: int | None = None
    """Tokens per sample."""
    precision: str | None = None
    """bf16, fp16, fp8, tf32 or fp32; default: the config's, or the GPU's usual 16-bit format."""
    strategies: Words = "ddp,zero1,fsdp,hsdp,tp,pp,ep"
    """Strategies, with commas: ddp, zero1, fsdp, hsdp, tp, pp, ep (experts of a mixture, spread over GPUs)."""
    optimizer: Literal["adam", "momentum", "sgd"] | None = None
    """Optimizer, with its state in bytes per parameter: adam 8, momentum 4, sgd none; default: the config's, or
    adam."""
    compiled: bool = False
    """The model is compiled."""
    step_time: float | None = None
    """Seconds of a step measured on one GPU of the cluster's type with --micro-batch samples, to scale the compute."""
    micro_batch: int | None = None
    """Samples of the measured step."""
    from_run: File | None = None
    """Record of a run or study, whose smallest point replaces --step-time; or of a sweep."""
    learn: str | None = None
    """Source of the team's own points that correct the data sheets: tracking, or MLflow's URI. The plan shows the
    improvement on held-out points."""
    input_rate: float | None = None
    """Samples per second that the input pipeline of one node delivers."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(LayoutOptions):
    """Length of the training, the ranking, and files to write."""

    samples: Annotated[float | None, Parameter(name=["--samples", "--target-samples"])] = None
    """Samples of the whole training at --global-batch, to predict its duration."""
    target_steps: float | None = None
    """Optimizer steps of the whole training at --global-batch, instead of samples."""
    noise_scale: float | None = None
    """Gradient noise scale in samples at --global-batch, used to weigh samples of other batch sizes."""
    rank_by: Annotated[str, Parameter(name=["--rank", "--rank-by"])] = "throughput"
    """throughput, cost, time, memory; or time-to-target, which also varies the batch size (--noise-scale,
    --from-run)."""
    checkpoint_minutes: float | None = None
    """Minutes of training between two checkpoints; default: the best for the cluster file's gpu_mtbf_hours."""
    waits_for_checkpoints: Annotated[bool, Parameter(name="--checkpoints-wait", negative="")] = False
    """Checkpoints are synchronous: training waits until they are stored."""
    write: File | None = None
    """Write the best layout that `scaleray train` can run as a config, based on -c if given."""
    html: File | None = None
    """Write the plan as one HTML page."""
    record: bool = False
    """Record the plan in MLflow; under a team policy (tracking.policy) all plans are recorded."""

    @property
    def interval_s(self) -> float | None:
        """Seconds of training between two checkpoints, if given."""
        return None if self.checkpoint_minutes is None else 60 * self.checkpoint_minutes
