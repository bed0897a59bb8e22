"""`scaleray config`: the resolved config with what follows from it, and every key there is."""

from __future__ import annotations

from typing import Any

from cyclopts import App

from scaleray.cli.options import ConfigFile, Json, Overrides

config_app = App(name="config", help="Look at configs.", help_format="plaintext")


@config_app.command
def show(*overrides: Overrides, config: ConfigFile = None, json: Json = False, data: bool = True) -> int:
    """Print the resolved config and every derived value with how it was derived.

    Parameters
    ----------
    data
        Load the workload's data, which the number of steps depends on. --no-data leaves those values out.
    """
    import json as json_library

    import yaml

    from scaleray.config import load_config
    from scaleray.scaling.recipe.derive import derive
    from scaleray.scaling.recipe.values import DataSize

    resolved = load_config(config, flags=overrides)
    size: DataSize | None = None
    if data:
        from scaleray.data import load_sources
        from scaleray.launch.session.data import size_of
        from scaleray.workload import load_workload

        base_dir = config.resolve().parent if config else None
        size = size_of(load_sources(load_workload(resolved.workload.name, resolved.workload.args, base_dir=base_dir)))
    values: dict[str, Any] = {}
    explanations: dict[str, str] = {}
    if size is not None:
        recipe = derive(resolved, size)
        values, explanations = recipe.values(), recipe.explanations
    if json:
        print(
            json_library.dumps(
                {"config": resolved.to_dict(), "hash": resolved.hash(), "derived": values, "how": explanations},
                indent=2,
            )
        )
        return 0
    print(yaml.safe_dump(resolved.to_dict(), sort_keys=False), end="")
    print(f"\n# config hash {resolved.hash()}")
    if size is None:
        print("# derived values need the data: leave out --no-data")
    else:
        print(f"# derived, for {size.num_samples} training samples")
    width = max((len(name) for name in values), default=0)
    for name, value in values.items():
        text = (
            ", ".join(f"{v:.6g}" for v in value)
            if isinstance(value, tuple)
            else f"{value:.6g}"
            if isinstance(value, float)
            else str(value)
        )
        print(f"# {name:<{width}}  {text:<12}  {explanations.get(name, '')}")
    return 0


@config_app.command
def keys(*, json: Json = False) -> int:
    """List every key of the config with its type, default and meaning."""
    import dataclasses
    import json as json_library
    import textwrap

    from scaleray.config.reference import key_rows

    rows = key_rows()
    if json:
        print(json_library.dumps([dataclasses.asdict(row) for row in rows], indent=2))
        return 0
    for row in rows:
        print(f"{row.key}  {row.type} = {row.default}")
        print(textwrap.fill(row.meaning, width=100, initial_indent="    ", subsequent_indent="    "))
    return 0
