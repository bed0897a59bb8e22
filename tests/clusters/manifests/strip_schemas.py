"""Make the JSON schemas beside this file from checkouts of the projects that own them.

    python tests/clusters/manifests/strip_schemas.py KUBERAY_CRD_FOLDER KUEUE_CRD_FOLDER PODMONITOR_CRD KUBERNETES_DEFINITIONS

Descriptions are dropped, what is not named is refused, and what stands in several places stands once, under $defs.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "schemas"
KEPT = {"type", "properties", "items", "required", "enum", "minimum", "maximum", "minLength", "maxLength", "pattern"}
KEPT |= {"minItems", "maxItems", "additionalProperties"}
SMALLEST_SHARED = 200
"""Characters from which on a part that stands in two places is worth a name."""
KUBERNETES_KINDS = {
    "Namespace": ("v1", "io.k8s.api.core.v1.Namespace"),
    "ServiceAccount": ("v1", "io.k8s.api.core.v1.ServiceAccount"),
    "PersistentVolumeClaim": ("v1", "io.k8s.api.core.v1.PersistentVolumeClaim"),
    "NetworkPolicy": ("networking.k8s.io/v1", "io.k8s.api.networking.v1.NetworkPolicy"),
    "PriorityClass": ("scheduling.k8s.io/v1", "io.k8s.api.scheduling.v1.PriorityClass"),
}
METADATA = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "namespace": {"type": "string"},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}


def stripped(node: dict[str, Any]) -> dict[str, Any]:
    """A part of a CRD's schema as plain JSON schema, closed wherever its properties are named."""
    if node.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    kept = {key: value for key, value in node.items() if key in KEPT}
    if "properties" in kept:
        kept["properties"] = {name: stripped(part) for name, part in kept["properties"].items()}
        if not node.get("x-kubernetes-preserve-unknown-fields"):
            kept["additionalProperties"] = False
    for key in ("items", "additionalProperties"):
        if isinstance(kept.get(key), dict):
            kept[key] = stripped(kept[key])
    return kept


def shared(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with parts that occur several times under $defs."""
    counts: Counter[str] = Counter()

    def count(node: Any) -> None:
        if isinstance(node, dict):
            text = json.dumps(node, sort_keys=True)
            if "type" in node and len(text) >= SMALLEST_SHARED:
                counts[text] += 1
                if counts[text] > 1:
                    return
            for part in node.values():
                count(part)

    def name(text: str) -> str:
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    definitions: dict[str, Any] = {}

    def replace(node: Any, *, inside: bool = True) -> Any:
        if not isinstance(node, dict):
            return node
        text = json.dumps(node, sort_keys=True)
        if inside and counts[text] > 1:
            if name(text) not in definitions:
                definitions[name(text)] = {}
                definitions[name(text)] = replace(node, inside=False)
            return {"$ref": f"#/$defs/{name(text)}"}
        return {key: replace(part) for key, part in node.items()}

    count(schema)
    return {**replace(schema, inside=False), "$defs": definitions}


def of_crd(path: Path, version: str) -> dict[str, Any]:
    """The schema of one version of a custom resource."""
    crd = yaml.safe_load(path.read_text())
    [found] = [one for one in crd["spec"]["versions"] if one["name"] == version]
    schema = stripped(found["schema"]["openAPIV3Schema"])
    schema["properties"].pop("status", None)
    schema["properties"]["metadata"] = METADATA
    schema["properties"]["kind"] = {"enum": [crd["spec"]["names"]["kind"]]}
    schema["properties"]["apiVersion"] = {"enum": [f"{crd['spec']['group']}/{version}"]}
    schema["required"] = sorted({*schema.get("required", []), "apiVersion", "kind", "metadata"})
    return schema


def of_kubernetes(definitions: dict[str, Any], kind: str) -> dict[str, Any]:
    """The schema of a kind of Kubernetes itself, with its references followed."""

    def follow(node: dict[str, Any]) -> dict[str, Any]:
        if "$ref" in node:
            target = node["$ref"].rpartition("/")[2]
            if target.endswith(("IntOrString", "Quantity")):
                return {"x-kubernetes-int-or-string": True}
            if target.endswith("ObjectMeta"):
                return METADATA
            return follow(definitions[target])
        node = dict(node)
        if "properties" in node:
            node["properties"] = {name: follow(part) for name, part in node["properties"].items() if name != "status"}
        for key in ("items", "additionalProperties"):
            if isinstance(node.get(key), dict):
                node[key] = follow(node[key])
        return node

    definition = follow(definitions[KUBERNETES_KINDS[kind][1]])
    schema = stripped(definition)
    schema["properties"]["metadata"] = METADATA
    schema["properties"]["kind"] = {"enum": [kind]}
    schema["properties"]["apiVersion"] = {"enum": [KUBERNETES_KINDS[kind][0]]}
    schema["required"] = sorted({*schema.get("required", []), "apiVersion", "kind", "metadata"})
    return schema


def main(kuberay: str, kueue: str, pod_monitor: str, kubernetes: str) -> None:
    """Write the files."""
    core = json.loads(Path(kubernetes).read_text())["$defs"]
    files = {
        "kuberay.json": [of_crd(Path(kuberay) / f"ray.io_{name}.yaml", "v1") for name in ("rayclusters", "rayjobs")],
        "kueue.json": [
            of_crd(Path(kueue) / f"kueue.x-k8s.io_{name}.yaml", "v1beta2")
            for name in ("clusterqueues", "localqueues", "resourceflavors")
        ],
        "pod_monitor.json": [of_crd(Path(pod_monitor), "v1")],
        "kubernetes.json": [of_kubernetes(core, kind) for kind in KUBERNETES_KINDS],
    }
    for name, schemas in files.items():
        whole = shared({kind["properties"]["kind"]["enum"][0]: kind for kind in schemas})
        (FOLDER / name).write_text(json.dumps(whole, separators=(",", ":"), sort_keys=True) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
