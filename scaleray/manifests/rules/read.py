"""Manifests of files and folders, and their faults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from scaleray.errors import UsageError
from scaleray.manifests.rules.check import broken_rules, kind_of, too_new_fields
from scaleray.manifests.rules.kuberay import Manifest
from scaleray.manifests.versions import KUBERAY, as_numbers


def check_manifests(*paths: str | Path, kuberay: str = KUBERAY) -> dict[str, Any]:
    """What the operator's rules and those of a locked door have against RayClusters, RayJobs and files for `ray up`.

    paths: YAML files, or folders with such. kuberay: release of the operator that runs on the cluster. Gives
    `manifests`, how many were found, and `faults`, each with file, manifest, rule and fault.
    Raises UsageError.
    """
    if len(as_numbers(kuberay)) < 2:
        raise UsageError("--kuberay", kuberay, f"it is a release such as {KUBERAY}")
    if not paths:
        raise UsageError("scaleray cluster check", None, "it needs files or folders", "such as cluster/kubernetes")
    faults, num_manifests = [], 0
    for path, manifest in _manifests([Path(path) for path in paths]):
        num_manifests += 1
        given = manifest.get("cluster_name") or (manifest.get("metadata") or {}).get("name", "without a name")
        name = f"{kind_of(manifest)} {given}"
        try:
            found = broken_rules(manifest)
        except (AttributeError, TypeError, KeyError) as exc:  # a list where a mapping belongs, and the like
            found = [("schema", f"its parts are not what the schema asks for ({type(exc).__name__}: {exc})")]
        if newer := too_new_fields(manifest, kuberay):
            oldest = max(newer.values(), key=as_numbers)
            said = f"KubeRay {kuberay} does not know {', '.join(newer)}: upgrade the operator to {oldest} or newer"
            found.append(("kuberay", said))
        faults += [{"file": str(path), "manifest": name, "rule": rule, "fault": fault} for rule, fault in found]
    if not num_manifests:
        raise UsageError(
            "a manifest",
            ", ".join(map(str, paths)),
            "it has no RayCluster, RayJob or file for `ray up` in it, which rules are there for",
            "an overlay is checked as it is built: kubectl kustomize FOLDER | scaleray cluster check /dev/stdin",
        )
    return {"manifests": num_manifests, "faults": faults}


def _manifests(paths: Sequence[Path]) -> Iterator[tuple[Path, Manifest]]:
    for path in paths:
        inside = sorted({*path.rglob("*.yaml"), *path.rglob("*.yml")}) if path.is_dir() else [path]
        for file in inside:
            for document in _documents(file):
                if isinstance(document, dict) and kind_of(document) is not None:
                    yield file, document


def _documents(file: Path) -> list[Any]:
    try:
        return list(yaml.safe_load_all(file.read_text()))
    except OSError as exc:
        raise UsageError("a manifest", str(file), f"it cannot be read: {exc.strerror}") from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise UsageError("a manifest", str(file), f"it is no YAML: {' '.join(str(exc).split())[:200]}") from exc
