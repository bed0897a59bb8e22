"""Pipeline parallelism: `strategy.name: pipeline`."""

from __future__ import annotations

from typing import Literal

from scaleray.config.base import Count, Settings


class PipelineSettings(Settings):
    """How the model's blocks become stages, and in which order micro-batches go through them."""

    size: Count = 2
    """Workers that a replica's stages lie on. scale.workers / size replicas train on data of their own."""
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"] = "1f1b"
    """interleaved_1f1b and zero_bubble give each worker `stages_per_worker` stages."""
    stages_per_worker: Count | None = None
    """None: 1 for gpipe and 1f1b, else 2."""
    split: Literal["counted", "measured"] = "counted"
    """What stages are balanced by: floating-point operations as counted, or time as measured once at the start."""
    data_axis: Literal["ddp", "fsdp"] = "ddp"
    """How replicas of a stage share their gradients."""
