"""Manifests of Kubernetes: their schemas, the operator's rules and our own, and the objects that kustomize builds."""

from __future__ import annotations

import copy
import math
import subprocess
from typing import Any

import pytest
import yaml
from cluster_files import CLUSTER, documents, places, schema_faults, table_of_tests
from file_rules import check_ray_manifest
from optional_programs import program

FOLDER = CLUSTER / "kubernetes"
OBJECTS = {
    f"{path.relative_to(FOLDER).parent}/{document['kind']} {document['metadata']['name']}": document
    for path in sorted(FOLDER.rglob("*.yaml"))
    if path.name != "kustomization.yaml"
    for document in documents(path)
}
RAY = {name: document for name, document in OBJECTS.items() if document["kind"] in ("RayCluster", "RayJob")}
APPLIED = ["admin", "admin-kueue", "base", "cluster-cpu", "cluster-gpu", "job-cpu", "job-gpu", "overlays/mine"]
LEAST_SCORE = 0.95


@pytest.mark.parametrize("name", sorted(OBJECTS))
def test_an_object_keeps_the_schema_of_its_kind(name):
    assert schema_faults(OBJECTS[name]) == []


@pytest.mark.parametrize("name", sorted(RAY))
def test_a_ray_cluster_keeps_every_rule(name):
    check_ray_manifest(RAY[name])


def check_rules(document: dict[str, Any]) -> None:
    """Assert the rules of a document; a kind other than RayCluster and RayJob has none."""
    if document.get("kind") in ("RayCluster", "RayJob"):
        check_ray_manifest(document)


def slips(document: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """A document with each of its keys misspelt in turn, and with each value of another type."""
    found = []
    for path in places(document):
        for kind in ("misspelt", "another type"):
            changed = copy.deepcopy(document)
            node = changed
            for part in path[:-1]:
                node = node[part]
            value = node[path[-1]]
            if kind == "misspelt":
                node[f"{path[-1]}x"] = node.pop(path[-1])
            else:
                node[path[-1]] = "text" if isinstance(value, (dict, list)) else {"a": ["mapping"]}
            found.append((f"{kind}: {'.'.join(map(str, path))}", changed))
    return found


def is_found(changed: dict[str, Any]) -> bool:
    """Whether schema or rules have something against a document."""
    if schema_faults(changed):
        return True
    try:
        check_rules(changed)
    except (AssertionError, AttributeError, TypeError, KeyError, ValueError):
        return True
    return False


@pytest.mark.combination
def test_at_least_19_of_20_slips_of_the_pen_are_found():
    num_tried, missed = 0, []
    for name, document in OBJECTS.items():
        tried = slips(document)
        assert len(tried) >= 5
        num_tried += len(tried)
        missed += [f"{name}: {what}" for what, changed in tried if not is_found(changed)]
    share = 1 - len(missed) / num_tried
    assert share >= LEAST_SCORE, missed
    assert table_of_tests().SLIPS[0] == f"slips of the pen, {math.floor(100 * share)} % found in all files together"


@pytest.mark.parametrize("folder", APPLIED)
def test_kustomize_builds_a_folder_whose_objects_keep_schemas_and_rules(folder):
    built = subprocess.run(
        [program("kubectl"), "kustomize", str(FOLDER / folder)], capture_output=True, text=True, check=True, timeout=60
    )
    found = list(yaml.safe_load_all(built.stdout))
    assert found
    for document in found:
        assert schema_faults(document) == []
        check_rules(document)
        if folder == "overlays/mine" and document["kind"] == "RayJob":
            [workers] = document["spec"]["rayClusterSpec"]["workerGroupSpecs"]
            pod = workers["template"]["spec"]
            assert pod["priorityClassName"] == "scaleray-training" and document["spec"]["suspend"] is True
            assert pod["containers"][0]["image"].startswith("REGISTRY/scaleray:")
            assert document["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "scaleray"


def test_what_one_object_names_another_one_has():
    named = {(document["kind"], document["metadata"]["name"]) for document in OBJECTS.values()}
    for document in RAY.values():
        for pod in [*_pods(document)]:
            assert ("ServiceAccount", pod["serviceAccountName"]) in named
            for volume in pod["volumes"]:
                if "persistentVolumeClaim" in volume:
                    assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in named
    queue = OBJECTS["admin-kueue/LocalQueue scaleray"]["spec"]["clusterQueue"]
    assert ("ClusterQueue", queue) in named
    [group] = OBJECTS["admin-kueue/ClusterQueue scaleray"]["spec"]["resourceGroups"]
    assert all(("ResourceFlavor", flavor["name"]) in named for flavor in group["flavors"])


def test_the_quota_holds_the_job_on_gpus():
    [group] = OBJECTS["admin-kueue/ClusterQueue scaleray"]["spec"]["resourceGroups"]
    quota = {one["name"]: one["nominalQuota"] for one in group["flavors"][0]["resources"]}
    job = OBJECTS["job-gpu/RayJob scaleray-train-gpu"]["spec"]
    [workers] = job["rayClusterSpec"]["workerGroupSpecs"]
    head, worker, submitter = [pod["containers"][0]["resources"] for pod in _pods({"kind": "RayJob", "spec": job})]
    cpus = (
        int(head["requests"]["cpu"])
        + workers["replicas"] * int(worker["requests"]["cpu"])
        + int(submitter["requests"]["cpu"])
    )
    assert cpus <= int(quota["cpu"])
    assert workers["replicas"] * int(worker["limits"]["nvidia.com/gpu"]) == int(quota["nvidia.com/gpu"])


def _pods(document):
    spec = document["spec"]
    inner = spec if document["kind"] == "RayCluster" else spec["rayClusterSpec"]
    yield inner["headGroupSpec"]["template"]["spec"]
    yield inner["workerGroupSpecs"][0]["template"]["spec"]
    if document["kind"] == "RayJob":
        yield spec["submitterPodTemplate"]["spec"]


def test_a_network_policy_lets_nobody_in_but_pods_of_a_training_the_operator_and_prometheus():
    policies = [document for document in OBJECTS.values() if document["kind"] == "NetworkPolicy"]
    sources = [source for policy in policies for rule in policy["spec"]["ingress"] for source in rule["from"]]
    assert all(source for source in sources) and len(sources) == 3
    assert sum("podSelector" not in source for source in sources) == 1  # Prometheus, by its namespace and to its ports
    assert {policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/part-of"] for policy in policies} == {
        "scaleray"
    }


def test_no_pod_writes_a_database_file_on_the_volume_of_all_nodes():
    """SQLite's locks do not hold there, and every job of the namespace would write the same file."""
    pods = [pod for document in RAY.values() for pod in _pods(document)]
    given = [one["value"] for pod in pods for one in pod["containers"][0].get("env", ()) if "TRACKING" in one["name"]]
    assert set(given) == {"http://mlflow:5000"}
    ports = [
        port["port"]
        for rule in OBJECTS["base/NetworkPolicy scaleray"]["spec"]["egress"]
        for port in rule.get("ports", ())
    ]
    assert 5000 in ports
