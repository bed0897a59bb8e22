"""The chosen layout as keys of a run's config, for `scaleray train`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from scaleray.config.loading import known_keys
from scaleray.config.parallel import Degrees
from scaleray.config.strategy_traits import traits_of
from scaleray.errors import ConfigError
from scaleray.planner.cost.layout import Layout

PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "tf32": "fp32", "fp8": "bf16", "fp4": "bf16"}


def is_runnable(layout: Layout) -> bool:
    """Whether `scaleray train` can divide experts in the layout: it does so within FSDP alone."""
    return layout.expert == 1 or ("expert" in traits_of(_strategy(layout)).axes and _degrees(layout).expert > 1)


def config_keys(layout: Layout, *, tokens_per_sample: int | None = None) -> dict[str, Any]:
    """Return the sections of a config with which `scaleray train` uses the layout.

    tokens_per_sample: for a config whose batch is counted in tokens. Raises ConfigError for a layout that is not
    runnable.
    """
    if not is_runnable(layout):
        raise ConfigError(
            "layout",
            layout.describe(),
            "scaleray train divides experts over the workers of fsdp alone",
            "plan with --strategies fsdp,ep, or without ep",
        )
    keys: dict[str, Any] = {
        "scale": {"workers": layout.num_gpus, "gpus_per_worker": 1},
        "strategy": {"name": _strategy(layout)},
        "batch": {"global_size": layout.global_batch * (tokens_per_sample or 1), "micro_size": layout.micro_batch},
        "precision": {"dtype": PRECISIONS[layout.precision], "tf32": layout.precision == "tf32"},
        "activations": _ACTIVATIONS[layout.checkpointing],
    }
    if layout.compiled:
        keys["compilation"] = {"what": "blocks"}
    strategy = keys["strategy"]["name"]
    if strategy in ("pipeline", "tensor", "fsdp") or layout.context > 1:
        keys["parallel"] = {axis: degree for axis, degree in asdict(_degrees(layout)).items() if degree > 1}
    if strategy == "pipeline":
        schedule = {"interleaved": "interleaved_1f1b"}.get(layout.schedule, layout.schedule)
        keys["pipeline"] = {"schedule": schedule, "stages_per_worker": layout.chunks}
    if layout.tensor > 1:
        keys["tensor"] = {"sequence_parallel": layout.sequence_parallel}
    if strategy == "fsdp":
        keys["fsdp"] = {"reshard_after_forward": layout.sharding == "zero3", "cpu_offload": layout.offloads}
        if layout.accumulation > 1 and not layout.accumulates_whole:
            keys["fsdp"]["accumulate"] = "sharded"
    return keys


def layout_options(layout: Layout) -> list[str]:
    """Return the layout as options of `scaleray train` for a config that already has the batch, the precision and the
    workers."""
    known = known_keys()
    keys = {name: values for name, values in config_keys(layout).items() if name not in ("scale", "precision")}
    keys["batch"] = {"micro_size": layout.micro_batch}
    return [
        f"--{section}.{key.replace('_', '-')} {str(value).lower()}"
        for section, values in keys.items()
        for key, value in values.items()
        if known[f"{section}.{key}"].default != value
    ]


_ACTIVATIONS: dict[str, dict[str, Any]] = {
    "none": {"checkpointing": "none"},
    "selective": {"checkpointing": "selective"},
    # torchtitan's policy keeps every other product; the nearest setting of scaleray keeps all
    "alternate": {"checkpointing": "selective"},
    "full": {"checkpointing": "full"},
}


def _degrees(layout: Layout) -> Degrees:
    """The degrees of the layout; experts over GPUs that only tensor parallelism has are not divided."""
    # in a pipeline gathered and reduced once per step, as the planner assumes for ZeRO-1
    is_whole = layout.sharding == "none" or _strategy(layout) == "zero1"
    shard = 1 if is_whole else layout.shard if layout.shard > 1 else layout.data
    return Degrees(
        pipeline=layout.pipeline,
        replicate=layout.data // shard,
        shard=shard,
        context=layout.context,
        tensor=layout.tensor,
        expert=layout.expert if shard * layout.context % layout.expert == 0 else 1,
    )


def _strategy(layout: Layout) -> str:
    if layout.pipeline > 1:
        return "pipeline"
    if layout.tensor > 1:
        return "tensor"
    if layout.data * layout.context == 1:
        return "single"
    return {"none": "ddp", "zero1": "zero1", "zero2": "fsdp", "zero3": "fsdp"}[layout.sharding]
