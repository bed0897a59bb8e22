"""Compare the evidence with MLflow's copy: trainings with their alerts, the study with its points, the certificate. A
change to a file in a folder, or to a number in MLflow, is found; the same change to both is not. MLflow is the server
chosen by the reader."""

from scaleray.recording.same_in_mlflow import certificate_differences, differences_from_mlflow, study_differences
from scaleray.recording.store import resolve_uri, without_password
from scaleray.records.gate_answer import Check
from scaleray.records.study_record import StudyRecord
from scaleray.release.gate.evidence import Evidence, alerts_of, training
from scaleray.release.gates.equality import NamedCertificate

NAME_IT = "name the MLflow server of its record: --uri URI"


def runs_as_recorded(evidence: Evidence, uri: str | None) -> Check:
    """Whether the records of all trainings, with their alerts, equal MLflow's copies."""
    what = "records equal MLflow's copies"
    unknown = []
    runs = [*evidence.candidates, *evidence.baselines, *evidence.endured]
    for found in runs:
        record, alerts = training(found), alerts_of(found)
        names = None if alerts is None else [alert.name for alert in alerts]
        differs = differences_from_mlflow(record, alerts=names, uri=uri)
        if differs:
            words = f"{record.name} differs from MLflow: {', '.join(differs[:4])}"
            return Check(what=what, answer="fail", words=words, numbers={"differences": float(len(differs))})
        if differs is None:
            unknown.append(record.name)
    if unknown:
        return Check(what=what, answer="inconclusive", words=_away(", ".join(unknown[:4]), uri), remedy=NAME_IT)
    return Check(what=what, answer="pass", words=f"{len(runs)} runs")


def study_as_recorded(study: StudyRecord, uri: str | None) -> Check:
    """Whether the study and its points equal MLflow's copy, with their seals, and none is marked as invalid."""
    what = "the study and its points equal MLflow's copies"
    return _check(what, study.name, study_differences(study, uri=uri), uri)


def certificate_as_recorded(certificate: NamedCertificate, uri: str | None) -> Check:
    """Whether the certificate equals the one recorded by `scaleray verify`."""
    differs = certificate_differences(certificate.record.run_id, certificate.sha256, uri=uri)
    return _check("the certificate equals MLflow's copy", certificate.name, differs, uri)


def _check(what: str, name: str, differs: list[str] | None, uri: str | None) -> Check:
    if differs is None:
        return Check(what=what, answer="inconclusive", words=_away(name, uri), remedy=NAME_IT)
    if differs:
        words = f"{name}: {'; '.join(differs[:4])}"
        return Check(what=what, answer="fail", words=words, numbers={"differences": float(len(differs))})
    return Check(what=what, answer="pass", words=name)


def _away(names: str, uri: str | None) -> str:
    return f"MLflow at {without_password(resolve_uri(uri))} has no copy of {names}, or cannot be reached"
