"""Read a policy from its YAML file, or raise an error that names the key."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from scaleray.common.parsing import load_yaml_with_lines, near_words
from scaleray.errors import ConfigError, first_line
from scaleray.release.gates.policy import Policy


def read_policy(path: str | Path | Mapping[str, Any] | None) -> Policy:
    """Read a policy from a file or a mapping of sections; None: the defaults. Raises ConfigError for an invalid key or
    value."""
    if path is None:
        return Policy()
    if isinstance(path, Mapping):
        return policy_of(dict(path), where="given")
    file = Path(path)
    try:
        values, lines = load_yaml_with_lines(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError.problem("policy file", f"{path} does not exist", "--policy names a YAML file") from None
    except (OSError, ValueError) as exc:
        raise ConfigError.problem("policy file", f"{path} cannot be read: {first_line(exc)}") from exc
    return policy_of(values, where=str(path), lines=lines)


def policy_of(values: Any, *, where: str, lines: Mapping[str, int] | None = None) -> Policy:
    """Policy from plain values by section and key. where: name of the source in messages. lines: line of each key."""
    if not isinstance(values, dict):
        raise ConfigError.problem(
            f"policy {where}", f"is not a mapping with the sections {', '.join(Policy.model_fields)}"
        )
    try:
        return Policy.model_validate(values)
    except ValidationError as exc:
        problem = exc.errors(include_url=False)[0]
        words = [str(part) for part in problem["loc"]]
        key = ".".join(words)
        line = (lines or {}).get(".".join(words[:2]))
        where = where if line is None else f"{where}:{line}"
        if problem["type"] == "extra_forbidden":
            known = _known_keys()
            near = near_words(key, known)
            hint = f"did you mean {near[0]}?" if near else f"keys are {', '.join(known)}"
            raise ConfigError.problem(f"policy {where} {key}", "is an unknown key", hint) from exc
        message = problem["msg"].removeprefix("Value error, ").rstrip(".")
        allowed = f"it is not allowed: {message[0].lower()}{message[1:]}"
        raise ConfigError(f"policy {where} {key}", problem.get("input"), allowed) from exc


def _known_keys() -> list[str]:
    return [
        *Policy.model_fields,
        *(
            f"{section}.{key}"
            for section, info in Policy.model_fields.items()
            if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
            for key in info.annotation.model_fields
        ),
    ]
