"""Decide whether workers use GPUs if the config leaves it open, and report idle GPUs."""

from collections.abc import Sequence

from scaleray.config import RunConfig
from scaleray.launch.cluster.connection import Node
from scaleray.records.run_record import Say

TRAIN_ON_THEM = "--scale.gpus-per-worker 1 trains on them"


def with_gpus_decided(config: RunConfig, nodes: Sequence[Node] | None, *, say: Say) -> RunConfig:
    """The config with `scale.gpus_per_worker: auto` replaced by 1 if the cluster has GPUs, else by 0. The driver
    decides once, and the number is recorded. nodes: of the cluster; None: this process alone, without Ray. say: logs
    idle GPUs."""
    import torch

    if nodes is None:
        num_gpus: float = torch.cuda.device_count()
    else:
        num_gpus = sum(node.resources.get("GPU", 0.0) for node in nodes)
    has_cuda = torch.backends.cuda.is_built()
    gpus = config.scale.gpus_per_worker
    if gpus == "auto":
        gpus = 1.0 if num_gpus and has_cuda else 0.0
    if note := idle_gpus(num_gpus, gpus, has_cuda=has_cuda):
        say(f"  {note}")
    return config.changed({"scale.gpus_per_worker": gpus})


def idle_gpus(num_gpus: float, gpus_per_worker: float, *, has_cuda: bool) -> str:
    """Notice about GPUs that a run on CPUs leaves idle, with the setting that uses them; empty if there are none."""
    if not num_gpus or gpus_per_worker:
        return ""
    which = "1 GPU is" if num_gpus == 1 else f"{num_gpus:g} GPUs are"
    if not has_cuda:
        return f"{which} idle: this build of torch lacks CUDA; install one with CUDA, and {TRAIN_ON_THEM}"
    return f"{which} idle: the workers train on CPUs; {TRAIN_ON_THEM}"
