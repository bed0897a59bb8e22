"""Experiments of the registry as a table."""

from __future__ import annotations

from collections.abc import Sequence

from scaleray.records.experiment import Experiment
from scaleray.text.tables import Table
from scaleray.text.units import count, seconds

SHOWN = ("name", "kind", "started", "owner", "model", "gpus", "strategy", "global_batch", "rule")


def registry_table(found: Sequence[Experiment]) -> Table:
    """The experiments, one a row. What must not be used says why."""
    has_words = any(map(_remarks, found))
    return Table(
        title="",
        columns=(
            *("workers" if name == "gpus" else name.replace("_", " ") for name in SHOWN),
            "samples/s", "step", "efficiency", "worker hours", "purpose", *(["remarks"] if has_words else []),
        ),
        rows=tuple(_row(one)[: None if has_words else -1] for one in found),
    )  # fmt: skip


def _row(one: Experiment) -> tuple[str, ...]:
    values = one.values
    efficiency, hours = values.get("efficiency"), values.get("worker_hours")
    return (
        *(str(values.get(name, "")) for name in SHOWN),
        count(values.get("samples_per_s")),
        seconds(values.get("step_time_s")),
        "" if efficiency is None else f"{efficiency:.1%}",
        "" if hours is None else f"{hours:.3g}",
        str(values.get("purpose", "")),
        _remarks(one),
    )


def _remarks(one: Experiment) -> str:
    found = [f"invalid: {one.values['invalid']}"] if one.values.get("invalid") else []
    found += [f"changed: {one.problem}"] if one.problem else []
    found += [one.values["exceptions"]] if one.values.get("exceptions") else []
    found += [str(one.values["status"]).lower()] if one.values.get("status") in ("FAILED", "KILLED", "RUNNING") else []
    return "; ".join(found)
