"""A path as tables: its tasks step by step, and what people decided."""

from __future__ import annotations

import time

from scaleray.records.path_record import STEPS, PathRecord, PathTask
from scaleray.records.text.tables import Table
from scaleray.records.text.units import seconds


def path_tables(path: PathRecord) -> list[Table]:
    """A table of the tasks of each step, and one of the decisions."""
    heads = ("task", "state", "began", "took", "by", "result")
    found = [
        Table(step, heads, tuple(_row(task) for task in path.tasks if task.step == step), has_words=True)
        for step in STEPS
    ]
    rows = tuple((one.what, _when(one.at), one.by, one.why) for one in path.decisions)
    return [*found, Table("decisions", ("decision", "when", "by", "reason"), rows, has_words=True)] if rows else found


def _row(task: PathTask) -> tuple[str, ...]:
    took = "" if task.duration_s is None else seconds(task.duration_s)
    name = task.key.partition("/")[2]
    return (name, task.status, _when(task.started_at), took, task.by, task.words or task.what)


def _when(at: float | None) -> str:
    return time.strftime("%m-%d %H:%M", time.localtime(at)) if at else ""
