"""Evidence for the gates, given by folder or name: a run and its repeats, a baseline's runs, certificates and a
study."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scaleray.checkpoints.storage import Store
from scaleray.common.filesystems import is_locked
from scaleray.common.parsing import load_json
from scaleray.config.base import Target, without_password
from scaleray.config.decides import Decides, decides
from scaleray.errors import TrackingError, UsageError
from scaleray.launch.session.conditions import digest, training_of
from scaleray.live.live_folder import LOCK, RUN, state_in_folder
from scaleray.recording.find_record import FoundRun, find_run, locations_of, text_of
from scaleray.records.alert_record import ALERTS_FILE, Alert, parse_alerts
from scaleray.records.certificate import FILE as CERTIFICATE
from scaleray.records.certificate import EqualityCertificate
from scaleray.records.conditions import repeat_key, start_key
from scaleray.records.json_record import first_problem, jsonable, leaves
from scaleray.records.live_state import LOST
from scaleray.records.read import FILE, AnyRecord, parse_record
from scaleray.records.run_record import RunRecord
from scaleray.records.study_record import StudyRecord
from scaleray.release.gates.convergence import Learning
from scaleray.release.gates.equality import NamedCertificate
from scaleray.release.gates.operations import faults_survived

READERS = 8
"""Number of neighbouring folders read concurrently, since a bucket responds slowly to each request."""
MOST_NEIGHBOURS = 500
"""Maximum number of folders next to a run's own searched for its repeats, certificates and studies, newest first."""


@dataclass(frozen=True)
class Evidence:
    """Evidence for the gates. The first candidate is evaluated; the others repeat it."""

    candidates: list[FoundRun]
    baselines: list[FoundRun]
    certificates: list[NamedCertificate]
    study: StudyRecord | None = None
    notes: list[str] = field(default_factory=list)
    """Notes on evidence that was found automatically."""
    endured: list[FoundRun] = field(default_factory=list)
    """Runs of the same training that were interrupted, resumed and finished."""

    @property
    def run(self) -> RunRecord:
        """Record of the evaluated run."""
        return training(self.candidates[0])


def training(found: FoundRun) -> RunRecord:
    """Return the record of a training. Raises UsageError for a study or a sweep."""
    if not isinstance(found.record, RunRecord):
        kind = "a study" if isinstance(found.record, StudyRecord) else "a sweep"
        hint = "for a study alone: scaleray gate STUDY; with trainings, give it with --study"
        raise UsageError.problem("RUN", f"{found.where} is {kind}: gates apply to trainings, or to one study", hint)
    return found.record


def collect(
    runs: Sequence[str | FoundRun],
    *,
    against: Sequence[str] = (),
    study: str | None = None,
    certificates: Sequence[str] = (),
    uri: str | None = None,
) -> Evidence:
    """Collect the evidence of these runs. Evidence that is not named is looked up in the folders next to the runs.
    Raises UsageError for evidence of the wrong kind, TrackingError for missing evidence."""
    candidates, baselines = _named(runs, uri), _named(against, uri)
    for one in (*candidates, *baselines):
        training(one)
    refuse_twice(candidates, baselines)
    notes: list[str] = []
    beside = _neighbours(candidates[0])
    for side, what in ((candidates, "candidate"), (baselines, "baseline")):
        near = beside if side is candidates else _neighbours(side[0]) if len(side) == 1 else []
        known = {one.where for one in (*candidates, *baselines)}
        repeats, killed = _repeats(training(side[0]), near, uri) if len(side) == 1 else ([], [])
        if more := [one for one in repeats if one.where not in known]:
            side += more
            failed = sum(training(one).status != "FINISHED" for one in more)
            found = f"{what}: {len(more)} runs that differ only in the seed were found next to it"
            notes.append(found + (f", of which {failed} failed" if failed else ""))
        if killed:
            notes.append(f"{what}: killed runs that differ only in the seed do not count: {', '.join(killed)}")
    endured = _endured(candidates, beside)
    if endured:
        notes.append(f"faults: {len(endured)} runs next to it resumed after an interruption")
    found_study = _study(study, beside, training(candidates[0]), uri)
    facts = [_named_certificate(name) for name in certificates] or _certificates(beside)
    return Evidence(candidates, baselines, facts, found_study, notes, endured)


def _named(runs: Sequence[str | FoundRun], uri: str | None) -> list[FoundRun]:
    """Runs with these names. One after the first that ended without a record is accepted if it repeats the first."""
    found: list[FoundRun] = []
    for run in runs:
        try:
            found.append(run if isinstance(run, FoundRun) else find_run(run, uri=uri))
        except TrackingError:
            lost = (_lost(training(found[0]), _neighbour(location)) for location in locations_of(str(run)) if found)
            if (one := next(filter(None, lost), None)) is None:
                raise
            found.append(one)
    return found


def refuse_twice(candidates: Sequence[FoundRun], baselines: Sequence[FoundRun] = ()) -> None:
    """Raise UsageError for a run that is given twice, by path or id."""
    sides = [(one, side) for side in ("the candidate", "the baseline") for one in
             (candidates if side == "the candidate" else baselines)]  # fmt: skip
    known: dict[str, str] = {}
    for one, side in sides:
        for name in filter(None, {one.where, training(one).run_id}):
            if name in known:
                both = side != known[name]
                text = "cannot be both candidate and baseline" if both else f"is given twice, as {side}"
                raise UsageError.problem("RUN", f"{one.where} {text}")
        known |= dict.fromkeys(filter(None, (one.where, training(one).run_id)), side)


def certificates_for(found: FoundRun, named: Sequence[str]) -> list[NamedCertificate]:
    """The named certificates, or certificates in the folders next to a run or study."""
    return [_named_certificate(name) for name in named] or _certificates(_neighbours(found))


def learning(found: FoundRun, target: Target | None, metric: str | None) -> Learning:
    """Learning result of a run. metric: metric whose last value counts; None for that of the target. An unfinished run
    has not reached the target."""
    record = training(found)
    has_finished = record.status == "FINISHED"
    is_known = target is None or bool(found.evaluations.get(target.metric)) or not has_finished
    batch = float(record.derived.get("global_batch_size") or 0)
    points = found.evaluations.get(target.metric, []) if target else []
    reached = next((step for step, value in points if target and target.is_reached({target.metric: value})), None)
    steps = [step for step, _ in points]
    every = max((b - a for a, b in zip([0, *steps], steps, strict=False)), default=0)
    name = metric or (target.metric if target else None)
    value = record.metrics.get(name) if name else None
    samples = reached * batch if reached is not None and has_finished else None
    return Learning(samples, value, every * batch, has_finished, is_known)


def target_of(run: RunRecord) -> Target | None:
    """The target of a run's own config."""
    with contextlib.suppress(ValueError):
        return Target.parse((run.config.get("stop") or {}).get("at"))
    return None


def alerts_of(found: FoundRun) -> list[Alert] | None:
    """Alerts that a run recorded; None if it has no record of alerts, not even an empty one."""
    return None if found.alerts is None else parse_alerts(found.alerts)


@dataclass(frozen=True)
class _Neighbour:
    """A folder next to a run's own, and its contents. about: its run.json, if it has no record."""

    location: Store
    record: AnyRecord | None
    certificate: NamedCertificate | None
    about: dict[str, Any]


def _neighbours(found: FoundRun) -> list[_Neighbour]:
    """Folders next to a run's own, newest first; none for a run that is only in MLflow."""
    if (own := found.location) is None:
        return []
    with contextlib.suppress(OSError):
        names = [name for name in own.parent.names() if name != own.name]
        if own.is_local:
            age = {name: -Path(own.parent.root, name).stat().st_mtime for name in names}
            names = sorted(names, key=age.__getitem__)
        else:  # a bucket's folders have no time, and the names that scaleray gives end with one
            names = names[::-1]
        with ThreadPoolExecutor(READERS) as pool:
            return list(pool.map(_neighbour, map(own.parent.child, names[:MOST_NEIGHBOURS])))
    return []


def _neighbour(location: Store) -> _Neighbour:
    record, certificate, about = None, None, None
    with contextlib.suppress(OSError, ValueError, TypeError, TrackingError):
        record = parse_record(location.read(FILE))
    with contextlib.suppress(OSError, TrackingError):  # a certificate of `verify --resume` is of another kind
        certificate = _certificate(location.root, location.read(CERTIFICATE))
    with contextlib.suppress(OSError, ValueError):
        about = load_json(location.read(RUN)) if record is None else None
    return _Neighbour(location, record, certificate, about if isinstance(about, dict) else {})


def _repeats(own: RunRecord, beside: Sequence[_Neighbour], uri: str | None) -> tuple[list[FoundRun], list[str]]:
    """Runs next to a run that differ only in the seed, one per seed: the newest finished run, or else a failed one,
    with or without a record. Also returns the names of killed runs."""
    mine, started, repeats = repeat_key(own), _started(own), dict[Any, Store | FoundRun]()
    for location, record in _runs(beside, "FINISHED"):
        if repeat_key(record) == mine:
            repeats.setdefault(record.config.get("seed"), location)
    for location, record in _runs(beside, "FAILED"):
        if _started(record) == started:
            repeats.setdefault(record.config.get("seed"), location)
    for lost in filter(None, (_lost(own, one) for one in beside)):
        repeats.setdefault(training(lost).config.get("seed"), lost)
    killed = [
        record.name
        for _, record in _runs(beside, "KILLED")
        if _started(record) == started and record.config.get("seed") not in repeats
    ]
    repeats.pop(own.config.get("seed"), None)
    found = [one if isinstance(one, FoundRun) else find_run(one.root, uri=uri) for one in repeats.values()]
    return found, killed


def _started(run: RunRecord) -> str:
    """Key made of the facts known at the start of a run, as an unfinished run may lack facts about its workers."""
    return start_key(run.config, run.workers, run.environment, run.data)


def _lost(own: RunRecord, one: _Neighbour) -> FoundRun | None:
    """Run of a neighbour that differs from `own` only in the seed and ended without a record, for example because of
    the OOM killer; it counts as failed. None for other neighbours, and for a run that may be active."""
    if not one.about or one.about.get("repeats") != _started(own) or not one.location.is_local:
        return None
    folder = Path(one.location.root)
    state = state_in_folder(folder)
    if state is None or state.status not in (LOST, "FAILED") or is_locked(folder / LOCK):
        return None
    record = dataclasses.replace(
        own, name=folder.name, status="FAILED", verdict="it ended without a record", run_id="", run_dir=str(folder),
        config=one.about.get("config") or {}, steps=0, final_loss=None, samples_per_s=None, metrics={}, evaluations={},
        resumed_after=[], profile=None, alerts=[], weights={}, best={},
    )  # fmt: skip
    return FoundRun(record, str(folder), one.location, alerts=text_of(one.location, ALERTS_FILE))


def _endured(candidates: Sequence[FoundRun], beside: Sequence[_Neighbour]) -> list[FoundRun]:
    """Finished runs next to the candidates that have the same training and number of workers and survived a fault."""
    mine, known = _trained(training(candidates[0])), {one.where for one in candidates}
    return [
        find_run(location.root)
        for location, record in _runs(beside, "FINISHED")
        if faults_survived(record) and _trained(record) == mine and location.path("").rstrip("/") not in known
    ]


def _trained(run: RunRecord) -> list[Any]:
    """Key of a run's training, code and number of workers, without seed and checkpoints."""
    config = {key: value for key, value in leaves(jsonable(run.config)) if decides(key) is Decides.RESULT}
    config.pop("seed", None)
    git = (run.environment.get("environment") or {}).get("git") or {}
    return [run.strategy, run.workers, git.get("commit"), config]


def _runs(beside: Sequence[_Neighbour], status: str) -> Iterator[tuple[Store, RunRecord]]:
    """The neighbours' runs with this status."""
    for one in beside:
        if isinstance(one.record, RunRecord) and one.record.status == status:
            yield one.location, one.record


def _certificate(where: str, text: bytes) -> NamedCertificate:
    """Parse the text of a certificate.json. Raises TrackingError for anything else."""
    where = without_password(where)
    try:
        record = EqualityCertificate.from_json(text)
    except ValueError as exc:
        raise TrackingError.problem(
            "--certificates", f"{where} has no {CERTIFICATE} of `scaleray verify`: {first_problem(exc)}"
        ) from exc
    return NamedCertificate(record, where, hashlib.sha256(text).hexdigest())


def _named_certificate(name: str) -> NamedCertificate:
    """The certificate in a folder, a bucket or a file. Raises TrackingError."""
    location = Store(name.removesuffix(f"/{CERTIFICATE}")) if "://" in name else None
    if location is None:
        path = Path(name).expanduser().absolute()
        location = Store(str(path if path.is_dir() else path.parent))
        file = CERTIFICATE if path.is_dir() else path.name
    else:
        file = CERTIFICATE
    try:
        return _certificate(location.root, location.read(file))
    except OSError as exc:
        raise TrackingError.problem(
            "--certificates", f"{without_password(name)} has no {CERTIFICATE} of `scaleray verify`: {exc}"
        ) from exc


def _certificates(beside: Sequence[_Neighbour]) -> list[NamedCertificate]:
    return [one.certificate for one in beside if one.certificate is not None]


def _study(name: str | None, beside: Sequence[_Neighbour], run: RunRecord, uri: str | None) -> StudyRecord | None:
    if name is not None:
        record = find_run(name, uri=uri).record
        if not isinstance(record, StudyRecord):
            raise UsageError("--study", name, "it must be a scaling study", "scaleray study -c FILE creates one")
        return record
    own = digest(training_of(run.config))
    for record in (one.record for one in beside if isinstance(one.record, StudyRecord)):
        sizes = {one.point.workers for curve in record.curves for one in curve.points}
        if run.workers in sizes and record.conditions.config_hash == own:
            return record
    return None
