"""Evidence for the gates: a run and its repeats, a baseline's runs, certificates and a study, by folder or name."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scaleray.config.base import Target
from scaleray.config.decides import Decides, decides
from scaleray.errors import TrackingError, UsageError
from scaleray.gates.convergence import Learning
from scaleray.gates.equality import CertificateFacts
from scaleray.gates.operations import faults_survived
from scaleray.launch.session.conditions import digest, training_of
from scaleray.parsing import inert_json, load_json
from scaleray.records.alerts import ALERTS_FILE, Alert, parse_alerts
from scaleray.records.conditions import repeat_key
from scaleray.records.json_record import jsonable, leaves
from scaleray.records.read import FILE, read_record
from scaleray.records.run import RunRecord
from scaleray.records.study import StudyRecord
from scaleray.tracking.find_record import FoundRun, find_run

CERTIFICATE = "certificate.json"
MOST_NEIGHBOURS = 500
"""Most folders beside a run's own that are looked at for its repeats, certificates and studies, the newest first."""


@dataclass(frozen=True)
class Evidence:
    """What the gates look at. The first candidate is the one that is judged; others repeat it."""

    candidates: list[FoundRun]
    baselines: list[FoundRun]
    certificates: list[CertificateFacts]
    study: StudyRecord | None = None
    notes: list[str] = field(default_factory=list)
    """Notes on evidence that was found without being named."""
    endured: list[FoundRun] = field(default_factory=list)
    """Runs of the same training that were interrupted, went on and have finished."""

    @property
    def run(self) -> RunRecord:
        """The record of the run that is judged."""
        return training(self.candidates[0])


def training(found: FoundRun) -> RunRecord:
    """The record of a training. Raises UsageError for one of a study or a sweep."""
    if not isinstance(found.record, RunRecord):
        kind = "a study" if isinstance(found.record, StudyRecord) else "a sweep"
        hint = "a study is judged alone: scaleray gate STUDY; beside trainings it is given with --study"
        raise UsageError(found.where, kind, "a gate judges trainings, or one study", hint)
    return found.record


def collect(
    runs: Sequence[str | FoundRun],
    *,
    against: Sequence[str] = (),
    study: str | None = None,
    certificates: Sequence[str] = (),
    uri: str | None = None,
) -> Evidence:
    """The evidence of these runs. What is not named is looked for in the folders beside the runs' own.

    Raises UsageError for what is of the wrong kind, TrackingError for what is not there.
    """
    candidates = [one if isinstance(one, FoundRun) else find_run(one, uri=uri) for one in runs]
    baselines = [find_run(name, uri=uri) for name in against]
    for one in (*candidates, *baselines):
        training(one)
    _refuse_twice(candidates, baselines)
    notes: list[str] = []
    beside = _neighbours(candidates[0])
    for side, what in ((candidates, "candidate"), (baselines, "baseline")):
        if len(side) == 1 and (more := _repeats(side[0], uri)):
            side += more
            failed = sum(training(one).status != "FINISHED" for one in more)
            found = f"{what}: {len(more)} other runs of the same but the seed were found beside it"
            notes.append(found + (f", of which {failed} failed" if failed else ""))
    endured = _endured(candidates)
    if endured:
        notes.append(f"faults: {len(endured)} runs beside it went on after an interruption")
    found_study = _study(study, beside, training(candidates[0]), uri)
    facts = certificates_for(candidates[0], certificates)
    return Evidence(candidates, baselines, facts, found_study, notes, endured)


def _refuse_twice(candidates: Sequence[FoundRun], baselines: Sequence[FoundRun]) -> None:
    """Raise UsageError for a run that is given twice, by its place or its id: it repeats nothing."""
    sides = [(one, side) for side in ("the candidate", "the baseline") for one in
             (candidates if side == "the candidate" else baselines)]  # fmt: skip
    known: dict[str, str] = {}
    for one, side in sides:
        for name in filter(None, {one.where, training(one).run_id}):
            if name in known:
                both = side != known[name]
                allowed = "it is either the candidate or the baseline" if both else f"it is given twice, as {side}"
                raise UsageError("a run", one.where, allowed)
        known |= dict.fromkeys(filter(None, (one.where, training(one).run_id)), side)


def certificates_for(found: FoundRun, named: Sequence[str]) -> list[CertificateFacts]:
    """The certificates that are named, or those in the folders beside that of a run or study."""
    return [_certificate(Path(name)) for name in named] or _certificates(_neighbours(found))


def learning(found: FoundRun, target: Target | None, metric: str | None) -> Learning:
    """How a run learned. metric: whose last value counts; None: the target's. One that did not finish has not reached
    the target."""
    record = training(found)
    has_finished = record.status == "FINISHED"
    batch = float(record.derived.get("global_batch_size") or 0)
    points = found.evaluations.get(target.metric, []) if target else []
    reached = next((step for step, value in points if target and target.is_reached({target.metric: value})), None)
    steps = [step for step, _ in points]
    every = max((b - a for a, b in zip([0, *steps], steps, strict=False)), default=0)
    name = metric or (target.metric if target else None)
    value = record.metrics.get(name) if name else None
    samples = reached * batch if reached is not None and has_finished else None
    return Learning(samples, value, every * batch, has_finished)


def target_of(run: RunRecord) -> Target | None:
    """The target of a run's own config."""
    with contextlib.suppress(ValueError):
        return Target.parse((run.config.get("stop") or {}).get("at"))
    return None


def alerts_of(found: FoundRun) -> list[Alert] | None:
    """What a run told of its alerts; None where it recorded none, not even that there were none."""
    if found.folder is None or not (path := found.folder / ALERTS_FILE).is_file():
        return None
    return parse_alerts(path.read_text(errors="replace"))


def _neighbours(found: FoundRun) -> list[Path]:
    """The folders beside a run's own, newest first; none for what is not in a local folder."""
    if found.folder is None:
        return []
    with contextlib.suppress(OSError):
        folders = [p for p in found.folder.parent.iterdir() if p.is_dir() and p != found.folder]
        return sorted(folders, key=lambda p: -p.stat().st_mtime)[:MOST_NEIGHBOURS]
    return []


def _repeats(found: FoundRun, uri: str | None) -> list[FoundRun]:
    """Runs beside a run that are the same but for the seed, one of each seed: the newest that has finished, else one
    that failed."""
    own = training(found)
    mine, repeats = repeat_key(own), dict[Any, Path]()
    for status in ("FINISHED", "FAILED"):
        for folder, record in _runs_beside(found, status):
            seed = record.config.get("seed")
            if repeat_key(record) == mine and seed != own.config.get("seed"):
                repeats.setdefault(seed, folder)
    return [find_run(str(folder), uri=uri) for folder in repeats.values()]


def _endured(candidates: Sequence[FoundRun]) -> list[FoundRun]:
    """Finished runs beside the candidates that trained the same on as many workers, and survived a fault."""
    own = training(candidates[0])
    mine, known = _trained(own), {one.folder for one in candidates}
    return [
        find_run(str(folder))
        for folder, record in _runs_beside(candidates[0])
        if faults_survived(record) and _trained(record) == mine and folder not in known
    ]


def _trained(run: RunRecord) -> list[Any]:
    """What a run trained, of which code, and on how many workers; neither its seed nor how it was kept safe."""
    config = {key: value for key, value in leaves(jsonable(run.config)) if decides(key) is Decides.RESULT}
    config.pop("seed", None)
    git = (run.environment.get("environment") or {}).get("git") or {}
    return [run.strategy, run.workers, git.get("commit"), config]


def _runs_beside(found: FoundRun, status: str = "FINISHED") -> Iterator[tuple[Path, RunRecord]]:
    """The runs of this status beside a run, newest first."""
    for folder in _neighbours(found):
        with contextlib.suppress(OSError, ValueError, TypeError, TrackingError):
            if not (folder / FILE).is_file():
                continue
            record = read_record(folder)
            if isinstance(record, RunRecord) and record.status == status:
                yield folder, record


def _certificate(path: Path) -> CertificateFacts:
    """The certificate in a folder or a file. Raises TrackingError for anything else."""
    file = path / CERTIFICATE if path.is_dir() else path
    try:
        text = file.read_bytes()
        return CertificateFacts.of(
            load_json(inert_json(text)), name=str(file.parent), sha256=hashlib.sha256(text).hexdigest()
        )
    except (OSError, KeyError, TypeError, ValueError) as exc:
        allowed = f"it holds no {CERTIFICATE} of `scaleray verify`: {type(exc).__name__} {exc}"
        raise TrackingError("--certificates", str(path), allowed) from exc


def _certificates(beside: Sequence[Path]) -> list[CertificateFacts]:
    found = []
    for folder in beside:
        if (folder / CERTIFICATE).is_file():
            with contextlib.suppress(TrackingError):  # a certificate of `verify --resume` is of another kind
                found.append(_certificate(folder))
    return found


def _study(name: str | None, beside: Sequence[Path], run: RunRecord, uri: str | None) -> StudyRecord | None:
    if name is not None:
        record = find_run(name, uri=uri).record
        if not isinstance(record, StudyRecord):
            raise UsageError("--study", name, "it must be a scaling study", "scaleray study -c FILE makes one")
        return record
    own = digest(training_of(run.config))
    for folder in beside:
        with contextlib.suppress(OSError, ValueError, TypeError, json.JSONDecodeError):
            if (folder / FILE).is_file() and isinstance(record := read_record(folder), StudyRecord):
                sizes = {one.point.workers for curve in record.curves for one in curve.points}
                if run.workers in sizes and record.conditions.config_hash == own:
                    return record
    return None
