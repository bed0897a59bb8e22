"""The chosen layout as keys of a run's config, for `scaleray train`."""

from __future__ import annotations

from typing import Any

from scaleray.errors import ConfigError
from scaleray.planner.layout import Layout

PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "tf32": "fp32", "fp8": "bf16", "fp4": "bf16"}


def config_keys(layout: Layout) -> dict[str, Any]:
    """Sections of a config that `scaleray train` runs the layout with.

    Raises ConfigError for a layout with both tensor and pipeline parallelism, which `scaleray train` has no strategy for.
    """
    if layout.tensor > 1 and layout.pipeline > 1:
        raise ConfigError(
            "layout",
            layout.describe(),
            "scaleray train runs tensor or pipeline parallel, not both",
            "plan with --strategies without tp or without pp",
        )
    keys: dict[str, Any] = {
        "scale": {"workers": layout.num_gpus, "gpus_per_worker": 1},
        "strategy": {"name": _strategy(layout)},
        "batch": {"global_size": layout.global_batch, "micro_size": layout.micro_batch},
        "precision": {"dtype": PRECISIONS[layout.precision], "tf32": layout.precision == "tf32"},
        "activations": {"checkpointing": {"none": "none", "full": "full", "alternate": "selective", "selective": "selective"}[layout.checkpointing]},
    }  # fmt: skip
    if layout.sharding == "zero3" and layout.pipeline == 1:
        keys["fsdp"] = {"replicas": layout.data // layout.shard}
    if layout.tensor > 1:
        keys["tensor"] = {"size": layout.tensor, "sequence_parallel": layout.sequence_parallel}
    if layout.pipeline > 1:
        schedule = {"interleaved": "interleaved_1f1b"}.get(layout.schedule, layout.schedule)
        keys["pipeline"] = {"size": layout.pipeline, "schedule": schedule, "stages_per_worker": layout.chunks}
    return keys


def _strategy(layout: Layout) -> str:
    if layout.tensor > 1:
        return "tensor"
    if layout.pipeline > 1:
        return "pipeline"
    if layout.data == 1:
        return "single"
    return {"none": "ddp", "zero1": "zero1", "zero2": "fsdp", "zero3": "fsdp"}[layout.sharding]
