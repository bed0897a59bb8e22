"""The page of a path: every task with its figures, who did it and when, and the command that does it again."""

from __future__ import annotations

import shlex
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scaleray.errors import StorageError
from scaleray.records.path import STEPS, PathRecord, PathTask
from scaleray.records.printed import quantity
from scaleray.records.read import read_record
from scaleray.records.run import RunRecord
from scaleray.reports.page.page import Fact, Page, Section, render
from scaleray.text.tables import Table, sentence_case
from scaleray.text.units import figure, seconds

PAGE = "path.html"
INTRODUCED = {
    "baseline": "One worker, as often as there are seeds: what everything else is held against.",
    "distribute": "The machines looked at, the same training on several workers proven equal, and its first run.",
    "optimise": "How it scales, what limits it, and changes: each beside what was the best then, kept only if it is "
    "faster beyond the noise and learns not worse.",
    "validate": "The distributed training as often as the baseline, with other batches, killed in the middle, for "
    "long, and the gates.",
    "produce": "The promoted version, checked, with files for a cluster, alerts and a runbook.",
}
SIDES = (("baseline/baseline-", "one worker"), ("validate/candidate-", "distributed"))
BESIDE = (
    "samples to target", "seconds to target", "seconds of steps to target", "samples_per_s", "peak_memory_gib", "busy",
    "goodput",
)  # fmt: skip
"""Figures of a training that are shown beside the target's."""
TRAININGS = ("train", "faults", "soak")
"""Kinds of tasks that are trainings."""
IN_WORDS = {
    "samples_per_s": "samples/s", "peak_memory_gib": "peak memory in GiB", "final_loss": "final loss",
    "busy": "share of a step that computes", "training_time_s": "training in s",
    "goodput": "share of the command that trains",
}  # fmt: skip


def write_path_page(path: PathRecord, file: Path) -> None:
    """Write the page of a path to one HTML file. Raises StorageError."""
    try:
        file.write_text(render(path_page(path)))
    except OSError as exc:
        raise StorageError("--html", str(file), f"it cannot be written: {exc.strerror}", "choose another file") from exc


def path_page(path: PathRecord) -> Page:
    """The page of a path."""
    done = [task for task in path.tasks if task.status in ("done", "skipped")]
    following = path.next_task()
    promoted = path.task("produce/promote")
    if following is None:
        is_out = promoted is not None and promoted.status == "done"
        headline = f"{path.model}@{path.alias} is promoted" if is_out else "At its end, with nothing promoted"
    else:
        skipped = sum(task.status == "skipped" for task in done)
        left_out = f", {skipped} skipped" if skipped else ""
        headline = (
            f"{len(done) - skipped} of {quantity(len(path.tasks), 'task')} done{left_out}; next: {following.what}"
        )
    return Page(
        kind="Path to production",
        name=path.name,
        when=_when(path.started_at),
        headline=headline,
        verdicts=[f"Target: {path.target}, on {quantity(path.workers, 'worker')} with {path.strategy}."],
        words=_words(path),
        marks=path.notes,
        figures=_facts(path),
        sections=[_steps(path), *(_section(path, step) for step in STEPS), *_decisions(path)],
        facts=_conditions(path),
        closing="This page needs no network.",
    )


def _words(path: PathRecord) -> list[str]:
    """What failed, what a person must decide, and the command that goes on."""
    found = [f"{task.key} failed: {task.words}" for task in path.tasks if task.status == "failed"]
    following = path.next_task()
    if following is None:
        return found
    if following.act == "decide":
        return [*found, sentence_case(following.words)]
    return [*found, f"To go on: scaleray path next --name {shlex.quote(path.folder)}"]


def _steps(path: PathRecord) -> Section:
    rows = []
    for step in STEPS:
        tasks = [task for task in path.tasks if task.step == step]
        counts = [sum(task.status == status for task in tasks) for status in ("done", "skipped", "failed")]
        took = sum(task.duration_s or 0.0 for task in tasks)
        people = ", ".join(dict.fromkeys(task.by for task in tasks if task.by))
        started = min((task.started_at for task in tasks if task.started_at), default=None)
        cells = (sentence_case(step), f"{len(tasks)}", *(str(count) if count else "" for count in counts))
        rows.append((*cells, _when(started), seconds(took) if took else "", people))
    heads = ("step", "tasks", "done", "skipped", "failed", "begun", "took", "by")
    return Section("Steps", tables=[Table("", heads, tuple(rows), has_words=True)])


def _facts(path: PathRecord) -> list[Fact]:
    """The target's metric and the speed of both sides."""
    metric, found = path.target.split(" ")[0], []
    for start, label in SIDES:
        for name in (metric, "samples_per_s"):
            if values := _values(path, start, name):
                title = f"{sentence_case(label)}: {IN_WORDS.get(name, name)}"
                found.append(Fact(title, figure(statistics.mean(values)), _spread(values)))
    return found


def _values(path: PathRecord, start: str, name: str) -> list[float]:
    return [task.figures[name] for task in path.tasks if task.key.startswith(start) and name in task.figures]


def _spread(values: Sequence[float]) -> str:
    if len(values) < 2:
        return "one run: nobody knows how much the next would differ"
    low, high = _interval(values)
    return f"{figure(low)} to {figure(high)} (95 %, {len(values)} runs)"


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean of several runs, by Student's t."""
    from scipy.stats import t

    middle = statistics.mean(values)
    half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return middle - half, middle + half


def _section(path: PathRecord, step: str) -> Section:
    tasks = [task for task in path.tasks if task.step == step]
    tables = [*_measured(path, step)]
    heads = ("task", "state", "what came of it", "by", "when", "took")
    tables.append(Table("Tasks", heads, tuple(_row(task, path) for task in tasks), has_words=True))
    commands = [(_name(task), task.shell) for task in tasks if task.command]
    if step == "optimise" and path.trials:
        tables.insert(0, _trials(path))
        for trial in path.trials:
            commands += [(f"try {trial.name}", trial.shell(path.folder))]
            commands += [(_name(task), task.shell) for task in trial.trainings]
            tasks += trial.trainings
    tables += [*_figures_of_trainings(tasks), *_other_figures(tasks)]
    tables.append(Table("Commands", ("task", "command"), tuple(commands), has_words=True))
    return Section(sentence_case(step), words=[INTRODUCED[step]], tables=tables)


def _name(task: PathTask) -> str:
    return task.key.partition("/")[2]


def _figures_of_trainings(tasks: Sequence[PathTask]) -> list[Table]:
    """Every figure of every training, which has a column."""
    trained = [task for task in tasks if task.act in TRAININGS and task.figures]
    names = list(dict.fromkeys(name for task in trained for name in task.figures))
    rows = tuple((IN_WORDS.get(name, name), *(figure(task.figures.get(name)) for task in trained)) for name in names)
    return [Table("Figures of the trainings", ("", *map(_name, trained)), rows)] if rows else []


def _other_figures(tasks: Sequence[PathTask]) -> list[Table]:
    """Every figure of what is no training, a row each."""
    rows = tuple(
        (_name(task), IN_WORDS.get(name, name), figure(value))
        for task in tasks
        if task.act not in TRAININGS
        for name, value in task.figures.items()
    )
    return [Table("Other figures", ("task", "figure", "value"), rows)] if rows else []


def _measured(path: PathRecord, step: str) -> list[Table]:
    """What the trainings of a step measured, with intervals where they repeat each other."""
    if step not in ("baseline", "validate"):
        return []
    metric = path.target.split(" ")[0]
    sides = [side for side in SIDES if step == "validate" or side[1] == "one worker"]
    rows = []
    for name in (metric, *BESIDE):
        cells = [_cell(_values(path, start, name)) for start, _ in sides]
        if any(cells):
            rows.append((IN_WORDS.get(name, name), *cells))
    heads = ("", *(label for _, label in sides))
    found = [Table("Measured: mean and 95 % interval", heads, tuple(rows), has_words=True)] if rows else []
    return [*found, *(_sizes(path) if step == "validate" else [])]


def _cell(values: Sequence[float]) -> str:
    if not values:
        return ""
    if len(values) < 2:
        return f"{figure(values[0])} (one run)"
    low, high = _interval(values)
    return f"{figure(statistics.mean(values))} ({figure(low)} to {figure(high)})"


def _sizes(path: PathRecord) -> list[Table]:
    """Convergence over numbers of workers and batch sizes."""
    metric = path.target.split(" ")[0]
    own = str(path.settings.get("batch.global_size", path.batch_size))
    groups = [("1", str(path.batch_size), SIDES[0][0]), (str(path.workers), own, SIDES[1][0])]
    for task in path.tasks:
        kind, _, size = task.key.removeprefix("validate/").rpartition("-")[0].partition("-")
        if kind == "batch":
            groups.append((str(path.workers), size, task.key))
        elif kind == "workers":
            groups.append((size, own, task.key))
    names = (metric, "samples to target", "seconds to target")
    rows = tuple(
        (workers, batch, str(len(_values(path, start, metric))), *(_cell(_values(path, start, name)) for name in names))
        for workers, batch, start in groups
        if _values(path, start, metric)
    )
    heads = ("workers", "batch", "runs", *names)
    return [Table("Convergence by workers and batch", heads, rows, has_words=True)] if len(rows) > 1 else []


def _row(task: PathTask, path: PathRecord) -> tuple[str, ...]:
    return (
        task.what,
        task.status,
        _reached(task, path) if task.act == "train" and task.status == "done" else task.words,
        task.by,
        _when(task.started_at),
        seconds(task.duration_s) if task.duration_s is not None else "",
    )


def _reached(task: PathTask, path: PathRecord) -> str:
    """What a training has come to; all its figures have a table of their own."""
    names = (path.target.split(" ")[0], "samples to target", "samples_per_s")
    return ", ".join(
        f"{IN_WORDS.get(name, name)} {figure(task.figures[name])}" for name in names if name in task.figures
    )


def _trials(path: PathRecord) -> Table:
    rows = tuple(
        (
            trial.name,
            ", ".join(f"{key} {value}" for key, value in trial.settings.items()),
            ("kept" if trial.is_kept else "left") if trial.verdict else "under way",
            trial.verdict,
            ", ".join(f"{name} {figure(value)}" for name, value in trial.figures.items()),
            trial.by,
            _when(trial.at),
        )
        for trial in path.trials
    )
    heads = ("trial", "change", "", "why", "what it gave", "by", "when")
    return Table("Changes that were tried", heads, rows, has_words=True)


def _decisions(path: PathRecord) -> list[Section]:
    rows = tuple((one.what, one.why, one.by, _when(one.at)) for one in path.decisions)
    if not rows:
        return []
    table = Table("", ("decision", "reason", "by", "when"), rows, has_words=True)
    return [Section("Decisions", words=["What people decided on the way."], tables=[table])]


def _conditions(path: PathRecord) -> dict[str, dict[str, Any]]:
    found = {"path": {"folder": path.folder, "MLflow": path.tracking_uri, "run": path.run_id, "begun by": path.by}}
    if path.settings:
        found["changed since the start"] = path.settings
    task = next((task for task in path.tasks if task.step == "baseline" and task.folder), None)
    if task is not None:
        try:
            record = read_record(Path(task.folder))
        except (OSError, ValueError, TypeError):
            return found
        if isinstance(record, RunRecord):
            found["environment of the baseline"] = record.environment.get("environment") or record.environment
            found["data"] = record.data
    return found


def _when(at: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) if at else ""
