"""A config and a workload as they are given to a function."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scaleray.config import RunConfig, load_config
from scaleray.workload import make_workload, name_of

Config = RunConfig | str | Path | Mapping[str, Any]
"""A RunConfig, a YAML file, or a mapping of dotted keys or sections."""


def whole_config(config: Config, workload: Any = None, base_dir: Path | None = None) -> tuple[RunConfig, Path | None]:
    """The config, with the workload's name where it has none, and the folder that its relative paths begin in: that of
    the file, unless `base_dir` is another."""
    named = {"workload.name": name_of(workload)} if workload is not None else {}
    if isinstance(config, RunConfig):
        return config, base_dir
    if isinstance(config, Mapping):
        return load_config(flags=config, defaults=named), base_dir
    return load_config(config, defaults=named), base_dir or Path(config).resolve().parent


def resolved(config: Config, workload: Any, base_dir: Path | None = None) -> tuple[RunConfig, Path | None, Any]:
    """The config and folder of `whole_config`, and the workload that was given, as an object."""
    whole, base_dir = whole_config(config, workload, base_dir)
    if isinstance(workload, type):
        workload = make_workload(workload, whole.workload.name, whole.workload.args)
    return whole, base_dir, workload
