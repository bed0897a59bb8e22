"""The runbook of a promoted model: a page of Markdown for the person on call."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from statistics import mean

from scaleray.common.filesystems import write_whole
from scaleray.common.parsing import load_json
from scaleray.live.rules.rule_evaluator import RULES
from scaleray.live.rules.rule_files import PATH as ALERTS
from scaleray.records.path_record import PathRecord, PathTask
from scaleray.release.path.commands import Outcome
from scaleray.release.path.tasks import CHECK, PIPELINE, PROMOTE
from scaleray.release.promote.pipeline import PINS

RUNBOOK = "runbook.md"


def write_runbook(path: PathRecord) -> Outcome:
    """Write the runbook of a path into its folder."""
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
                ("a training was interrupted", f"scaleray train --resume {path.folder}/runs/NAME"),
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
    """Measured limits of alerts, from the promotion's pipeline."""
    try:
        pins = load_json((Path(path.folder) / PIPELINE / PINS).read_bytes())
    except (OSError, ValueError):
        return []
    lines = [f"- {line}" for line in pins.get("alert_limits") or ()]
    words = f"Limits in `{PIPELINE}/{ALERTS}` and in its job, from measurements; others are the defaults:"
    return ["\n".join([words, "", *lines])] if lines else []
