"""The faults that `alerts.py` plants, and the rules that must tell of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Fault:
    """A fault, the rule that must tell of it, and what of the training's config it needs."""

    name: str
    rule: str
    planted: str
    flags: dict[str, Any] = field(default_factory=dict)
    on_ray: bool = False
    healthy_s: float = 45.0
    """Seconds of training before the fault."""
    watched_s: float = 100.0
    """Seconds that the training is watched after it."""
    also: tuple[str, ...] = ()
    """Further rules, each of another fault that is planted at the same time."""

    @property
    def rules(self) -> tuple[str, ...]:
        """All rules that must tell of it."""
        return (self.rule, *self.also) if self.rule else ()


SLOWED = "a forward pass of either worker takes 120 ms longer"
FAULTS = (
    Fault("healthy", "", "nothing"),
    Fault("straggler", "straggler", "the backward pass of rank 1 takes 40 ms longer"),
    Fault("nan", "nonfinite", "one loss is NaN", {"on_nonfinite": "skip"}),
    # Prometheus needs twenty scrapes to know what is usual
    Fault("spike", "loss_spike", "losses are ten times as large", healthy_s=120.0),
    Fault("hang", "no_progress", "rank 1 sleeps in its forward pass", {"scale.collective_timeout_s": 190}),
    Fault("starvation", "input_starved", "each row takes 60 ms to read"),
    Fault("slow link", "slow_link", "each collective ends 60 ms later"),
    Fault("dead worker", "worker_lost", "SIGKILL for one of two Ray workers", {"scale.max_failures": 2}, on_ray=True),
    Fault("full disk", "disk_nearly_full", "the run's disk, a tmpfs, is filled"),
    Fault(
        "restarts",
        "restarts",
        "SIGKILL for one of two Ray workers, three times",
        {"scale.max_failures": 5},
        on_ray=True,
    ),
    Fault("explosion", "gradient_explosion", "gradients are a thousand times as large", healthy_s=120.0),
    Fault(
        "loss scale",
        "loss_scale_collapse",
        "gradients of fp16 are infinite in every step",
        {"precision.dtype": "fp16", "on_nonfinite": "skip"},
    ),
    Fault("memory", "memory_near_limit", "rank 1 fills 97 % of a limit that is emulated"),
    # in the first two minutes memory may grow
    Fault("leak", "memory_filling", "rank 1 keeps 256 KiB of each step, of 2 GiB that are emulated", healthy_s=120.0),
    Fault(
        "old checkpoint",
        "checkpoint_too_old",
        "checkpoints, due every 12 s, are not written to their end",
        {"checkpoint.every_minutes": 0.2},
        watched_s=160.0,
    ),
    Fault("mlflow away", "recorder_spooling", "SIGKILL for the MLflow server"),
    Fault("failed", "run_failed", "rank 1 raises an error in its loss"),
    Fault("finished", "run_finished", "the last of its steps"),
    # a minute is compared with the two before it at least, and a minute must pass
    Fault("slower", "slower_than_before", SLOWED, healthy_s=220.0, watched_s=240.0),
    Fault("prediction", "slower_than_predicted", SLOWED, {"monitoring.expected_samples_per_s": 80}, watched_s=180.0),
    Fault(
        "gpus",
        "gpu_idle",
        "of four made-up GPUs one becomes idle, one is throttled half of the time, one has a memory error, one an Xid 79",
        on_ray=True,
        healthy_s=330.0,
        watched_s=300.0,
        also=("gpu_throttled", "gpu_ecc", "gpu_xid"),
    ),
    # twenty minutes are compared, the last five and the first five of them: half an hour, on demand only
    Fault("creep", "memory_creeping", "rank 1 keeps 1.5 GiB", healthy_s=1000.0, watched_s=700.0),
)
ON_DEMAND = ("creep",)
BY_PROMETHEUS_ALONE = ("gpu_throttled", "gpu_ecc", "gpu_xid")
BY_NAME = {fault.name: fault for fault in FAULTS}
