"""Provenance of a promoted model, as an in-toto statement with SLSA's provenance predicate.

https://in-toto.io/Statement/v1 and https://slsa.dev/spec/v1.0/provenance: the subjects are files with their SHA-256,
the resolved dependencies are their sources. The statement is unsigned: it reveals later changes but not its author.
"""

import hashlib
import json
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from scaleray.common.filesystems import write_whole
from scaleray.records.gates import GateRecord
from scaleray.records.json_record import jsonable
from scaleray.records.run_record import RunRecord

STATEMENT, GATES_FILE = "statement.json", "gates.json"
TYPE, PREDICATE = "https://in-toto.io/Statement/v1", "https://slsa.dev/provenance/v1"
BUILD = "scaleray.promote/v1"
CHUNK = 1 << 20


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each file in a folder and its subfolders, by path, except the statement itself."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix(): path for path in files}
    return {name: file_digest(path) for name, path in names.items() if name != STATEMENT}


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            found.update(chunk)
    return found.hexdigest()


def write_statement(
    folder: Path,
    files: Mapping[str, str],
    run: RunRecord,
    gates: GateRecord,
    *,
    promotion: str,
    model: str,
    weights: str,
    by: str,
) -> str:
    """Write the statement of a promotion that ends now, and return its SHA-256. files: SHA-256 of the folder's files by
    path; weights: which ones, as text; by: the user."""
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    facts = run.environment.get("environment") or {}
    git = facts.get("git") or {}
    materials = [
        {
            "name": f"data/{split}",
            "digest": {"sha256": str(about["sha256"])},
            "annotations": {"rows": about.get("rows")},
        }
        for split, about in run.data.items()
        if about.get("sha256")
    ]
    if git.get("commit"):
        materials.append({"name": "code", "digest": {"gitCommit": str(git["commit"])}, "annotations": dict(git)})
    materials += [
        {"name": name, "digest": {"sha256": digest}} for name, digest in files.items() if name.startswith("evidence/")
    ]
    statement = jsonable({
        "_type": TYPE,
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in files.items()],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD,
                "externalParameters": {
                    "model": model, "run": run.name, "run_id": run.run_id, "weights": weights, "config": run.config,
                    "policy": gates.policy,
                },
                "internalParameters": {"environment": facts},
                "resolvedDependencies": materials,
            },
            "runDetails": {
                "builder": {"id": "scaleray promote", "version": {"scaleray": metadata.version("scaleray")}},
                "metadata": {"invocationId": promotion, "startedOn": at, "finishedOn": at, "by": by},
                "byproducts": [{"name": GATES_FILE, "digest": {"sha256": files[GATES_FILE]}}],
            },
        },
    })  # fmt: skip
    write_whole(folder / STATEMENT, json.dumps(statement, indent=1))
    return file_digest(folder / STATEMENT)


def subjects(statement: Mapping[str, Any]) -> dict[str, str]:
    """Subjects of a statement: SHA-256 by path. Raises KeyError or TypeError if it is not a statement."""
    return {str(one["name"]): str(one["digest"]["sha256"]) for one in statement["subject"]}
