"""Data and page of `scaleray registry curve`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scaleray.errors import ConfigError, StorageError, UsageError
from scaleray.scaling.curves.history import FIGURES, Course, courses


def curves(*, model: str | None, gpus: int | None, since: str | None, figure: str, uri: str | None) -> list[Course]:
    """The courses of a figure. Raises UsageError where nothing that is asked for has it."""
    from scaleray.tracking.registry.experiments import read_experiments

    if figure not in FIGURES:
        raise ConfigError("--figure", figure, f"it must be one of {', '.join(FIGURES)}")
    kinds = ("point", "run") if figure in ("samples_per_s", "step_time_s") else ("point",)
    found = courses(read_experiments(uri, model=model, gpus=gpus, since=since, kinds=kinds), figure=figure)
    if not found:
        hint = "efficiency is measured by scaleray study; docs/experiments.md shows how to search MLflow"
        raise UsageError(figure, None, "no experiment that is like that has it", hint)
    return found


def write_page(found: Sequence[Course], path: Path, *, command: str) -> None:
    """Write the courses as one HTML page. Raises StorageError."""
    from scaleray.reports.records.history import history_page

    page = history_page(found, command=command)
    try:
        path.write_text(page)
    except OSError as exc:
        raise StorageError("--html", str(path), f"it cannot be written: {exc.strerror}", "choose another file") from exc
