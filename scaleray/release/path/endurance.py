"""Trainings of a path with further checks: one that is killed and resumed, and a long one."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from scaleray.checkpoints.catalog import Catalog
from scaleray.checkpoints.manifest import Incomplete
from scaleray.common.filesystems import set_aside
from scaleray.config.base import Target
from scaleray.errors import ScaleRayError
from scaleray.live.steps_file import step_rows
from scaleray.records.path_record import PathRecord, PathTask
from scaleray.release.gate.policy_file import read_policy
from scaleray.release.gates.policy import Policy
from scaleray.release.path.commands import (
    LOOK_S,
    Outcome,
    finite,
    folder_of,
    held,
    is_finished,
    of_training,
    ran,
    record_in,
)
from scaleray.release.path.tasks import CANDIDATE, POLICY, log_of, run_folder

LIMIT_S = 3600.0
"""Seconds to wait for a checkpoint of a training."""


def killed_and_resumed(path: PathRecord, task: PathTask, words: Sequence[str]) -> Outcome:
    """Kill a training once it has a checkpoint, resume it, and compare its result with that of an undisturbed
    training."""
    folder = folder_of(words)
    assert folder is not None
    if not _was_killed(folder):
        set_aside(folder)  # it was cut off before it had a checkpoint, or came to its end unhurt
        killed = _killed(words, folder, log_of(path, task))
        if not killed:
            return Outcome(1, "it ended before it could be killed: it is too short to write a checkpoint")
    outcome = Outcome(0) if is_finished(folder) else ran(path, task, words)
    if outcome.code:
        return outcome
    compared = _compared(path, folder)
    figures = {**of_training(folder, path.target), **outcome.figures, **compared.figures}
    return replace(compared, figures=figures)


def _was_killed(folder: Path) -> bool:
    """Whether a folder holds a run that was killed after its first checkpoint, and that can be or has been resumed."""
    if not is_finished(folder):
        return _has_checkpoint(folder)
    record = record_in(folder)
    return record is not None and bool(record.resumed_after)


def _killed(words: Sequence[str], folder: Path, log: Path) -> bool:
    """Start a run and kill all its processes once it has a checkpoint; returns whether it had one in time."""
    command = [sys.executable, "-m", "scaleray", *words, "--json"]
    with held(log) as lock, log.open("a") as kept:
        process = subprocess.Popen(command, stdout=kept, stderr=kept, start_new_session=True, pass_fds=[lock])
        try:
            until = time.monotonic() + LIMIT_S
            while process.poll() is None and time.monotonic() < until:
                if _has_checkpoint(folder):
                    return True
                time.sleep(LOOK_S)
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _has_checkpoint(folder: Path) -> bool:
    catalog = Catalog.of_run(str(folder))
    with contextlib.suppress(OSError, Incomplete, ScaleRayError):
        for step in catalog.steps():
            with contextlib.suppress(Incomplete):
                catalog.read(step)
                return True
    return False


def _compared(path: PathRecord, folder: Path) -> Outcome:
    metric, policy = Target.parse(path.target).metric, _policy(path)
    record, other = record_in(folder), record_in(Path(run_folder(path, f"{CANDIDATE}-0")))
    if record is None or not record.resumed_after:
        return Outcome(1, "its record shows no resume from a checkpoint")
    value = record.metrics.get(metric)
    figures = {"steps": record.steps, "resumed after step": record.resumed_after[-1], metric: value}
    words = f"killed, resumed after step {record.resumed_after[-1]} of {record.steps}"
    if other is None or value is None or other.metrics.get(metric) is None:
        return Outcome(1, f"{words}; no uninterrupted run has {metric}", finite(figures), str(folder))
    apart = abs(value - other.metrics[metric])
    figures["differs by"] = apart
    allowed = policy.convergence.metric_margin
    words += f"; {metric} {value:.4g}, not killed {other.metrics[metric]:.4g} (allowed difference {allowed:g})"
    return Outcome(int(apart > allowed), words, finite(figures), str(folder))


def evaluated_soak(path: PathRecord, outcome: Outcome, words: Sequence[str]) -> Outcome:
    """Check a finished long training: alerts, non-finite steps, and drift of its speed."""
    folder = folder_of(words)
    record = None if folder is None else record_in(folder)
    if outcome.code or record is None or folder is None:
        return outcome
    operations = _policy(path).operations
    begun = [alert for alert in record.alerts if alert.get("severity") in operations.no_alerts_of]
    most = operations.max_nonfinite_steps
    too_many = most is not None and record.nonfinite_steps > most
    drift = _drift(folder)
    parts = [f"{record.steps} steps in {record.total_time_s:.0f} s", record.alerts_in_words() or "no alert"]
    if drift is not None:
        parts.append(f"a step in its last quarter takes {drift:.2f} x as long as in its second quarter")
    if too_many:
        parts.append(f"{record.nonfinite_steps} steps were not finite")
    figures = {**outcome.figures, **finite({"drift": drift, "alerts": len(record.alerts)})}
    return Outcome(int(bool(begun) or too_many), "; ".join(parts), figures, str(folder))


def _drift(folder: Path) -> float | None:
    """Ratio of the last quarter's median step time to the second quarter's, which is not slowed by the start."""
    try:
        times = [row["step_time_s"] for row in step_rows((folder / "steps.csv").read_text())]
    except OSError:
        return None
    quarter = len(times) // 4
    return median(times[-quarter:]) / median(times[quarter : 2 * quarter]) if quarter else None


def _policy(path: PathRecord) -> Policy:
    return read_policy(Path(path.folder) / POLICY)
