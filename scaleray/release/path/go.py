"""Run a path: its tasks one after another, with stored results."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

from scaleray.common.filesystems import set_aside, write_whole
from scaleray.common.own_folder import user_or_somebody
from scaleray.common.parsing import load_json
from scaleray.errors import UsageError
from scaleray.live.rules.rule_evaluator import RULES
from scaleray.live.rules.rule_files import PATH as ALERTS
from scaleray.records.path_record import OVER, STEPS, PathDecision, PathRecord, PathTask
from scaleray.records.run_record import Say
from scaleray.records.start import steady_time
from scaleray.release.path.commands import Outcome, current_command, folder_of, held, ran
from scaleray.release.path.endurance import evaluated_soak, killed_and_resumed
from scaleray.release.path.path_state import find_path, locked, write
from scaleray.release.path.tasks import CHECK, DECIDE, PIPELINE, PROMOTE, STUDY, SWEEP, filled, log_of, tasks_of
from scaleray.release.promote.pipeline import PINS

RUNBOOK = "runbook.md"


def write_runbook(path: PathRecord) -> Outcome:
    """Write the runbook of a path to its folder."""
    place = Path(path.folder) / RUNBOOK
    write_whole(place, runbook(path))
    return Outcome(0, f"wrote {place.name}", folder=str(place))


def runbook(path: PathRecord) -> str:
    """The runbook as Markdown."""
    name = f"{path.model}@{path.alias}"
    parts = [
        f"# Runbook: {name}",
        f"{path.target} on {path.workers} workers with {path.strategy}; path `{path.name}` in `{path.folder}`, "
        f"begun by {path.by}. Written {time.strftime('%Y-%m-%d %H:%M')}.",
        "## Is it healthy?",
        _commands(
            [
                ("the version is the promoted one", f"scaleray promote --verify {name}"),
                ("later runs match the promoted ones", f"{path.folder}/{PIPELINE}/drift.sh"),
                ("steps taken", f"scaleray path status --name {shlex.quote(path.folder)}"),
                ("running trainings", "scaleray watch --all"),
            ]
        ),
        "## Usual values",
        _usual(path),
        "## When",
        _commands(
            [
                ("its predictions are wrong: return to the previous version", f"scaleray rollback {name}"),
                ("a training was interrupted", f"scaleray train --resume {shlex.quote(f'{path.folder}/runs')}/NAME"),
                ("train it again", f"{path.folder}/{PIPELINE}/retrain.sh"),
                ("serve it", f"mlflow models serve -m models:/{name} --env-manager local --port 5001"),
                ("predict rows", f"scaleray predict models:/{name} --data FILE --out FILE"),
            ]
        ),
        _known_of_faults(path),
        "## Alerts",
        _alerts(path),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _commands(rows: list[tuple[str, str]]) -> str:
    return "\n".join(["| when | command |", "|---|---|", *(f"| {what} | `{words}` |" for what, words in rows)])


def _usual(path: PathRecord) -> str:
    """Means and ranges of the measurements of both sides."""
    rows = ["| figure | one worker | distributed | range |", "|---|---|---|---|"]
    sides = [[task for task in path.tasks if task.key.startswith(start)] for start in ("baseline/", "validate/candid")]
    for name in dict.fromkeys(name for task in sides[1] for name in task.figures):
        one, many = ([task.figures[name] for task in side if name in task.figures] for side in sides)
        alone = f"{mean(one):.4g}" if one else ""
        rows.append(f"| {name} | {alone} | {mean(many):.4g} | {min(many):.4g} to {max(many):.4g} |")
    return "\n".join(rows)


def _known_of_faults(path: PathRecord) -> str:
    tasks = (path.task(key) for key in ("validate/faults-0", "validate/soak-0", "validate/gate", PROMOTE, CHECK))
    return "\n".join(["What was tried:", "", *(_tried(task) for task in tasks if task is not None)])


def _tried(task: PathTask) -> str:
    return f"- {task.what}: {task.status}" + (f"; {task.words}" if task.words else "")


def _alerts(path: PathRecord) -> str:
    rows = [f"| {rule.name} | {rule.severity} | {rule.costs} | {rule.advice} |" for rule in RULES]
    table = "\n".join(["| alert | severity | left alone | what to do |", "|---|---|---|---|", *rows])
    return "\n\n".join([*_limits(path), table])


def _limits(path: PathRecord) -> list[str]:
    """Measured alert limits, from the promotion's pipeline."""
    try:
        pins = load_json((Path(path.folder) / PIPELINE / PINS).read_bytes())
    except (OSError, ValueError):
        return []
    lines = [f"- {line}" for line in pins.get("alert_limits") or ()]
    words = f"Measured limits in `{PIPELINE}/{ALERTS}` and in its job; all other limits are the defaults:"
    return ["\n".join([words, "", *lines])] if lines else []


FORCE = "--force"
"""Option with which a study reuses no earlier measurements."""


def next_on_path(name: str | None = None, *, until: str | None = None, say: Say = lambda text: None) -> PathRecord:
    """Run the next task of a path, or all of them until a step is done.

    until: name of a step; the path stops earlier if a task fails or a person must decide. Returns the resulting path.
    An interrupted task continues where it stopped."""
    last = STEPS.index(_step(until)) if until is not None else None
    path = find_path(name)
    with locked(path) as path:
        while (task := path.next_task()) is not None:
            if task.act == "decide" or (last is not None and STEPS.index(task.step) > last):
                break
            path = _run(path, task, say=say)
            done = path.task(task.key)
            if until is None or done is None or done.status != "done":
                break
    return path


def steps_ahead(name: str | None = None, *, until: str | None = None) -> list[PathTask]:
    """The next task of a path, or all open tasks until a step is done or a person must decide, without running them.

    The first task has its final command; later commands need the results of earlier tasks."""
    last = STEPS.index(_step(until)) if until is not None else None
    path, found = find_path(name), list[PathTask]()
    for task in path.tasks:
        if task.status in OVER:
            continue
        if last is not None and STEPS.index(task.step) > last:
            break
        found.append(task if found else replace(task, ran=current_command(filled(path, task.command))))
        if until is None or task.act == "decide":
            break
    return found


def _step(name: str) -> str:
    if name not in STEPS:
        raise UsageError("--until", name, f"it must be one of {', '.join(STEPS)}")
    return name


def skip_on_path(task: str, reason: str, *, name: str | None = None) -> PathRecord:
    """Skip a task, with a reason shown in the status. Raises UsageError for an unknown task."""
    path = find_path(name)
    if not reason.strip():
        raise UsageError("--reason", None, "it is shown to readers of the path")
    with locked(path) as path:
        known = _known(path, task)
        _refuse_running(path, [known])
        by, at = user_or_somebody(), time.time()
        path = _with(path, replace(known, status="skipped", words=reason, by=by, started_at=at))
        path = write(_decided(path, f"skip {task}", reason))
    return path


def redo_on_path(task: str, reason: str = "", *, name: str | None = None) -> PathRecord:
    """Reopen a task and all later tasks that were not skipped. The runs of trainings are moved aside."""
    path = find_path(name)
    with locked(path) as path:
        first = path.tasks.index(_known(path, task))
        after = [one.key for one in path.tasks[first:] if one.status != "skipped" or one.key == task]
        _refuse_running(path, [one for one in path.tasks if one.key in after])
        fresh = {one.key: one for one in tasks_of(path)}
        path = replace(path, tasks=[_opened(t, fresh[t.key]) if t.key in after else t for t in path.tasks])
        path = write(_decided(path, f"redo {task}", reason))
    return path


def _opened(task: PathTask, fresh: PathTask) -> PathTask:
    """Reset a task; its files are moved aside and remain readable. A started study measures everything again instead of
    reusing its measurements."""
    is_promotion = "--pipeline" in task.command and "--verify" not in task.command
    folder = Path(task.command[task.command.index("--pipeline") + 1]) if is_promotion else folder_of(task.command)
    if folder is not None:
        set_aside(folder)
    is_measured = task.key == STUDY and (task.started_at is not None or FORCE in task.command)
    return replace(fresh, command=[*fresh.command, FORCE]) if is_measured else fresh


def _run(path: PathRecord, task: PathTask, *, say: Say) -> PathRecord:
    started, by = steady_time(), user_or_somebody()
    refused = None
    try:
        task = replace(task, ran=filled(path, task.command))
    except UsageError as exc:
        refused = Outcome(exc.exit_code, str(exc))
    path = write(_with(path, replace(task, status="running", started_at=started, by=by)))
    outcome = refused or _outcome(path, task, say=say)
    found = replace(
        task,
        status="done" if outcome.code == 0 else "failed",
        exit_code=outcome.code,
        started_at=started,
        duration_s=steady_time() - started,
        by=by,
        folder=outcome.folder,
        figures=outcome.figures,
        words=outcome.words,
    )
    path = _with(path, found)
    if task.key == SWEEP and outcome.code == 0:
        path = _advised(path, outcome.words)
    return write(path)


def _outcome(path: PathRecord, task: PathTask, *, say: Say) -> Outcome:
    if task.act == "runbook":
        return write_runbook(path)
    with held(log_of(path, task)):  # the command of an earlier call, which was killed, has ended
        say(f"{task.key}: {task.shell}")
    if task.act == "faults":
        return killed_and_resumed(path, task, task.ran)
    outcome = ran(path, task, task.ran)
    return evaluated_soak(path, outcome, task.ran) if task.act == "soak" else outcome


def _advised(path: PathRecord, advice: str) -> PathRecord:
    """The path, with the sweep's advice added to its next decision."""
    task = path.task(DECIDE)
    if task is None or not advice or task.status != "open":
        return path
    plain = task.words[task.words.index("a person decides") :]
    return _with(path, replace(task, words=f"result of the sweep: {advice} Now {plain}"))


def _refuse_running(path: PathRecord, tasks: Sequence[PathTask]) -> None:
    """Raise UsageError for a task whose command is still running although its call was killed."""
    for task in tasks:
        if task.status == "running":
            hint = f"wait for it, or end it; its log is {log_of(path, task)}"
            raise UsageError.problem("The command", f"of task {task.key} is still running", hint)


def _known(path: PathRecord, key: str) -> PathTask:
    if (task := path.task(key)) is None:
        raise UsageError("TASK", key, f"it must be one of {', '.join(one.key for one in path.tasks)}")
    return task


def _with(path: PathRecord, task: PathTask) -> PathRecord:
    return replace(path, tasks=[task if one.key == task.key else one for one in path.tasks])


def _decided(path: PathRecord, what: str, why: str) -> PathRecord:
    decision = PathDecision(at=time.time(), by=user_or_somebody(), what=what, why=why)
    return replace(path, decisions=[*path.decisions, decision])
