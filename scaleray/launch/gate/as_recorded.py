"""Whether the evidence says what MLflow was told: trainings with their alerts, the study with its points, the
certificate. Whoever changes a file in a folder, or a number in MLflow, is found; whoever changes both alike is not."""

from __future__ import annotations

from collections.abc import Callable

from scaleray.gates.answer import Check
from scaleray.gates.equality import CertificateFacts
from scaleray.launch.gate.evidence import Evidence, alerts_of, training
from scaleray.records.study import StudyRecord
from scaleray.tracking.find_record import FoundRun
from scaleray.tracking.same_in_mlflow import certificate_differences, differences_from_mlflow, study_differences

Differences = Callable[[str | None], list[str] | None]
"""Function that says how something differs in MLflow at a URI, None being its own; None where that is not known."""


def runs_as_recorded(evidence: Evidence, uri: str | None) -> Check:
    """Whether the records of all trainings are MLflow's, with their alerts."""
    what = "records as MLflow has them"
    unknown = []
    runs = [*evidence.candidates, *evidence.baselines, *evidence.endured]
    for found in runs:
        differs = _with_fallback(lambda at, one=found: _of_run(one, at), uri)  # type: ignore[misc]
        if differs:
            name = training(found).name
            words = f"{name} is not what MLflow was told: {', '.join(differs[:4])}"
            return Check(what=what, answer="fail", words=words, numbers={"differences": float(len(differs))})
        if differs is None:
            unknown.append(training(found).name)
    if unknown:
        return Check(what=what, answer="inconclusive", words=_away(", ".join(unknown[:4])))
    return Check(what=what, answer="pass", words=f"{len(runs)} runs")


def study_as_recorded(study: StudyRecord, uri: str | None) -> Check:
    """Whether the study and its points are what MLflow was told, with their seals, and none is marked as invalid."""
    return _check(
        "the study and its points as MLflow has them", study.name, lambda at: study_differences(study, uri=at), uri
    )


def certificate_as_recorded(certificate: CertificateFacts, uri: str | None) -> Check:
    """Whether the certificate is the one that `scaleray verify` recorded."""
    return _check(
        "the certificate as MLflow has it",
        certificate.name,
        lambda at: certificate_differences(certificate.run_id, certificate.sha256, certificate.tracking_uri, uri=at),
        uri,
    )


def _of_run(found: FoundRun, at: str | None) -> list[str] | None:
    record, alerts = training(found), alerts_of(found)
    names = None if alerts is None else [alert.name for alert in alerts]
    return differences_from_mlflow(record, alerts=names, uri=at)


def _check(what: str, name: str, differences: Differences, uri: str | None) -> Check:
    differs = _with_fallback(differences, uri)
    if differs is None:
        return Check(what=what, answer="inconclusive", words=_away(name))
    if differs:
        words = f"{name}: {'; '.join(differs[:4])}"
        return Check(what=what, answer="fail", words=words, numbers={"differences": float(len(differs))})
    return Check(what=what, answer="pass", words=name)


def _with_fallback(differences: Differences, uri: str | None) -> list[str] | None:
    """What MLflow says where it was told, and else at `uri`."""
    found = differences(None)
    return differences(uri) if found is None and uri is not None else found


def _away(names: str) -> str:
    return f"MLflow has no copy of {names}, or is away"
