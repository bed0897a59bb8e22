"""A config as it is resolved, with what is derived from it: `scaleray config show`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scaleray.config import RunConfig


def shown_config(
    config: RunConfig, workload: Any = None, *, data: bool = True, base_dir: Path | None = None
) -> dict[str, Any]:
    """The config with its hash, every derived value, and how it was derived.

    data: load the workload's data, which most derived values depend on; without it there are none. base_dir: folder in
    which relative paths of the config begin. Raises UsageError.
    """
    from scaleray.scaling.recipe.derive import derive

    shown: dict[str, Any] = {"config": config.to_dict(), "hash": config.hash(), "derived": {}, "how": {}}
    if not data:
        return shown
    from scaleray.data import load_sources
    from scaleray.data.iterable import ENDLESS
    from scaleray.launch.session.data import is_in_steps, size_of
    from scaleray.workload import make_workload

    settings = config.workload
    workload = make_workload(workload, settings.name, settings.args, base_dir=base_dir)
    size = size_of(load_sources(workload, in_steps=is_in_steps(config)))
    recipe = derive(config, size)
    rows = "without an end" if size.num_samples == ENDLESS else size.num_samples
    return {**shown, "derived": recipe.values(), "how": dict(recipe.explanations), "rows": rows}
