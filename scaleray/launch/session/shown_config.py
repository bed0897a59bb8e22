"""A config as it is resolved, with what is derived from it: `scaleray config show`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scaleray.common.installed import names_what_is_missing
from scaleray.launch.session.config_argument import Config, whole_config


@names_what_is_missing
def show_config(
    config: Config, workload: Any = None, *, data: bool = True, base_dir: Path | None = None
) -> dict[str, Any]:
    """Return the resolved config, its hash, every value that is derived from it, and how.

    config: a RunConfig, a YAML file, or a mapping of dotted keys or sections. workload: a class or an object; None is
    the config's. data: load its data, which most derived values depend on; without it they are left out. base_dir:
    folder in which paths of a RunConfig begin. Raises UsageError.
    """
    whole, base_dir = whole_config(config, workload, base_dir)
    from scaleray.config.recipe.derive import derive

    shown: dict[str, Any] = {"config": whole.to_dict(), "hash": whole.hash(), "derived": {}, "how": {}}
    if not data:
        return shown
    from scaleray.data import load_sources
    from scaleray.data.iterable import ENDLESS
    from scaleray.launch.session.data_sources import is_in_steps, size_of
    from scaleray.workload import make_workload

    settings = whole.workload
    workload = make_workload(workload, settings.name, settings.args, base_dir=base_dir)
    size = size_of(load_sources(workload, in_steps=is_in_steps(whole)))
    recipe = derive(whole, size)
    rows = "without an end" if size.num_samples == ENDLESS else size.num_samples
    return {**shown, "derived": recipe.values(), "how": dict(recipe.explanations), "rows": rows}
