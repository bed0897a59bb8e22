"""`scaleray config`: print the resolved config with its derived values, or all keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from scaleray.cli.options import ConfigFile, Json, Overrides
from scaleray.cli.output import print_json
from scaleray.errors import StorageError

config_app = App(name="config", help="Inspect configs.", help_format="plaintext")


@config_app.command
def show(
    *overrides: Overrides,
    config: ConfigFile = None,
    all_: Annotated[bool, Parameter(name="--all", negative="")] = False,
    json: Json = False,
    data: bool = True,
) -> int:
    """Print the keys that differ from their defaults, and all derived values with their derivations.

    Parameters
    ----------
    all_
        Print all keys.
    data
        Load the workload's data, which determines the number of steps. --no-data omits these values.
    """
    import yaml

    from scaleray.config.reference import changed_values, unlike_torch, with_singulars
    from scaleray.launch.session.config_argument import show_config
    from scaleray.planner.ask.auto_layout import load_planned

    resolved = load_planned(config, overrides)
    shown = show_config(resolved, data=data, base_dir=config.resolve().parent if config else None)
    if json:
        print_json({key: shown[key] for key in ("config", "hash", "derived", "how")})
        return 0
    values, explanations = shown["derived"], shown["how"]
    written = with_singulars(shown["config"]) if all_ else changed_values(resolved)
    print(yaml.safe_dump(written, sort_keys=False), end="")
    if not all_:
        print("# every other key has its default: --all prints them")
    for line in unlike_torch(resolved):
        print(f"# {line}")
    print(f"\n# config hash {shown['hash']}")
    if not data:
        print("# derived values need the data: omit --no-data")
    else:
        print(f"# derived, for {shown['rows']} training samples")
    width = max((len(name) for name in values), default=0)
    for name, value in values.items():
        if value is None and not all_:
            continue
        text = (
            ", ".join(f"{v:.6g}" for v in value)
            if isinstance(value, tuple)
            else f"{value:.6g}"
            if isinstance(value, float)
            else ", ".join(f"{key} {n}" for key, n in value.items() if n > 1) or "1 each"
            if isinstance(value, dict)
            else str(value)
        )
        print(f"# {name:<{width}}  {text:<12}  {explanations.get(name, '')}")
    return 0


@config_app.command
def keys(section: str | None = None, *, json: Json = False) -> int:
    """List the config keys with their allowed values, defaults and meanings.

    Parameters
    ----------
    section
        Only one section (`optimizer`), or only the keys whose name contains this word (`batch`).
    """
    import dataclasses
    import textwrap

    from scaleray.config.reference import REQUIRED, key_rows, rows_of

    rows = key_rows() if section is None else rows_of(section)
    if json:
        print_json({"keys": [dataclasses.asdict(row) for row in rows]})
        return 0
    for row in rows:
        print(f"{row.key}  {row.type}; {f'default {row.default}' if row.default != REQUIRED else REQUIRED}")
        print(textwrap.fill(row.meaning, width=100, initial_indent="    ", subsequent_indent="    "))
    return 0


@config_app.command
def schema(what: Literal["config", "run", "study", "sweep", "live"] = "config", *, out: Path | None = None) -> int:
    """Print the JSON schema of the config, for editors, or of a record.

    Parameters
    ----------
    what
        config for the YAML file; run, study or sweep for its record.json.
    out
        File to write to. Editors complete and check a YAML file whose first line refers to the config's schema.
    """
    import json as json_library

    from scaleray.records.schemas import SCHEMAS

    text = json_library.dumps(SCHEMAS[what](), indent=2)
    if out is None:
        print(text)
        return 0
    try:
        out.write_text(text + "\n")
    except OSError as exc:
        raise StorageError.problem("--out", f"{out} cannot be written: {exc.strerror}", "choose another file") from exc
    print(f"schema: {out}")
    if what == "config":
        print(f"put this line first in the YAML file:  # yaml-language-server: $schema={out}")
    return 0
