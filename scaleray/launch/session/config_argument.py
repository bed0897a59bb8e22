"""A config and a workload as arguments of a function."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scaleray.common.installed import names_what_is_missing
from scaleray.config import RunConfig, load_config
from scaleray.workload import make_workload, name_of

Config = RunConfig | str | Path | Mapping[str, Any]
"""A RunConfig, a YAML file, or a mapping of dotted keys or sections."""


def whole_config(config: Config, workload: Any = None, base_dir: Path | None = None) -> tuple[RunConfig, Path | None]:
    """The config, with the workload's name if it lacks one, and the folder to which its paths are relative: the file's
    own, unless `base_dir` is given."""
    named = {"workload.name": name_of(workload)} if workload is not None else {}
    if isinstance(config, RunConfig):
        return config, base_dir
    if isinstance(config, Mapping):
        return load_config(flags=config, defaults=named), base_dir
    return load_config(config, defaults=named), base_dir or Path(config).resolve().parent


def resolved(config: Config, workload: Any, base_dir: Path | None = None) -> tuple[RunConfig, Path | None, Any]:
    """The config and folder from `whole_config`, and the workload as an object."""
    whole, base_dir = whole_config(config, workload, base_dir)
    if isinstance(workload, type):
        workload = make_workload(workload, whole.workload.name, whole.workload.args)
    return whole, base_dir, workload


@names_what_is_missing
def show_config(
    config: Config, workload: Any = None, *, data: bool = True, base_dir: Path | None = None
) -> dict[str, Any]:
    """Return the resolved config, its hash, and every derived value with its derivation.

    config: a RunConfig, a YAML file, or a mapping of dotted keys or sections. workload: a class or an object; None is
    the config's. data: whether to load its data; most derived values depend on the data and are omitted otherwise.
    base_dir: folder to which a RunConfig's paths are relative. Raises UsageError."""
    whole, base_dir = whole_config(config, workload, base_dir)
    from scaleray.config.recipe.derive import derive

    shown: dict[str, Any] = {"config": whole.to_dict(), "hash": whole.hash(), "derived": {}, "how": {}}
    if not data:
        return shown
    from scaleray.config.brought import with_brought
    from scaleray.data import TRAIN, Split, load_sources
    from scaleray.data.iterable import ENDLESS
    from scaleray.workload import make_workload

    settings = whole.workload
    workload = make_workload(workload, settings.name, settings.args, base_dir=base_dir)
    whole = with_brought(whole, workload)
    size = Split.of(TRAIN, load_sources(workload, in_steps=whole.is_in_steps)[TRAIN]).size
    recipe = derive(whole, size)
    rows = "without an end" if size.num_samples == ENDLESS else size.num_samples
    shown.update(config=whole.to_dict(), hash=whole.hash())
    return {**shown, "derived": recipe.values(), "how": dict(recipe.explanations), "rows": rows}
