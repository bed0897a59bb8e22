"""unsent.jsonl: where the run is on its first line, then one operation a line that MLflow has not taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scaleray.parsing import load_json

NEEDED = {
    "metrics": ("points",), "params": ("values",), "tags": ("values",), "artifact": ("path",), "status": ("status", "end_time"),
    "dataset": ("name", "digest", "source", "profile", "context"),
}  # fmt: skip
"""What an operation of each kind must hold."""


@dataclass(frozen=True)
class Unsent:
    """head: None when it cannot be read. num_damaged: lines, the head among them, that hold nothing that can be sent.

    is_cut: the last line has no end, as after a kill; it is not among the damaged ones.
    """

    head: dict[str, str] | None
    operations: list[dict[str, Any]]
    num_damaged: int
    is_cut: bool


def parse(content: bytes) -> Unsent:
    """Read whatever can be read of a file."""
    *lines, rest = content.split(b"\n")
    values = [_value(line) for line in lines if line.strip()]
    cut = _value(rest)
    values += [cut] if is_operation(cut) else []  # only its end of line is missing
    head = next((dict(value) for value in values[:1] if _is_head(value)), None)
    operations = [value for value in values if is_operation(value)]
    num_damaged = len(values) - len(operations) - (head is not None)
    return Unsent(head, operations, num_damaged, is_cut=bool(rest) and not is_operation(cut))


def is_operation(value: Any) -> bool:
    """Whether this can be sent to a run."""
    if not isinstance(value, Mapping) or not isinstance(kind := value.get("op"), str) or kind not in NEEDED:
        return False
    if any(key not in value for key in NEEDED[kind]):
        return False
    if kind == "metrics":
        return isinstance(value["points"], list) and all(map(_is_point, value["points"]))
    return "values" not in value or isinstance(value["values"], Mapping)


def _is_head(value: Any) -> bool:
    keys = ("tracking_uri", "run_id", "experiment_id")
    return isinstance(value, Mapping) and all(isinstance(value.get(key), str) for key in keys)


def _is_point(value: Any) -> bool:
    return (
        isinstance(value, list) and len(value) == 4 and isinstance(value[0], str)
        and all(isinstance(number, (int, float)) for number in value[1:])
    )  # fmt: skip


def _value(line: bytes) -> Any:
    try:
        return load_json(line)
    except ValueError:
        return None
