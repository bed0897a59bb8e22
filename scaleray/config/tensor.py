"""Tensor parallelism: `strategy.name: tensor`."""

from __future__ import annotations

from scaleray.config.base import Count, Settings


class TensorSettings(Settings):
    """How each layer is split over neighbouring workers."""

    size: Count = 2
    """Number of workers that share each layer. scale.workers / size replicas train on data of their own, sharded by
    FSDP."""
    sequence_parallel: bool = True
    """Split the operations between the layers (norms, residuals) along the sequence as well, where the
    workload's plan supports it."""
