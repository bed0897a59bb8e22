"""unsent.jsonl: the run's location on the first line, followed by one unsent operation per line."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scaleray.common.parsing import inert_json, load_json
from scaleray.records.mlflow_operations import Operation, from_json


@dataclass(frozen=True)
class Unsent:
    """Content of an unsent file. head: the first line, None if it cannot be read. num_damaged: number of lines,
    including the head, that cannot be sent. is_cut: whether the last line is incomplete, as after a kill; it does not
    count as damaged."""

    head: dict[str, str] | None
    operations: list[Operation]
    num_damaged: int
    is_cut: bool


def parse(content: bytes) -> Unsent:
    """Read all readable lines of a file."""
    *lines, rest = content.split(b"\n")
    values = [_value(line) for line in lines if line.strip()]
    cut = from_json(_value(rest))
    operations = [operation for value in values if (operation := from_json(value)) is not None]
    head = next((dict(value) for value in values[:1] if _is_head(value)), None)
    num_damaged = len(values) - len(operations) - (head is not None)
    operations += [cut] if cut is not None else []  # only its end of line is missing
    return Unsent(head, operations, num_damaged, is_cut=bool(rest) and cut is None)


def _is_head(value: Any) -> bool:
    keys = ("tracking_uri", "run_id", "experiment_id")
    return isinstance(value, Mapping) and all(isinstance(value.get(key), str) for key in keys)


def _value(line: bytes) -> Any:
    try:
        return load_json(inert_json(line))
    except ValueError:
        return None
