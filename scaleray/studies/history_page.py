"""History of a team's trainings over months: tables, and one HTML page."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from scaleray.common.installed import names_what_is_missing
from scaleray.common.printed import quantity
from scaleray.errors import ConfigError, StorageError, UsageError
from scaleray.records.page.drawing import BLUE, GREEN, INK, VERMILION, Drawing, draw
from scaleray.records.page.page import Page, Section, render
from scaleray.records.text.study_sweep_tables import Table
from scaleray.records.text.units import figure, seconds
from scaleray.studies.curves.history import FIGURES, History, histories


@names_what_is_missing
def experiment_curves(
    *,
    model: str | None = None,
    gpus: int | None = None,
    since: str | None = None,
    figure: str = "efficiency",
    html: str | Path | None = None,
    uri: str | None = None,
    command: str = "scaleray.experiment_curves(...)",
) -> list[History]:
    """Show how a measurement of the same training on the same machines changed over time.

    model: a part of the workload's name. gpus: number of workers. since: a date such as 2026-11-01, or how long ago, as
    in 7d. figure: efficiency, samples_per_s, mfu, speedup or step_time_s. html: a file for the page, which names
    `command` as its origin. uri: MLflow's tracking URI. A change of level is a `ChangePoint` of `.changes`, found by
    the E-divisive method.

    Raises UsageError if no experiment has the figure, StorageError if the page cannot be written."""
    from scaleray.recording.experiments import read_experiments

    if figure not in FIGURES:
        raise ConfigError("--figure", figure, f"it must be one of {', '.join(FIGURES)}")
    kinds = ("point", "run") if figure in ("samples_per_s", "step_time_s") else ("point",)
    found = histories(read_experiments(uri, model=model, gpus=gpus, since=since, kinds=kinds), figure=figure)
    if not found:
        hint = "efficiency is measured by scaleray study; docs/experiments.md shows how to search MLflow"
        raise UsageError.problem("No matching experiment", f"recorded {figure}", hint)
    if html is not None:
        page = history_page(found, command=command)
        try:
            Path(html).write_text(page)
        except OSError as exc:
            raise StorageError.problem(
                "--html", f"{html} cannot be written: {exc.strerror}", "choose another file"
            ) from exc
    return found


def history_drawing(history: History, *, name: str) -> Drawing:
    """The history as a figure. name: stem of its file name."""
    import numpy as np

    moments: list[Any] = [datetime.fromisoformat(str(one.values["started"])) for one in history.points]
    values = history.values
    ends = [0, *(one.index for one in history.changes), len(values)]

    def paint(ax: Any) -> None:
        ax.plot(moments, values, "o", color=BLUE, markersize=4.5, zorder=3)
        for start, end in itertools.pairwise(ends):
            level = float(np.median(values[start:end]))
            ax.plot([moments[start], moments[end - 1]], [level, level], color=INK, linewidth=1.3, zorder=2)
        for change in history.changes:
            colour = VERMILION if history.is_worse(change) else GREEN
            ax.axvline(moments[change.index], color=colour, linewidth=1.2, linestyle=(0, (4, 3)))
        ax.set_ylabel(history.figure.replace("_", " "))
        if history.figure in ("efficiency", "mfu"):
            ax.set_ylim(0, max(1.05, 1.05 * max(values)))
        ax.tick_params(axis="x", rotation=20)

    caption = "Dots: measurements. Lines: levels. Dashed: a change beyond noise; red: for the worse."
    return draw(name, history.title, caption, paint, is_wide=True)


CHANGE_IS = "a change is marked if the energy distance between both sides exceeds chance (E-divisive, 5 %)"


def history_table(history: History, *, rows: int | None = None) -> Table:
    """Points by date, with the changes of level. rows: number of newest points to show; points of changes are always
    shown."""
    changes = {one.index: one for one in history.changes}
    first = 0 if rows is None else max(0, len(history.points) - rows)
    cells = []
    for number, (one, value) in enumerate(zip(history.points, history.values, strict=True)):
        change = changes.get(number)
        if change is None and number < first:
            continue
        said = ""
        if change is not None:
            word = "worse" if history.is_worse(change) else "better"
            levels = f"{_shown(history.figure, change.before)} to {_shown(history.figure, change.after)}"
            beside = "; ".join(history.explained(change)) or "no other recorded change"
            said = f"{word}: {levels} (p {change.p_value:.2g}); {beside}"
        started = str(one.values["started"]).replace("T", " ")
        cells.append((started, str(one.values["name"]), _shown(history.figure, value), said))
    columns = ("started", "name", history.figure.replace("_", " "), "change")
    notes = [CHANGE_IS] if history.changes else []
    left_out = len(history.points) - len(cells)
    notes += [f"{quantity(left_out, 'earlier point')} omitted: use --rows, --html or --json"] if left_out else []
    return Table(history.title, columns, tuple(cells), tuple(notes))


def history_headline(found: Sequence[History]) -> str:
    """Headline with the number of changes."""
    changes = [(history, one) for history in found for one in history.changes]
    worse = sum(history.is_worse(one) for history, one in changes)
    points = sum(len(history.points) for history in found)
    counted = f"{quantity(points, 'point')} on {quantity(len(found), 'curve')}"
    return f"{counted}: {quantity(len(changes), 'change')} beyond noise, {worse} for the worse"


def history_page(found: Sequence[History], *, command: str) -> str:
    """The page as self-contained HTML."""
    sections = [
        Section(
            history.title,
            drawings=[history_drawing(history, name=f"history-{number}")] if len(history.points) > 1 else [],
            tables=[history_table(history)],
        )
        for number, history in enumerate(found)
    ]
    page = Page(
        kind="Registry",
        name=f"{found[0].figure.replace('_', ' ')} by date",
        when=f"{found[0].points[0].values['started'][:10]} and later",
        headline=history_headline(found),
        sections=sections,
        command=command,
        notes=[f"{CHANGE_IS[0].upper()}{CHANGE_IS[1:]}. Invalid and changed measurements are omitted."],
        closing="This page needs no network.",
    )
    return render(page)


def _shown(name: str, value: float) -> str:
    if name in ("efficiency", "mfu"):
        return f"{value:.1%}"
    return seconds(value) if name.endswith("_s") and name != "samples_per_s" else figure(value)
