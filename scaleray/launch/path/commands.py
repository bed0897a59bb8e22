"""The commands of a path as processes of their own: what each printed is its result, what it said is kept in a log."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scaleray import metric_names as names
from scaleray.config.base import Target
from scaleray.errors import ScaleRayError
from scaleray.launch.gate.evidence import learning
from scaleray.launch.path.figures import figures_of, numbers_of
from scaleray.parsing import load_json
from scaleray.records.path import PathRecord
from scaleray.records.read import FILE
from scaleray.tracking.find_record import find_run
from scaleray.tracking.steps_file import step_rows

LOGS = "logs"
MOST_WORDS = 600


@dataclass(frozen=True)
class Outcome:
    """What came of a task. code: exit code; folder: where it wrote; words: its result, or why there is none."""

    code: int
    words: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    folder: str = ""


def ran(path: PathRecord, key: str, words: Sequence[str]) -> Outcome:
    """Run a command, and give what came of it. A training that was cut off goes on."""
    folder = folder_of(words)
    code, printed, said = run_command(going_on(words), log=log_of(path, key))
    found = figures_of(printed)
    if code == 0 and folder is not None:
        found = {**of_training(folder, path.target), **found}
    place = str((printed.get("written") or {}).get("folder") or "")
    return Outcome(code, words_of(printed) or ("" if code == 0 else said), found, place)


def run_command(words: Sequence[str], *, log: Path) -> tuple[int, dict[str, Any], str]:
    """Exit code of a command, what it printed as JSON, and its last words; all that it says is in `log` as well."""
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "scaleray", *words, "--json"]
    said: list[str] = []
    pipe = subprocess.PIPE
    with (
        log.open("a") as kept,
        subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, errors="replace") as process,
    ):
        assert process.stderr is not None and process.stdout is not None
        lines = process.stderr

        def tell() -> None:
            for line in lines:
                for place in (kept, sys.stderr):
                    print(line, end="", file=place, flush=True)
                said.append(line.strip())

        telling = threading.Thread(target=tell, daemon=True)
        telling.start()
        text = process.stdout.read()
        process.wait()
        telling.join(timeout=5)  # what the command has started may still hold the pipe
    printed: Any = {}
    with contextlib.suppress(ValueError):
        printed = json.loads(text or "{}")
    return process.returncode, printed if isinstance(printed, dict) else {}, _last_words(said)


def _last_words(said: Sequence[str]) -> str:
    """The last error that a command has told, or its last line."""
    told = [line for line in said if line]
    errors = [line for line in told if "Error: " in line.partition(" ")[0] + " "]
    return (errors or told or ["it said nothing"])[-1][:MOST_WORDS]


def log_of(path: PathRecord, key: str) -> Path:
    """The file that holds what a task has said."""
    return Path(path.folder) / LOGS / f"{key.replace('/', '-')}.log"


def going_on(words: Sequence[str]) -> list[str]:
    """The command, or where it is a training that was cut off, the one that goes on with it."""
    folder = folder_of(words)
    if folder is None or not (folder / "run.json").is_file():
        return list(words)
    return ["train", "--resume", str(folder), *[word for word in words if word == "--local"]]


def folder_of(words: Sequence[str]) -> Path | None:
    """The folder of the run that a command trains; None for another command."""
    if not words or words[0] != "train":
        return None
    return Path(words[words.index("--checkpoint.storage-path") + 1]) / words[words.index("--tracking.run-name") + 1]


def is_finished(folder: Path) -> bool:
    """Whether the training in a folder has come to its end."""
    try:
        return bool(load_json((folder / FILE).read_bytes()).get("status") == "FINISHED")
    except (OSError, ValueError):
        return False


def of_training(folder: Path, target: str) -> dict[str, float]:
    """Samples and seconds to the target, goodput and parts of a step of a finished training, as far as known.

    Seconds to the target are those of the clock since the training began, with its start, evaluations and checkpoints;
    nobody knows them of one that was cut off in between.
    """
    wanted = Target.parse(target)
    with contextlib.suppress(ScaleRayError, OSError):
        found = find_run(str(folder))
        learned = learning(found, wanted, None)
        record = found.record
        figures: dict[str, Any] = {wanted.metric: learned.value, "samples to target": learned.samples_to_target}
        batch = float(getattr(record, "derived", {}).get("global_batch_size") or 0)
        if learned.samples_to_target is not None and batch and found.steps:
            steps = step_rows(found.steps)[: round(learned.samples_to_target / batch)]
            figures["seconds of steps to target"] = sum(row["step_time_s"] for row in steps)
            if steps and not getattr(record, "resumed_after", []):
                since = steps[-1].get("recorded_at", math.nan) - steps[0].get("recorded_at", math.nan)
                figures["seconds to target"] = since + (getattr(record, "time_to_first_step_s", None) or math.nan)
        if (profile := getattr(record, "profile", None)) is not None:
            known = profile.figures()
            parts = ("forward", "backward", "optimizer")
            figures["busy"] = sum(known.get(names.PART_SHARE.name.replace("PART", part), 0.0) for part in parts)
            figures["goodput"] = known.get(names.GOODPUT.name)
        return numbers_of(figures)
    return {}


def words_of(printed: Mapping[str, Any]) -> str:
    """What a command's JSON says in words."""
    if gates := printed.get("gates"):
        answers = gates.items() if isinstance(gates, Mapping) else [(one["gate"], one["answer"]) for one in gates]
        told = ", ".join(f"{gate} {answer}" for gate, answer in answers)
        return "; ".join([told, *_not_passed(printed)])[:MOST_WORDS]
    if checks := printed.get("checks"):
        return _of_doctor(checks)
    if advised := printed.get("recommended"):
        doubling = (printed.get("next_doubling") or {}).get("words")
        return f"recommended: {advised}" + (f"; {doubling}" if doubling else "")
    if (words := printed.get("words")) and isinstance(words, list):
        return " ".join(map(str, words[:2]))[:MOST_WORDS]
    told_of = [curve.get("verdict") for curve in printed.get("curves") or ()] or [printed.get("verdict")]
    first = told_of[0].get("sentence") if isinstance(told_of[0], Mapping) else told_of[0]
    return str(first or "")


def _not_passed(printed: Mapping[str, Any]) -> list[str]:
    gates = printed["gates"]
    if isinstance(gates, Mapping):
        return [str(words) for words in printed.get("not_passed") or ()]
    return [
        f"{one['gate']}: {check['what']}: {check['words']}"
        for one in gates
        for check in one.get("checks") or ()
        if check.get("answer") != "pass"
    ]


def _of_doctor(checks: Sequence[Mapping[str, Any]]) -> str:
    colours = [str(check["verdict"]) for check in checks]
    counted = ", ".join(f"{colours.count(c)} {c}" for c in ("green", "yellow", "red") if colours.count(c))
    bad = [f"{one['name']}: {one['found']}" for one in checks if one["verdict"] in ("red", "yellow")]
    return "; ".join([counted, *bad])[:MOST_WORDS]
