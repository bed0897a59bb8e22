"""Properties of our RayClusters, RayJobs and files for `ray up` that no schema states, as assertions.

KubeRay's own come from ray-operator/controllers/ray/utils/validation.go of v1.7.0, which checks a manifest only once it
is applied. The others are ours: a token for every cluster, pods without rights, one version of Ray, time to save.
"""

from __future__ import annotations

import re
from typing import Any

from scaleray.clusters.manifests import file_versions
from scaleray.clusters.manifests.cluster_spec import has_fixed_tag
from scaleray.clusters.manifests.grace import POD_S, RAY_STOP, RAY_STOP_S, SAVING, SAVING_S
from scaleray.clusters.submit.kubernetes_objects import LONGEST_JOB_NAME, groups, pod_of

LONGEST_CLUSTER_NAME = 53
CLUSTER_KEYS = {"rayVersion", "authOptions", "enableInTreeAutoscaling", "headGroupSpec", "workerGroupSpecs"}
"""Nothing that needs a feature gate, Redis or an autoscaler."""
NOT_ROOT = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
NO_RIGHTS = {
    "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
}  # fmt: skip
PARTS_OF_THE_HOST = {"hostNetwork", "hostPID", "hostIPC"}
TAG = f"-ray{file_versions.RAY}-py{file_versions.PYTHON.replace('.', '')}-"
SMALLEST_SHM_SHARE = 0.25
PROVIDERS = {
    "aws": {"type", "region", "availability_zone", "cache_stopped_nodes"},
    "gcp": {"type", "region", "availability_zone", "project_id"},
    "local": {"type", "head_ip", "worker_ips"},
}
TOKEN_FILE = "~/.ray/auth_token"


def check_ray_manifest(document: dict[str, Any]) -> None:
    """Assert the rules of a RayCluster or RayJob."""
    spec = document["spec"]
    is_job = document["kind"] == "RayJob"
    cluster = spec["rayClusterSpec"] if is_job else spec
    name = document["metadata"]["name"]
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert len(name) <= (LONGEST_JOB_NAME if is_job else LONGEST_CLUSTER_NAME)
    assert set(cluster) == CLUSTER_KEYS and cluster["enableInTreeAutoscaling"] is False
    assert cluster["rayVersion"] == file_versions.RAY and cluster["authOptions"] == {"mode": "token"}
    [workers] = cluster["workerGroupSpecs"]
    assert workers["minReplicas"] == workers["replicas"] == workers["maxReplicas"] > 0
    templates = {name: group["template"] for name, group in groups(document)}
    assert {name: group["rayStartParams"] for name, group in groups(document)} == {
        "head": {"num-cpus": "0"}, workers["groupName"]: {},
    }  # fmt: skip
    if is_job:
        _check_job(spec)
        templates["submitter"] = spec["submitterPodTemplate"]
    for kind, template in templates.items():
        assert template["metadata"]["labels"]["app.kubernetes.io/part-of"] == "scaleray"  # policies select by it
        _check_pod(template["spec"], kind)
    assert len({template["spec"]["containers"][0]["image"] for template in templates.values()}) == 1
    head = pod_of(cluster["headGroupSpec"])
    given = {one["name"]: one.get("value") for one in head["containers"][0]["env"]}
    assert given[SAVING] == str(SAVING_S) and given[RAY_STOP] == str(RAY_STOP_S)
    assert SAVING_S < RAY_STOP_S < POD_S == head["terminationGracePeriodSeconds"]


def _check_job(spec: dict[str, Any]) -> None:
    assert not {"clusterSelector", "deletionStrategy"} & set(spec) and spec["submissionMode"] == "K8sJobMode"
    assert spec["shutdownAfterJobFinishes"] is True and spec["ttlSecondsAfterFinished"] >= 0
    assert spec["activeDeadlineSeconds"] > 0 and spec["preRunningDeadlineSeconds"] > 0
    words = spec["entrypoint"]
    # the operator writes it into a shell line of the submitter's pod, which acts on `&&` itself
    assert re.search(r"\bscaleray [a-z]", words) and not set("();<>|&'\"") & set(words)
    assert spec["backoffLimit"] == (2 if "--resume auto" in words else 0)


def _check_pod(pod: dict[str, Any], kind: str) -> None:
    assert not (PARTS_OF_THE_HOST | {"initContainers", "ephemeralContainers"}) & set(pod)
    assert NOT_ROOT.items() <= pod["securityContext"].items() and pod["automountServiceAccountToken"] is False
    assert pod.get("restartPolicy", "Never") == "Never"
    [box] = pod["containers"]
    assert box["securityContext"] == NO_RIGHTS
    assert TAG in box["image"] and has_fixed_tag(box["image"])
    assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} & {one["name"] for one in box.get("env", ())}
    requests, limits = box["resources"]["requests"], box["resources"]["limits"]
    assert set(requests) == {"cpu", "memory"} and int(requests["cpu"]) > 0 and requests["memory"] == limits["memory"]
    assert set(limits) <= {"memory", "nvidia.com/gpu"} and int(limits.get("nvidia.com/gpu", 1)) > 0
    assert "nvidia.com/gpu" not in limits or pod["tolerations"]
    mounts = {mount["mountPath"]: mount["name"] for mount in box["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {"/tmp", "/home/ray"} <= set(mounts) and set(mounts.values()) <= set(volumes)
    assert not any("hostPath" in volume for volume in volumes.values())
    if kind != "submitter":
        assert {"/mnt/scaleray", "/dev/shm"} <= set(mounts)
        shm = volumes[mounts["/dev/shm"]]["emptyDir"]
        assert shm["medium"] == "Memory" and _gib(shm["sizeLimit"]) >= SMALLEST_SHM_SHARE * _gib(limits["memory"])
        ports = {port["name"] for port in box["ports"]}  # those that a PodMonitor reads
        assert ports >= ({"metrics", "as-metrics", "dash-metrics"} if kind == "head" else {"metrics"})


def _gib(size: str) -> int:
    return int(size.removesuffix("Gi"))


def check_ray_up_file(document: dict[str, Any]) -> None:
    """Assert the rules of a file for `ray up`, whose schema leaves provider and commands open."""
    provider = document["provider"]
    assert set(provider) == PROVIDERS[provider["type"]]
    is_cloud = provider["type"] != "local"
    if is_cloud:
        types = document["available_node_types"]
        assert document["head_node_type"] in types
        assert all(one.get("min_workers", 0) <= one.get("max_workers", 0) for one in types.values())
        assert sum(one.get("min_workers", 0) for one in types.values()) <= document["max_workers"]
        assert TAG in document["docker"]["image"] and has_fixed_tag(document["docker"]["image"])
    else:
        assert provider["head_ip"] not in provider["worker_ips"]
        assert f"ray.__version__ == '{file_versions.RAY}'" in document["setup_commands"][0]
    assert document["file_mounts"] == {TOKEN_FILE: TOKEN_FILE}
    head, worker = (document[f"{kind}_start_ray_commands"] for kind in ("head", "worker"))
    for before, start in (head, worker):
        assert before.startswith(f"chmod 600 {TOKEN_FILE} && ") and before.endswith("ray stop")
        assert re.search(r"RAY_AUTH_MODE=token (\S+=\S+ )*ray start ", start) and "RAY_AUTH_TOKEN" not in start
    assert "--port=6379 --dashboard-host=127.0.0.1" in head[1] and "--address=$RAY_HEAD_IP:6379 " in worker[1]
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml " in head[1]
    # without it Ray 2.60 starts no machine of a list
    assert is_cloud or "RAY_enable_autoscaler_v2=0" in head[1]
    assert f"export {RAY_STOP}={RAY_STOP_S} {SAVING}={SAVING_S};" in head[1].partition("ray start")[0]
