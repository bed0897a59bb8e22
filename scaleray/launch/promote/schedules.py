"""When a promoted model is trained again and its runs are held against it, in the words of each kind of cluster."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence
from datetime import date, timedelta
from typing import Any

import yaml

from scaleray.errors import UsageError

WEEKLY, DRIFT_HOUR = "0 3 * * 1", 12
"""Mondays at 3, and the hour of every day at which drift is looked for."""
EXAMPLE = f"such as '{WEEKLY}' for Mondays at 3"
FIELDS = re.compile(r"[0-9A-Za-z*/,\-]+")
RANGES: tuple[tuple[int, int, tuple[str, ...]], ...] = (
    (0, 59, ()), (0, 23, ()), (1, 31, ()),
    (1, 12, ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")),
    (0, 7, ("sun", "mon", "tue", "wed", "thu", "fri", "sat")),
)  # fmt: skip
"""Least and largest value of each field, and names for its values."""
KINDS = ("local", "kubernetes", "slurm", "ray-up")
SEED = "$(date +%Y%j)"
"""Seed in the words of a shell: another one every day, and the same for what goes on after an interruption."""
CRONTAB = "crontab.txt"
MOST_TIMES = 1_000_000
"""Number of runs, two years of one a minute, after which a schedule has shown all that it does."""
SHARED = "/mnt/scaleray/pipelines"
"""Folder of the pipelines on the volume that all nodes of a Kubernetes cluster see."""


def check_schedule(text: str) -> str:
    """The five fields of cron. Raises UsageError for anything else."""
    fields = text.split()
    if len(fields) != 5 or not all(map(FIELDS.fullmatch, fields)):
        raise UsageError("--schedule", text, "it must be five fields of cron", EXAMPLE)
    days_of(text, 1)
    return " ".join(fields)


def days_of(schedule: str, runs: int) -> int:
    """Days back in which so many runs have begun, whenever that is asked between two of them: by the longest time that
    this schedule takes for them, and a day for what begins late. Raises UsageError for fields that cron does not know.
    """
    minutes = _field(schedule, 0)
    hours, days, months, weekdays = (_field(schedule, number) for number in range(1, 5))
    of_day = sorted(60 * hour + minute for hour in hours for minute in minutes)
    text = schedule.split()
    is_either = not text[2].startswith("*") and not text[4].startswith("*")  # cron then asks for one of both
    times: list[int] = []
    day, last = date(2024, 1, 1), date(2024 + 4 * (runs + 2), 1, 1)  # a 29 February comes every four years
    while day < last and len(times) < MOST_TIMES:
        is_day, is_weekday = day.day in days, day.isoweekday() % 7 in weekdays
        if day.month in months and (is_day or is_weekday if is_either else is_day and is_weekday):
            times += [1440 * day.toordinal() + minute for minute in of_day]
        day += timedelta(days=1)
    if len(times) <= runs:
        raise UsageError("--schedule", schedule, "it is too rare for its runs to be held against anything", EXAMPLE)
    return math.ceil(max(later - before for before, later in zip(times, times[runs:], strict=False)) / 1440) + 1


def _field(schedule: str, number: int) -> set[int]:
    """The values of a field of cron."""
    text, (least, most, words) = schedule.split()[number], RANGES[number]
    found: set[int] = set()
    try:
        for part in text.split(","):
            span, _, step = part.partition("/")
            first, _, last = span.partition("-")
            start = least if first == "*" else _number(first, words)
            end = most if first == "*" or (step and not last) else _number(last or first, words)
            if not least <= start <= end <= most or (step and int(step) < 1):
                raise ValueError(part)
            found |= set(range(start, end + 1, int(step or 1)))
    except ValueError:
        allowed = f"the field {text!r} must be within {least} and {most}"
        raise UsageError("--schedule", schedule, allowed, EXAMPLE) from None
    return {value % 7 for value in found} if number == 4 else found  # Sunday is 0 and 7


def _number(word: str, words: Sequence[str]) -> int:
    name = word.lower()
    return words.index(name) + (len(words) == 12) if name in words else int(word)


def schedule_files(kind: str, model: str, schedule: str, manifests: dict[str, str], *, gpus: bool) -> dict[str, str]:
    """The files of the schedule, by path. manifests: those of the cluster, from which jobs on Kubernetes are made."""
    daily = f"0 {DRIFT_HOUR} * * *"
    if kind == "kubernetes":
        job = yaml.safe_load(manifests[f"kubernetes/job-{'gpu' if gpus else 'cpu'}/rayjob.yaml"])
        return _on_kubernetes(model, schedule, daily, job)
    table, mark = ("scrontab", "#SCRON --time=00:10:00\n") if kind == "slurm" else ("crontab", "")
    text = (
        f"# {model} is trained again, and the runs since are held against it. Set the path, and then:\n"
        f"# {table} {CRONTAB} (which replaces what was there: {table} -l)\n"
        "PIPELINE=/path/to/this/folder\n"
        f"{mark}{schedule} $PIPELINE/retrain.sh\n"
        f"{mark}{daily} $PIPELINE/drift.sh\n"
    )
    return {CRONTAB: text}


def _on_kubernetes(model: str, schedule: str, daily: str, job: dict[str, Any]) -> dict[str, str]:
    name = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")[:40]
    folder = f"{SHARED}/{name}"
    labels = {"app.kubernetes.io/part-of": "scaleray"}
    # quoted, for the shell of the submitter's pod hands it on
    command = f"env --chdir={folder} bash -c 'python -m scaleray train -c job.yaml --seed {SEED} --resume auto'"
    spec = {**job["spec"], "entrypoint": command}
    retrain = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCronJob",
        "metadata": {"name": f"{name}-retrain", "labels": labels},
        "spec": {"schedule": schedule, "jobTemplate": spec},
    }
    head = (
        f"# {model} is trained again. This folder must be {folder} on the shared volume.\n"
        "# RayCronJob is an alpha feature of KubeRay: start the operator with --feature-gates=RayCronJob=true\n"
    )
    drift = {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": {"name": f"{name}-drift", "labels": labels},
        "spec": {
            "schedule": daily,
            "concurrencyPolicy": "Forbid",
            "jobTemplate": {
                "spec": {"backoffLimit": 0, "template": _drift_pod(spec["submitterPodTemplate"], folder, spec)}
            },
        },
    }
    return {
        "kubernetes/retrain.yaml": head + yaml.safe_dump(retrain, sort_keys=False, width=110),
        "kubernetes/drift.yaml": f"# Today's runs are held against {model}.\n"
        + yaml.safe_dump(drift, sort_keys=False, width=110),
    }


def _drift_pod(submitter: dict[str, Any], folder: str, job: dict[str, Any]) -> dict[str, Any]:
    """The pod of the drift check: as bare as that of a job's submitter, with the shared volume and the variables of the
    training's head."""
    pod = copy.deepcopy(submitter)
    container = pod["spec"]["containers"][0]
    head = job["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    container |= {
        "name": "drift",
        "command": ["bash", f"{folder}/drift.sh"],
        "env": copy.deepcopy(head["containers"][0]["env"]),
    }
    shared = next(one for one in head["volumes"] if one["name"] == "shared")
    mount = next(one for one in head["containers"][0]["volumeMounts"] if one["name"] == "shared")
    container["volumeMounts"].append(copy.deepcopy(mount))
    pod["spec"]["volumes"].append(copy.deepcopy(shared))
    return pod
