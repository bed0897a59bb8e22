"""Evidence of a decision in a separate folder, with which gates can be evaluated again after runs, certificates and
studies are deleted."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from scaleray.checkpoints.storage import Store
from scaleray.common.filesystems import write_whole
from scaleray.common.parsing import load_json
from scaleray.errors import TrackingError
from scaleray.recording.find_record import FoundRun, record_of, text_of
from scaleray.records.alert_record import ALERTS_FILE
from scaleray.records.certificate import EqualityCertificate
from scaleray.records.json_record import jsonable
from scaleray.records.read import FILE
from scaleray.records.study_record import StudyRecord
from scaleray.release.gate.evidence import Evidence, training
from scaleray.release.gate.policy_file import policy_of
from scaleray.release.gates.equality import NamedCertificate
from scaleray.release.gates.policy import Policy

EVIDENCE = "evidence"
"""Folder of the evidence among the files of a promoted version."""
INDEX, EVALUATIONS, STUDY = "evidence.json", "evaluations.json", "study.json"
SIDES = ("candidates", "baselines", "endured")


def store_evidence(evidence: Evidence, policy: Policy, folder: Path) -> Evidence:
    """Write evidence and policy to a new folder, and return the evidence read back from it, for which the gates give
    the same answers."""
    folder.mkdir(parents=True)
    sides: dict[str, list[FoundRun]] = {side: getattr(evidence, side) for side in SIDES}
    for side, runs in sides.items():
        for number, found in enumerate(runs):
            location = folder / side / str(number)
            location.mkdir(parents=True)
            write_whole(location / FILE, training(found).to_json())
            write_whole(location / EVALUATIONS, json.dumps(jsonable(found.evaluations)))
            if found.alerts is not None:
                write_whole(location / ALERTS_FILE, found.alerts)
    about = {
        **{side: [one.where for one in runs] for side, runs in sides.items()},
        "certificates": [dataclasses.asdict(one) for one in evidence.certificates],
        "notes": evidence.notes,
        "policy": policy.model_dump(mode="json"),
    }
    write_whole(folder / INDEX, json.dumps(jsonable(about), indent=1))
    if evidence.study is not None:
        write_whole(folder / STUDY, evidence.study.to_json())
    return read_evidence(folder)[0]


def read_evidence(folder: Path) -> tuple[Evidence, Policy]:
    """Read evidence written by `store_evidence`. Raises TrackingError for an incomplete folder."""
    try:
        about = load_json((folder / INDEX).read_bytes())
        sides: dict[str, list[FoundRun]] = {side: [] for side in SIDES}
        for side, runs in sides.items():
            for number, where in enumerate(about.get(side, [])):
                location = Store(str(folder / side / str(number)))
                record = record_of(location.read(FILE), where=f"{where}, from the stored evidence")
                evaluations = {
                    str(name): [(int(step), math.nan if value is None else float(value)) for step, value in points]
                    for name, points in load_json(location.read(EVALUATIONS)).items()
                }
                runs.append(FoundRun(record, where, location, None, evaluations, text_of(location, ALERTS_FILE)))
        certificates = [_certificate(values) for values in about["certificates"]]
        study = record_of((folder / STUDY).read_bytes(), where=STUDY) if (folder / STUDY).is_file() else None
        policy = policy_of(about["policy"], where="stored with the evidence")
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as exc:
        raise TrackingError.problem("The evidence", f"in {folder} is incomplete: {type(exc).__name__} {exc}") from exc
    assert study is None or isinstance(study, StudyRecord)
    return Evidence(**sides, certificates=certificates, study=study, notes=list(about["notes"])), policy


def _certificate(values: dict[str, Any]) -> NamedCertificate:
    record = EqualityCertificate.from_json(json.dumps(values["record"]))
    return NamedCertificate(record, values["name"], values["sha256"])
