"""Live state of a run, study or sweep, read from its folder on this machine: starting, training, ended or killed, or
written by a version without live.json."""

import contextlib
import csv
import dataclasses
import time
from pathlib import Path
from typing import Any

from scaleray.common.parsing import load_json
from scaleray.config.checkpoint import default_storage_path
from scaleray.live.live_run import alerts_in
from scaleray.live.state.run_state import MOST_EVENTS, RunState
from scaleray.live.steps_file import record_of
from scaleray.records.live_state import FILE, LOST, LOST_S, RUNNING, STARTING, LiveState, RankNow
from scaleray.records.profile_record import RunProfile
from scaleray.records.read import FILE as RECORD
from scaleray.records.read import AnyRecord, parse_record
from scaleray.records.run_record import RunRecord

RUN, STEPS, LOCK = "run.json", "steps.csv", ".lock"
LAST_FACTS = (
    "epoch", "learning_rate", "grad_norm", "loss_scale", "curve", "step_time_s", "samples_per_s", "tokens_per_s",
    "input_wait_share", "best_samples_per_s", "metrics", "repeated_steps", "goodput", "checkpoint_step",
    "checkpoint_at", "phases", "ranks",
)  # fmt: skip
"""Facts about a run that remain valid after its end."""
OF_RECORD = (
    "name", "status", "verdict", "run_id", "mlflow_link", "strategy", "workers", "step_time_s", "samples_per_s",
    "tokens_per_s", "input_wait_share", "metrics", "nonfinite_steps",
)  # fmt: skip
"""Facts common to a record and a live state."""
ASKED = {"sweep.json": "sweep", "study.json": "study"}


def state_in_folder(folder: Path) -> LiveState | None:
    """Current state of the run in a folder; None if the folder is not of a run, study or sweep."""
    live, record = _live(folder), _record(folder)
    if record is not None and (live is None or (not live.has_ended and _is_older(live, folder))):
        state = of_record(record, folder)
        return _with_alerts(state if live is None else _with_last_facts(state, live), folder)
    if live is not None:
        return _with_alerts(as_lost(live), folder)
    return _without_either(folder)


def _is_older(live: LiveState, folder: Path) -> bool:
    """Whether the record is newer than a state: a resumed run still has the record of its first end."""
    return (live.seen_at or 0.0) <= (folder / RECORD).stat().st_mtime


def _with_last_facts(ended: LiveState, live: LiveState) -> LiveState:
    """State from a record, completed with facts of the last live state, which is written a moment after it."""
    lacking = {name: getattr(live, name) for name in LAST_FACTS if not getattr(ended, name)}
    return dataclasses.replace(ended, **lacking)


def as_lost(state: LiveState) -> LiveState:
    """A state, marked LOST if the run has been silent for too long."""
    silent_s = time.time() - state.seen_at if state.seen_at is not None else 0.0
    if state.has_ended or silent_s < LOST_S:
        return state
    return dataclasses.replace(state, status=LOST, left_s=None)


def runs_in(storage: str | None = None, *, ended_within_s: float = 3600.0) -> list[LiveState]:
    """Runs in a storage path that are active or ended within the given time, newest first."""
    root, found = Path(storage or default_storage_path()), []
    with contextlib.suppress(OSError):
        for folder in root.iterdir():
            if not folder.is_dir() or time.time() - _touched_at(folder) > ended_within_s:
                continue
            if (state := state_in_folder(folder)) is not None:
                found.append(state)
    return sorted(found, key=lambda state: (state.status not in (STARTING, RUNNING), -(state.started_at or 0.0)))


def of_record(record: AnyRecord, folder: Path) -> LiveState:
    """Live state reconstructed from the record of a finished run."""
    ended_at = (folder / RECORD).stat().st_mtime
    if not isinstance(record, RunRecord):
        first, *words = record.lines()
        return LiveState(
            name=record.name,
            kind=first.partition(" ")[0],
            status="FINISHED",
            run_id=record.run_id,
            mlflow_link=record.mlflow_link,
            run_dir=str(folder),
            started_at=record.started_at,
            seen_at=record.started_at + record.duration_s,
            notes=words,
        )
    profile, judged = record.profile, record.judged
    values = [value for _, value in record.evaluations.get(judged.name, [])] if judged else []
    return LiveState(
        **{name: getattr(record, name) for name in OF_RECORD},
        run_dir=str(folder),
        started_at=ended_at - record.total_time_s,
        seen_at=ended_at,
        step=record.steps,
        total_steps=record.derived.get("total_steps"),
        loss=record.final_loss,
        judged_by=judged.name if judged else "",
        best=judged.best([value for value in values if value is not None]) if judged else None,
        curve=_replayed(folder).curve.points,
        goodput=profile.goodput.shares().get("productive") if profile and profile.goodput else None,
        phases=_phases(profile) if profile else {},
        ranks=_ranks(profile, record.steps) if profile else [],
        events=record.events[-MOST_EVENTS:],
    )


def _without_either(folder: Path) -> LiveState | None:
    """State of a run without a record or a live.json."""
    name = folder.name
    about = _json(folder / RUN)
    if about is None or not isinstance(about.get("name"), str):
        for asked, kind in ASKED.items():
            if (folder / asked).exists():
                return LiveState(name=name, kind=kind, status=RUNNING, run_dir=str(folder), seen_at=_touched_at(folder))
        if (folder / LOCK).exists() and set(_names(folder)) <= {LOCK, "ray_train"}:
            return as_lost(LiveState(name=name, run_dir=str(folder), seen_at=_touched_at(folder)))
        return None
    state = _replayed(folder).live_state(
        name=about["name"],
        run_id=str(about.get("run_id") or ""),
        run_dir=str(folder),
        started_at=about.get("started_at"),
        seen_at=_touched_at(folder),
    )
    return _with_alerts(as_lost(state), folder)


def _live(folder: Path) -> LiveState | None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        return LiveState.read(folder / FILE)
    return None


def _record(folder: Path) -> AnyRecord | None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        return parse_record((folder / RECORD).read_bytes())
    return None


def _json(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        values = load_json(path.read_bytes())
        return values if isinstance(values, dict) else None
    return None


def _with_alerts(state: LiveState, folder: Path) -> LiveState:
    found = alerts_in(folder)
    return dataclasses.replace(state, alerts=found) if found else state


def _names(folder: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return [entry.name for entry in folder.iterdir()]
    return []


def _touched_at(folder: Path) -> float:
    """Time of the last write to any file in the folder."""
    times = [folder]
    with contextlib.suppress(OSError):
        times += list(folder.iterdir())
    found = 0.0
    for path in times:
        with contextlib.suppress(OSError):
            found = max(found, path.stat().st_mtime)
    return found


def _replayed(folder: Path) -> RunState:
    """State of a run, reconstructed from its steps alone."""
    state = RunState()
    with contextlib.suppress(OSError), open(folder / STEPS, newline="") as file:
        for row in csv.DictReader(file):
            with contextlib.suppress(ValueError, TypeError, KeyError):
                state.take(record_of(row))
    return state


def _phases(profile: RunProfile) -> dict[str, float]:
    whole = [(rank.steps, rank.phases) for rank in profile.ranks if rank.steps]
    names = dict.fromkeys(name for _, phases in whole for name in phases)
    return {
        name: sum(phases[name].total / steps for steps, phases in whole if name in phases) / len(whole)
        for name in names
    }


def _ranks(profile: RunProfile, step: int) -> list[RankNow]:
    return [
        RankNow(
            rank=rank.rank,
            node=rank.node,
            step=step,
            phase="end",
            since_s=0.0,
            silent_s=0.0,
            step_time_s=rank.step.median,
            late_s=rank.late_s.median if rank.late_s is not None else None,
            memory=_memory(rank.memory),
        )
        for rank in profile.ranks
    ]


def _memory(memory: Any) -> dict[str, int]:
    known = {"resident_bytes": memory.resident_bytes, "peak_bytes": memory.peak.num_bytes if memory.peak else None}
    return {name: int(value) for name, value in known.items() if value is not None}
