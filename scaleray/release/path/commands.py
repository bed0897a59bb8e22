"""Run the commands of a path as separate processes: their printed JSON is the result, and their logs are stored."""

import contextlib
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scaleray.common import metric_names as names
from scaleray.common.filesystems import lock
from scaleray.config.base import Target
from scaleray.errors import ScaleRayError
from scaleray.live.steps_file import step_rows
from scaleray.recording.find_record import FoundRun, find_run
from scaleray.records.path_record import PathRecord, PathTask
from scaleray.records.read import read_record
from scaleray.records.run_record import RunRecord
from scaleray.release.gate.evidence import learning
from scaleray.release.path.tasks import log_of

MOST_WORDS = 600
LOOK_S = 0.05


@dataclass(frozen=True)
class Outcome:
    """Result of a task. code: exit code. folder: output folder. words: summary of its record, or the reason why there
    is none."""

    code: int
    words: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    folder: str = ""


def ran(path: PathRecord, task: PathTask, words: Sequence[str]) -> Outcome:
    """Run a command and return its outcome. An interrupted training is resumed."""
    folder = folder_of(words)
    code, printed, said = run_command(current_command(words), log=log_of(path, task))
    figures = of_training(folder, path.target) if code == 0 and folder is not None else {}
    place = str((printed.get("written") or {}).get("folder") or "")
    summary = str(printed.get("summary") or "")[:MOST_WORDS]
    return Outcome(code, summary or ("" if code == 0 else said), figures, place)


def run_command(words: Sequence[str], *, log: Path) -> tuple[int, dict[str, Any], str]:
    """Run a command; returns its exit code, printed JSON and last message. Its log is appended to `log`.

    It has no pipe to this process, so it can finish even if this process is killed."""
    command, said = [sys.executable, "-m", "scaleray", *words, "--json"], list[str]()
    with (
        held(log) as lock,
        tempfile.TemporaryFile("w+") as result,
        log.open("a") as kept,
        log.open(errors="replace") as new,
    ):
        new.seek(0, 2)
        with subprocess.Popen(command, stdout=result, stderr=kept, pass_fds=[lock]) as process:
            has_ended = False
            while not has_ended:
                has_ended = process.poll() is not None  # before the log is read, which is whole then
                text = new.read()
                said.append(text)
                print(text, end="", file=sys.stderr, flush=True)
                time.sleep(0 if has_ended else LOOK_S)
        result.seek(0)
        printed: Any = {}
        with contextlib.suppress(ValueError):
            printed = json.loads(result.read() or "{}")
    return process.returncode, printed if isinstance(printed, dict) else {}, _last_words("".join(said))


@contextlib.contextmanager
def held(log: Path) -> Iterator[int]:
    """Lock a task's log. The command inherits the lock and holds it until its end, even if this process is killed
    before. Waits for the command of an earlier call."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        if not lock(file):
            words = "waiting for the command of an earlier scaleray path next, which was killed. Log"
            print(f"{words}: {log}", file=sys.stderr, flush=True)
            lock(file, waits=True)
        yield file.fileno()


def _last_words(said: str) -> str:
    """The last error that a command logged, or its last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line.partition(" ")[0] + " "]
    return (errors or lines or ["it logged nothing"])[-1][:MOST_WORDS]


def current_command(words: Sequence[str]) -> list[str]:
    """The command itself, or the command that resumes an interrupted training."""
    folder = folder_of(words)
    if folder is None or not (folder / "run.json").is_file():
        return list(words)
    return ["train", "--resume", str(folder), *[word for word in words if word == "--local"]]


def folder_of(words: Sequence[str]) -> Path | None:
    """The folder of the run that a command trains; None for other commands."""
    if not words or words[0] != "train":
        return None
    return Path(words[words.index("--checkpoint.storage-path") + 1]) / words[words.index("--tracking.run-name") + 1]


def record_in(folder: Path) -> RunRecord | None:
    """The record of the training in a folder; None if it has none yet."""
    try:
        record = read_record(folder)
    except (OSError, ValueError, TypeError):
        return None
    return record if isinstance(record, RunRecord) else None


def is_finished(folder: Path) -> bool:
    """Whether the training in a folder has finished."""
    record = record_in(folder)
    return record is not None and record.status == "FINISHED"


def of_training(folder: Path, target: str) -> dict[str, float]:
    """Known figures of a finished training."""
    with contextlib.suppress(ScaleRayError, OSError):
        found = find_run(str(folder))
        if isinstance(found.record, RunRecord):
            return finite({**_measured(found.record), **_to_target(found, found.record, Target.parse(target))})
    return {}


def _measured(record: RunRecord) -> dict[str, Any]:
    found: dict[str, Any] = {
        "samples_per_s": record.samples_per_s,
        "final_loss": record.final_loss,
        "training_time_s": record.training_time_s,
        "steps": record.steps,
        **record.metrics,
    }
    if record.peak_memory_bytes:
        found["peak_memory_gib"] = max(record.peak_memory_bytes) / 2**30
    if record.profile is not None:
        known = record.profile.figures()
        parts = ("forward", "backward", "optimizer")
        found["busy"] = sum(known.get(names.PART_SHARE.name.replace("PART", part), 0.0) for part in parts)
        found["goodput"] = known.get(names.GOODPUT.name)
    return found


def _to_target(run: FoundRun, record: RunRecord, target: Target) -> dict[str, Any]:
    """Samples and seconds to the target. Seconds are wall-clock time from the start of the training, including
    start-up, evaluations and checkpoints; they are unknown for an interrupted training."""
    learned = learning(run, target, None)
    found: dict[str, Any] = {target.metric: learned.value, "samples to target": learned.samples_to_target}
    batch = float(record.derived.get("global_batch_size") or 0)
    if learned.samples_to_target is not None and batch and run.steps:
        steps = step_rows(run.steps)[: round(learned.samples_to_target / batch)]
        found["seconds of steps to target"] = sum(row["step_time_s"] for row in steps)
        if steps and not record.resumed_after:
            since = steps[-1].get("recorded_at", math.nan) - steps[0].get("recorded_at", math.nan)
            found["seconds to target"] = since + (record.time_to_first_step_s or math.nan)
    return found


def finite(values: dict[str, Any]) -> dict[str, float]:
    """Values that are finite numbers."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
