"""`parallel: auto`: the planner's layout for the workers of a run, instead of degrees in its config."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scaleray.config import RunConfig, load_config
from scaleray.config.hardware.catalogue import CATALOGUE
from scaleray.config.hardware.hardware_kinds import Cluster
from scaleray.config.parallel import AUTO
from scaleray.errors import ConfigError

CHOSEN = ("strategy", "parallel", "batch", "activations", "pipeline", "tensor", "fsdp")
"""Sections whose keys the planner chooses, unless the config sets them."""
FOLLOWED = ("strategy.name", "batch.micro_size", "activations.checkpointing")
"""Keys that limit the choice of layouts if the config sets them."""


def load_planned(path: Path | None, overrides: Sequence[str]) -> RunConfig:
    """Load a config, and replace `parallel: auto` by the layout that the planner recommends for its workers on the
    cluster of RAY_ADDRESS, or on this machine. The layout is printed to stderr. Raises ConfigError, and ClusterError
    for a cluster that cannot be planned."""

    def planned(config: RunConfig) -> Mapping[str, Any]:
        if path is None:
            raise ConfigError("parallel", AUTO, "the planner counts a config's workload", "give the config with -c")
        return _planned(config, path, overrides, os.environ.get("RAY_ADDRESS"))

    return load_config(path, flags=overrides, planned=planned)


def _planned(config: RunConfig, path: Path, overrides: Sequence[str], address: str | None) -> dict[str, Any]:
    if config.scale.is_elastic:
        raise ConfigError(
            "parallel", AUTO, "a layout is chosen for a fixed number of workers", "give one scale.workers"
        )
    if config.scale.max_workers == 1:
        return {}
    from scaleray.planner.answers.advise import advise
    from scaleray.planner.answers.written_config import config_keys
    from scaleray.planner.ask.asked_plan import question_of
    from scaleray.planner.ask.plan_options import LayoutOptions
    from scaleray.planner.ask.this_machine import ray_cluster, this_machine
    from scaleray.planner.ask.written_plan import runnable

    has_gpus = config.scale.may_have_gpus
    cluster = (
        ray_cluster(address, CATALOGUE, has_gpus=has_gpus) if address else this_machine(CATALOGUE, has_gpus=has_gpus)
    )
    cluster = _of_workers(cluster, config.scale.max_workers)
    question = question_of(LayoutOptions(), config=path, overrides=overrides, cluster=cluster)
    advice = advise(question)

    def keys_of(layout: Any) -> dict[str, Any]:
        sections = config_keys(layout, question)
        return {f"{name}.{key}": value for name in CHOSEN for key, value in sections.get(name, {}).items()}

    def is_followed(layout: Any) -> bool:
        keys = keys_of(layout)
        return all(keys[key] == _given(config, key, keys[key]) for key in FOLLOWED)

    choices = [one for one in advice.choices if is_followed(one.layout)]
    if not choices:
        asked = ", ".join(f"{key} {value}" for key in FOLLOWED if (value := _given(config, key, None)) is not None)
        raise ConfigError(
            "parallel", AUTO, f"the planner has no layout with {asked}", "leave them out, or give degrees"
        )
    chosen, _ = runnable(replace(advice, choices=choices))
    print(f"parallel: auto is {chosen.layout.describe()}", file=sys.stderr)
    return {key: value for key, value in keys_of(chosen.layout).items() if _given(config, key, None) is None}


def _given(config: RunConfig, key: str, otherwise: Any) -> Any:
    """The config's value of a key, or `otherwise` if it has none."""
    section, _, name = key.partition(".")
    settings = getattr(config, section)
    value = getattr(settings, name) if name in settings.model_fields_set else None
    return otherwise if value is None or (key, value) == ("strategy.name", AUTO) else value


def _of_workers(cluster: Cluster, workers: int) -> Cluster:
    """The part of the cluster that the workers use, evenly over its nodes; a CPU may have several workers."""
    most = max(cluster.gpus_per_node, -(-workers // cluster.num_nodes))
    per_node = max(number for number in range(1, most + 1) if workers % number == 0)
    return replace(cluster, gpus_per_node=per_node, num_nodes=workers // per_node)
