"""User-defined GPUs, links and networks: a YAML file whose entries take precedence over the package's."""

import dataclasses
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from scaleray.common.parsing import load_yaml, near_words
from scaleray.config.hardware.hardware_kinds import Gpu, Link, Network
from scaleray.config.hardware.lookup import Catalogue
from scaleray.errors import ConfigError


def read_hardware_file(path: Path) -> Catalogue:
    """Read user-defined GPUs, links and networks: lists of mappings with the fields of `Gpu`, `Link` and `Network`.

    Raises ConfigError if the file cannot be read, a field is unknown or missing, or a value has the wrong type.
    """
    try:
        content = load_yaml(path.read_text())
    except (OSError, ValueError) as exc:
        raise ConfigError("hardware file", str(path), f"it cannot be read: {exc}") from exc
    kinds: dict[str, Any] = {"gpus": Gpu, "links": Link, "networks": Network}
    if (
        not isinstance(content, dict)
        or not set(content) <= set(kinds)
        or not all(isinstance(value, list | None) for value in content.values())
    ):
        raise ConfigError(f"hardware file {path}", content, f"it must contain lists under {', '.join(kinds)}")
    entries: dict[str, tuple[Any, ...]] = {}
    for key, kind in kinds.items():
        _refuse_unknown_fields(path, key, content.get(key) or (), {one.name for one in dataclasses.fields(kind)})
        read: list[Any] = []
        for index, entry in enumerate(content.get(key) or ()):
            try:
                read.append(TypeAdapter(kind).validate_python(entry))
            except ValidationError as exc:
                first = exc.errors()[0]
                where = ".".join(str(part) for part in (key, index, *first["loc"]))
                raise ConfigError(f"hardware file {path}: {where}", first.get("input"), str(first["msg"])) from exc
        entries[key] = tuple(read)
    return Catalogue(entries["gpus"], entries["links"], entries["networks"], sources=(str(path),))


def _refuse_unknown_fields(path: Path, key: str, entries: Any, known: set[str]) -> None:
    for index, entry in enumerate(entries if isinstance(entries, list) else ()):
        for name in sorted(set(entry) - known) if isinstance(entry, dict) else ():
            near = near_words(str(name), known)
            raise ConfigError(
                f"hardware file {path}: {key}.{index}.{name}",
                entry[name],
                f"allowed fields are {', '.join(sorted(known))}",
                f"did you mean {near[0]}?" if near else "",
            )
