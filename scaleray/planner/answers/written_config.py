"""The chosen layout as keys of a run's config, for `scaleray train`."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from scaleray.config.loading import known_keys, load_config
from scaleray.config.parallel import Degrees
from scaleray.config.recipe.derive import derive
from scaleray.config.recipe.values import DataSize
from scaleray.config.strategy_traits import traits_of
from scaleray.errors import ConfigError, first_line
from scaleray.planner.answers.plan_question import Question
from scaleray.planner.cost.layout import Layout

PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "tf32": "fp32", "fp8": "bf16", "fp4": "bf16"}


ENOUGH_SAMPLES = 2**40
"""Size of a training split that passes all checks."""


def refusal(layout: Layout, question: Question) -> str:
    """Return why `scaleray train` would refuse the layout with the question's config, if any; empty if it would not."""
    try:
        keys = config_keys(layout, question)
    except ConfigError as exc:
        return first_line(exc)
    # an error of the config without the layout is none of the layout's
    return why if (why := _error(question, keys)) and why != _error(question, {}) else ""


def _error(question: Question, keys: Mapping[str, Mapping[str, Any]]) -> str:
    """Error of the question's config with these sections; empty if there is none."""
    if question.config is None:
        return ""
    given = question.config.model_dump(exclude_unset=True)
    for section, values in keys.items():
        given[section] = {**given.get(section, {}), **values}
    try:
        size = DataSize(ENOUGH_SAMPLES, tokens_per_sample=question.model.tokens_per_sample)
        derive(load_config(flags=given, environ={}), size)
    except ConfigError as exc:
        return first_line(exc).removeprefix("override ")
    return ""


def config_keys(layout: Layout, question: Question) -> dict[str, Any]:
    """Return the sections of a config with which `scaleray train` uses the layout.

    question: its config may count the batch in tokens. Raises ConfigError if experts cannot be divided this way.
    """
    strategy = _strategy(layout)
    in_tokens = question.config is not None and question.config.batch.unit == "tokens"
    if layout.expert > 1 and not ("expert" in traits_of(strategy).axes and _degrees(layout).expert > 1):
        raise ConfigError(
            "layout",
            layout.describe(),
            "scaleray train divides experts only over the workers of fsdp",
            "plan with --strategies fsdp,ep, or without ep",
        )
    keys: dict[str, Any] = {
        "scale": {"workers": layout.num_gpus, "gpus_per_worker": int(question.cluster.gpu.name != "cpu")},
        "strategy": {"name": strategy},
        "batch": {
            "global_size": layout.global_batch * (question.model.tokens_per_sample if in_tokens else 1),
            "micro_size": layout.micro_batch,
        },
        "precision": {"dtype": PRECISIONS[layout.precision], "tf32": layout.precision == "tf32"},
        "activations": _ACTIVATIONS[layout.checkpointing],
    }
    if layout.compiled:
        keys["compilation"] = {"what": "blocks"}
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


def layout_options(layout: Layout, question: Question) -> list[str]:
    """Return the layout as options of `scaleray train` for a config that already sets the batch, the precision and the
    workers."""
    known = known_keys()
    keys = {
        name: values for name, values in config_keys(layout, question).items() if name not in ("scale", "precision")
    }
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
    """Degrees of the layout. Experts are not divided over GPUs that belong only to tensor parallelism."""
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
