"""Manifests of Kubernetes: their schemas, the operator's rules and our own, what kustomize makes of them, planted faults."""

from __future__ import annotations

import copy
import math
import subprocess
from typing import Any

import pytest
import yaml
from cluster_files import CLUSTER, GONE, documents, edited, places, schema_faults, table_of_tests
from optional_programs import program

from scaleray.cli.main import run_command
from scaleray.manifests.grace import SAVING
from scaleray.manifests.rules.check import RULES, broken_rules, too_new_fields

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

ANY, JOB = ("RayCluster", "RayJob"), ("RayJob",)
HEAD, WORKERS = "headGroupSpec", "workerGroupSpecs.0"
HEAD_POD, POD = f"{HEAD}.template.spec", f"{WORKERS}.template.spec"
BOX = f"{POD}.containers.0"
REDIS = [{"name": "RAY_REDIS_ADDRESS", "value": "redis:6379"}]
V2 = {"enableInTreeAutoscaling": True, "autoscalerOptions": {"version": "v2"}}
V2_BY_VARIABLE = [{"name": "RAY_enable_autoscaler_v2", "value": "1"}]
ROOT_BOX = {"name": "first", "image": "busybox:latest", "securityContext": {"privileged": True, "runAsUser": 0}}
# rule -> (kinds, edits of the cluster's specification, edits of the whole document)
PLANTED: list[tuple[str, tuple[str, ...], dict[str, Any], dict[str, Any]]] = [
    ("names_are_short", ANY, {}, {"metadata.name": "a" * 54}),
    ("names_are_short", ANY, {}, {"metadata.name": "1st-training"}),
    ("names_are_short", ANY, {}, {"metadata.name": "Training"}),
    ("names_are_short", JOB, {}, {"metadata.name": "a" * 48}),
    ("groups_have_containers", ANY, {f"{HEAD_POD}.containers": []}, {}),
    ("groups_have_containers", ANY, {f"{POD}.containers": []}, {}),
    ("resources_stand_once", ANY, {f"{HEAD}.resources": {"CPU": "4"}}, {}),
    ("resources_stand_once", ANY, {f"{WORKERS}.rayStartParams.num-gpus": "8", f"{WORKERS}.resources": {"GPU": "8"}}, {}),
    ("labels_stand_outside", ANY, {f"{HEAD}.rayStartParams.labels": "a=b"}, {}),
    ("labels_stand_outside", ANY, {f"{WORKERS}.labels": {"a b": "c"}}, {}),
    ("labels_stand_outside", ANY, {f"{WORKERS}.labels": {"zone": "not/allowed"}}, {}),
    ("replicas_are_a_range", ANY, {f"{WORKERS}.minReplicas": 3}, {}),
    ("replicas_are_a_range", ANY, {f"{WORKERS}.minReplicas": -1}, {}),
    ("replicas_are_a_range", ANY, {f"{WORKERS}.maxReplicas": GONE}, {}),
    ("token_needs_its_ray", ANY, {"rayVersion": "2.51.0"}, {}),
    ("token_needs_its_ray", ANY, {"rayVersion": GONE}, {}),
    ("token_needs_its_ray", ANY, {"authOptions": {"mode": "disabled", "enableK8sTokenAuth": True}}, {}),
    ("token_needs_its_ray", JOB, {"authOptions.enableK8sTokenAuth": True}, {}),
    ("token_needs_its_ray", ANY, {"rayVersion": "2.54.0", "authOptions.enableK8sTokenAuth": True}, {}),
    ("token_needs_its_ray", ANY, {"authOptions": {"mode": "token", "enableK8sTokenAuth": True, "secretName": "x"}}, {}),
    ("autoscaler_is_stated_once", ANY, {**V2, f"{HEAD_POD}.containers.0.env": V2_BY_VARIABLE}, {}),
    ("autoscaler_is_stated_once", ANY, {f"{HEAD_POD}.containers.0.env": V2_BY_VARIABLE}, {}),
    ("autoscaler_is_stated_once", ANY, {**V2, f"{POD}.restartPolicy": "Always"}, {}),
    ("autoscaler_is_stated_once", ANY, {**V2, f"{HEAD_POD}.restartPolicy": "OnFailure"}, {}),
    ("autoscaler_is_stated_once", ANY, {"autoscalerOptions": {"idleTimeoutSeconds": -1}}, {}),
    ("second_autoscaler_for_idle_and_priority", ANY, {f"{WORKERS}.idleTimeoutSeconds": 60}, {}),
    ("second_autoscaler_for_idle_and_priority", ANY, {f"{WORKERS}.priority": 5}, {}),
    ("second_autoscaler_for_idle_and_priority", ANY, {**V2, "rayVersion": "2.55.1", f"{WORKERS}.priority": 5}, {}),
    ("no_feature_gates", ANY, {"networkPolicy": {"mode": "DenyAll"}}, {}),
    ("no_feature_gates", ANY, {"tlsOptions": {"enabled": True}}, {}),
    ("no_feature_gates", ANY, {"gcsFaultToleranceOptions": {"backend": "rocksdb"}}, {}),
    ("no_feature_gates", ANY, {f"{WORKERS}.suspend": True}, {}),
    ("no_feature_gates", JOB, {}, {"spec.deletionStrategy": {"deletionRules": []}}),
    ("redis_is_stated_once", ANY, {f"{HEAD_POD}.containers.0.env": REDIS}, {}),
    ("redis_is_stated_once", ANY, {"gcsFaultToleranceOptions": {}, f"{HEAD}.rayStartParams.redis-password": "x"}, {}),
    ("redis_is_stated_once", ANY, {f"{HEAD}.rayStartParams.redis-username": "x"}, {}),
    ("redis_is_stated_once", ANY, {"gcsFaultToleranceOptions": {}}, {"metadata.annotations": {"ray.io/ft-enabled": "true"}}),
    ("job_has_one_cluster", JOB, {}, {"spec.rayClusterSpec": GONE}),
    ("job_has_one_cluster", JOB, {}, {"spec.clusterSelector": {"cluster": "mine"}}),
    ("job_has_one_cluster", JOB, {}, {"spec.clusterSelector": {"ray.io/cluster": "mine"}}),
    ("job_has_one_cluster", JOB, {}, {"spec.clusterSelector": {"ray.io/cluster": "mine"}, "spec.backoffLimit": 0, "spec.suspend": True}),
    ("job_is_cleaned_up", JOB, {}, {"spec.shutdownAfterJobFinishes": False}),
    ("job_is_cleaned_up", JOB, {}, {"spec.ttlSecondsAfterFinished": -1}),
    ("job_is_cleaned_up", JOB, {}, {"spec.suspend": True, "spec.shutdownAfterJobFinishes": GONE, "spec.ttlSecondsAfterFinished": 0}),
    ("job_deadlines_are_positive", JOB, {}, {"spec.activeDeadlineSeconds": 0}),
    ("job_deadlines_are_positive", JOB, {}, {"spec.preRunningDeadlineSeconds": -5}),
    ("job_deadlines_are_positive", JOB, {}, {"spec.backoffLimit": -1}),
    ("job_mode_fits", JOB, {}, {"spec.submissionMode": "InteractiveMode"}),
    ("job_mode_fits", JOB, {}, {"spec.submissionMode": "SidecarMode"}),
    ("job_mode_fits", JOB, {f"{HEAD_POD}.restartPolicy": "Always"}, {"spec.submissionMode": "SidecarMode", "spec.submitterPodTemplate": GONE}),
    ("entrypoint_is_one_command", JOB, {}, {"spec.entrypoint": "cd /app && python -m scaleray train --resume auto"}),
    ("entrypoint_is_one_command", JOB, {}, {"spec.entrypoint": "python -m scaleray train --resume auto; date"}),
    ("entrypoint_is_one_command", JOB, {}, {"spec.entrypoint": "scaleray train --resume auto 'a"}),
    ("a_token_is_asked_for", ANY, {"authOptions": GONE}, {}),
    ("a_token_is_asked_for", ANY, {"authOptions.mode": "disabled"}, {}),
    ("a_token_is_asked_for", ANY, {"authOptions": {}}, {}),
    ("a_token_is_asked_for", ANY, {f"{BOX}.env": [{"name": "RAY_AUTH_TOKEN", "value": "secret"}]}, {}),
    ("images_have_versions", ANY, {f"{BOX}.image": "scaleray:latest"}, {}),
    ("images_have_versions", ANY, {f"{BOX}.image": "scaleray"}, {}),
    ("images_have_versions", ANY, {f"{BOX}.image": "scaleray:0.1.0-ray2.59.0-py311-cpu"}, {}),
    ("images_have_versions", ANY, {f"{BOX}.image": "rayproject/ray:2.60.0-py312-gpu"}, {}),
    ("images_have_versions", ANY, {"rayVersion": "2.61.0"}, {}),
    ("pods_have_no_rights", ANY, {f"{POD}.securityContext.runAsNonRoot": False}, {}),
    ("pods_have_no_rights", ANY, {f"{HEAD_POD}.securityContext.runAsUser": 0}, {}),
    ("pods_have_no_rights", ANY, {f"{POD}.securityContext": GONE}, {}),
    ("pods_have_no_rights", ANY, {f"{POD}.securityContext.seccompProfile": {"type": "Unconfined"}}, {}),
    ("pods_have_no_rights", ANY, {f"{POD}.automountServiceAccountToken": True}, {}),
    ("pods_have_no_rights", ANY, {f"{POD}.hostNetwork": True}, {}),
    ("pods_have_no_rights", ANY, {f"{POD}.volumes.0": {"name": "shared", "hostPath": {"path": "/"}}}, {}),
    ("pods_have_no_rights", JOB, {}, {"spec.submitterPodTemplate.spec.securityContext": GONE}),
    ("containers_have_no_rights", ANY, {f"{BOX}.securityContext.readOnlyRootFilesystem": False}, {}),
    ("containers_have_no_rights", ANY, {f"{BOX}.securityContext.privileged": True}, {}),
    ("containers_have_no_rights", ANY, {f"{BOX}.securityContext.allowPrivilegeEscalation": GONE}, {}),
    ("containers_have_no_rights", ANY, {f"{BOX}.securityContext.capabilities": {"add": ["SYS_ADMIN"]}}, {}),
    ("containers_have_no_rights", ANY, {f"{BOX}.securityContext.runAsUser": 0}, {}),
    ("what_is_written_has_a_place", ANY, {f"{BOX}.volumeMounts.2": GONE}, {}),
    ("what_is_written_has_a_place", ANY, {f"{POD}.volumes.1.emptyDir": {}}, {}),
    ("what_is_written_has_a_place", ANY, {f"{POD}.volumes.1.emptyDir.sizeLimit": "64Mi"}, {}),
    ("what_is_written_has_a_place", ANY, {f"{BOX}.volumeMounts.0.name": "share"}, {}),
    ("shares_are_stated", ANY, {f"{BOX}.resources": GONE}, {}),
    ("shares_are_stated", ANY, {f"{BOX}.resources.limits.memory": "1Gi"}, {}),
    ("shares_are_stated", ANY, {f"{BOX}.resources.requests.nvidia~com/gpu": "8", f"{BOX}.resources.limits": {}}, {}),
    ("shares_are_stated", ANY, {f"{BOX}.resources.limits.nvidia~com/gpu": "0"}, {}),
    ("shares_are_stated", ANY, {f"{BOX}.resources.limits.nvidia~com/gpus": "8"}, {}),
    ("parameters_of_ray_exist", ANY, {f"{HEAD}.rayStartParams.num_cpus": "0"}, {}),
    ("pods_are_selected", ANY, {f"{WORKERS}.template.metadata": GONE}, {}),
    ("pods_are_selected", ANY, {f"{HEAD_POD}.containers.0.ports.3.name": "metric"}, {}),
    ("a_training_has_time_to_save", ANY, {f"{HEAD_POD}.containers.0.env": GONE}, {}),
    ("a_training_has_time_to_save", ANY, {f"{HEAD_POD}.containers.0.env": [{"name": SAVING, "value": "90"}]}, {}),
    ("a_training_has_time_to_save", ANY, {f"{HEAD_POD}.containers.0.env": [{"name": SAVING, "value": "soon"}]}, {}),
    ("a_training_has_time_to_save", ANY, {f"{HEAD_POD}.terminationGracePeriodSeconds": GONE}, {}),
    ("a_training_has_time_to_save", ANY, {f"{HEAD_POD}.terminationGracePeriodSeconds": 60}, {}),
    ("images_have_versions", ANY, {f"{POD}.initContainers": [ROOT_BOX]}, {}),
    ("containers_have_no_rights", ANY, {f"{POD}.initContainers": [ROOT_BOX]}, {}),
    ("containers_have_no_rights", JOB, {}, {"spec.submitterPodTemplate.spec.initContainers": [ROOT_BOX]}),
    ("containers_have_no_rights", ANY, {f"{HEAD_POD}.ephemeralContainers": [ROOT_BOX]}, {}),
    ("shares_are_stated", ANY, {f"{HEAD_POD}.initContainers": [ROOT_BOX]}, {}),
    ("what_is_written_has_a_place", ANY, {f"{POD}.initContainers": [{**ROOT_BOX, "volumeMounts": [{"name": "x", "mountPath": "/x"}]}]}, {}),
    ("a_token_is_asked_for", ANY, {f"{POD}.initContainers": [{**ROOT_BOX, "env": [{"name": "RAY_AUTH_TOKEN", "value": "secret"}]}]}, {}),
    ("jobs_end", JOB, {}, {"spec.preRunningDeadlineSeconds": GONE}),
    ("jobs_end", JOB, {}, {"spec.entrypoint": "python -m scaleray train -c jobs/digits.yaml"}),
    ("jobs_end", JOB, {}, {"spec.entrypoint": "python train.py --resume auto"}),
    ("jobs_end", JOB, {}, {"spec.shutdownAfterJobFinishes": False, "spec.ttlSecondsAfterFinished": 0}),
]  # fmt: skip


@pytest.mark.parametrize("name", sorted(OBJECTS))
def test_an_object_keeps_the_schema_of_its_kind(name):
    assert schema_faults(OBJECTS[name]) == []


@pytest.mark.parametrize("name", sorted(RAY))
def test_a_ray_cluster_keeps_every_rule(name):
    assert broken_rules(RAY[name]) == []


def test_every_rule_has_planted_faults():
    assert {rule for rule, *_ in PLANTED} == set(RULES)
    for kind in ANY:
        assert sum(kind in kinds for _, kinds, *_ in PLANTED) >= 5


@pytest.mark.parametrize("name", sorted(RAY))
def test_every_planted_fault_is_found_by_the_rule_that_it_was_planted_for(name):
    document = RAY[name]
    inner = "spec" if document["kind"] == "RayCluster" else "spec.rayClusterSpec"
    missed = []
    for rule, kinds, of_cluster, of_document in PLANTED:
        if document["kind"] in kinds:
            edits = {**{f"{inner}.{path}": value for path, value in of_cluster.items()}, **of_document}
            found = {broken for broken, _ in broken_rules(edited(document, edits))}
            if rule not in found:
                missed.append((rule, of_cluster, of_document, found))
    assert missed == []


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
    try:
        return bool(schema_faults(changed)) or bool(broken_rules(changed))
    except (AttributeError, TypeError, KeyError):  # what the command calls a fault of the schema
        return True


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
        assert schema_faults(document) == [] and broken_rules(document) == []
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


def test_fields_that_an_older_operator_does_not_know_are_named(tmp_path, capsys):
    job = RAY["job-gpu/RayJob scaleray-train-gpu"]
    assert too_new_fields(job) == {} and too_new_fields(job, "1.6.0") == {}
    assert too_new_fields(job, "1.5.1") == {"spec.preRunningDeadlineSeconds": "1.6.0"}
    assert run_command(["cluster", "check", str(FOLDER), "--kuberay", "1.4.2"]) == 1
    assert "upgrade the operator to 1.6.0 or newer" in capsys.readouterr().out


def test_the_check_of_files_says_file_object_and_rule_and_survives_what_is_no_manifest(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    broken = edited(RAY["cluster-gpu/RayCluster scaleray-gpu"], {"spec.authOptions": GONE})
    path.write_text(yaml.safe_dump_all([broken, {"kind": "ConfigMap"}, ["a", "list"]]))
    assert run_command(["cluster", "check", str(path)]) == 1
    assert f"{path}: RayCluster scaleray-gpu: authOptions.mode is not token" in capsys.readouterr().out
    assert run_command(["cluster", "check", str(FOLDER)]) == 0
    path.write_text(yaml.safe_dump(edited(broken, {"spec.headGroupSpec": "text"})))
    assert run_command(["cluster", "check", str(path), "--json"]) == 1
    assert "not what the schema asks for" in capsys.readouterr().out
    for bad in ("a: [", "\0"):
        path.write_text(bad)
        assert run_command(["cluster", "check", str(path)]) == 2
    assert run_command(["cluster", "check", str(tmp_path / "nowhere.yaml")]) == 2
    assert run_command(["cluster", "check"]) == 2
    capsys.readouterr()
    assert run_command(["cluster", "check", str(FOLDER / "overlays")]) == 2  # nothing in it that rules are there for
    assert "kubectl kustomize FOLDER | scaleray cluster check /dev/stdin" in capsys.readouterr().err
