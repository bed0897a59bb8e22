"""What KubeRay's operator refuses though its schema allows it: the rules that concern the manifests of `cluster/`.

The operator checks them only when it runs (ray-operator/controllers/ray/utils/validation.go of v1.7.0), and then writes
an event that few look at. Each rule takes a RayCluster or RayJob as YAML has it, and gives a sentence for each fault.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any

from scaleray.manifests.versions import as_numbers

Manifest = dict[str, Any]
Rule = Callable[[Manifest], Iterator[str]]
LONGEST_CLUSTER_NAME = 53
LONGEST_JOB_NAME = 47
DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
LABEL_KEY = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
TOKEN_SINCE, KUBERNETES_TOKEN_SINCE, PRIORITY_SINCE = "2.52.0", "2.55.0", "2.56.0"
GATED = ("networkPolicy", "tlsOptions", "historyServerOptions")
"""Fields that the operator takes only where an administrator has switched on a feature gate."""
IN_START_PARAMETERS = ("num-cpus", "num-gpus", "memory", "resources")
AUTOSCALER_V2 = "RAY_enable_autoscaler_v2"


def cluster_spec(manifest: Manifest) -> Manifest:
    """The specification of the Ray cluster, or an empty one where a job selects a cluster that is up."""
    spec = manifest.get("spec", {})
    found: Manifest = spec if manifest.get("kind") == "RayCluster" else spec.get("rayClusterSpec") or {}
    return found


def groups(manifest: Manifest) -> list[tuple[str, Manifest]]:
    """Name and specification of the head and of every group of workers."""
    spec = cluster_spec(manifest)
    head = [("head", spec["headGroupSpec"])] if "headGroupSpec" in spec else []
    return head + [(group.get("groupName", "?"), group) for group in spec.get("workerGroupSpecs") or ()]


def pod_of(group: Manifest) -> Manifest:
    """The specification of a group's pods."""
    found: Manifest = (group.get("template") or {}).get("spec") or {}
    return found


def boxes(pod: Manifest) -> list[Manifest]:
    """All containers of a pod: also those that run before the others, and those that are put in for a look."""
    kinds = ("initContainers", "containers", "ephemeralContainers")
    return [box for kind in kinds for box in pod.get(kind) or ()]


def variables(container: Manifest) -> dict[str, Any]:
    """Environment of a container by name."""
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container.get("env") or ()}


def names_are_short(manifest: Manifest) -> Iterator[str]:
    """Names are DNS labels that begin with a letter, and leave room for what the operator adds."""
    name = manifest.get("metadata", {}).get("name", "")
    longest = LONGEST_JOB_NAME if manifest["kind"] == "RayJob" else LONGEST_CLUSTER_NAME
    if len(name) > longest:
        yield f"metadata.name has {len(name)} characters, and at most {longest} are allowed"
    if not DNS_1035.fullmatch(name):
        yield f"metadata.name is {name!r}: small letters, digits and - only, a letter first"


def groups_have_containers(manifest: Manifest) -> Iterator[str]:
    """Head and workers have at least one container."""
    for name, group in groups(manifest):
        if not pod_of(group).get("containers"):
            yield f"{name} has no container"


def resources_stand_once(manifest: Manifest) -> Iterator[str]:
    """Ray's resources stand in rayStartParams or in resources of the group, not in both."""
    for name, group in groups(manifest):
        params = group.get("rayStartParams") or {}
        if group.get("resources") and any(params.get(key) for key in IN_START_PARAMETERS):
            yield f"{name} has resources in rayStartParams and in resources: use one of them"


def labels_stand_outside(manifest: Manifest) -> Iterator[str]:
    """Ray's labels are a field of the group, not a start parameter, and well formed."""
    for name, group in groups(manifest):
        if "labels" in (group.get("rayStartParams") or {}):
            yield f"{name} has labels in rayStartParams: they belong into labels of the group"
        for key, value in (group.get("labels") or {}).items():
            if not LABEL_KEY.fullmatch(key) or not LABEL_VALUE.fullmatch(str(value)):
                yield f"{name} has the label {key}={value}, which is not one of Kubernetes"


def replicas_are_a_range(manifest: Manifest) -> Iterator[str]:
    """minReplicas <= maxReplicas, neither negative, and both there where nothing scales."""
    scales = cluster_spec(manifest).get("enableInTreeAutoscaling")
    for name, group in groups(manifest)[1:]:
        low, high = group.get("minReplicas"), group.get("maxReplicas")
        if not scales and (low is None or high is None):
            yield f"{name} must have minReplicas and maxReplicas without autoscaling"
        if (low is not None and low < 0) or (high is not None and high < 0):
            yield f"{name} has minReplicas {low} and maxReplicas {high}: neither may be negative"
        if low is not None and high is not None and low > high:
            yield f"{name} has minReplicas {low}, more than maxReplicas {high}"


def token_needs_its_ray(manifest: Manifest) -> Iterator[str]:
    """Token authentication is of Ray 2.52, Kubernetes' own tokens of 2.55 and not for jobs."""
    spec = cluster_spec(manifest)
    options = spec.get("authOptions") or {}
    ray = str(spec.get("rayVersion", ""))
    if options.get("mode") == "token" and as_numbers(ray) < as_numbers(TOKEN_SINCE):
        yield f"authOptions.mode is token, and rayVersion {ray or 'missing'}: {TOKEN_SINCE} or newer is needed"
    if not options.get("enableK8sTokenAuth"):
        return
    if options.get("mode") != "token":
        yield "authOptions.enableK8sTokenAuth needs mode: token"
    if as_numbers(ray) < as_numbers(KUBERNETES_TOKEN_SINCE):
        yield f"authOptions.enableK8sTokenAuth needs Ray {KUBERNETES_TOKEN_SINCE} or newer"
    if options.get("secretName"):
        yield "authOptions.enableK8sTokenAuth and secretName exclude each other"
    if manifest["kind"] == "RayJob":
        yield "authOptions.enableK8sTokenAuth is not supported for a RayJob"


def autoscaler_is_stated_once(manifest: Manifest) -> Iterator[str]:
    """The second autoscaler is chosen in autoscalerOptions.version, and its pods are never restarted in place."""
    spec = cluster_spec(manifest)
    version = (spec.get("autoscalerOptions") or {}).get("version")
    heads = pod_of(spec.get("headGroupSpec") or {}).get("containers") or [{}]
    by_variable = variables(heads[0]).get(AUTOSCALER_V2)
    if spec.get("enableInTreeAutoscaling"):
        if version and by_variable is not None:
            yield f"autoscalerOptions.version and the variable {AUTOSCALER_V2} are both set: keep the first"
        for name, group in groups(manifest) if version == "v2" else ():
            if pod_of(group).get("restartPolicy", "Never") != "Never":
                yield f"{name} has a restartPolicy other than Never, with autoscaler v2"
    elif str(by_variable).lower() in ("1", "true"):
        yield f"the variable {AUTOSCALER_V2} needs enableInTreeAutoscaling: true"
    idle = (spec.get("autoscalerOptions") or {}).get("idleTimeoutSeconds")
    if idle is not None and idle < 0:
        yield f"autoscalerOptions.idleTimeoutSeconds is {idle}, and must not be negative"


def second_autoscaler_for_idle_and_priority(manifest: Manifest) -> Iterator[str]:
    """A group's idleTimeoutSeconds and priority are the second autoscaler's; priority is of Ray 2.56."""
    spec = cluster_spec(manifest)
    is_second = (spec.get("autoscalerOptions") or {}).get("version") == "v2"
    for name, group in groups(manifest)[1:]:
        idle = group.get("idleTimeoutSeconds")
        if idle is not None and (idle < 0 or not is_second):
            yield f"{name} has idleTimeoutSeconds {idle}: at least 0, and autoscalerOptions.version v2"
        if not group.get("priority"):
            continue
        if as_numbers(str(spec.get("rayVersion", ""))) < as_numbers(PRIORITY_SINCE) or not is_second:
            yield f"{name} has a priority, which needs Ray {PRIORITY_SINCE} and autoscalerOptions.version v2"


def no_feature_gates(manifest: Manifest) -> Iterator[str]:
    """Nothing that an operator refuses as it is installed."""
    spec = cluster_spec(manifest)
    for name in GATED:
        if name in spec:
            yield f"{name} needs a feature gate of the operator"
    if (spec.get("gcsFaultToleranceOptions") or {}).get("backend") == "rocksdb":
        yield "gcsFaultToleranceOptions.backend rocksdb needs a feature gate of the operator"
    if manifest["kind"] == "RayJob" and "deletionStrategy" in manifest["spec"]:
        yield "deletionStrategy needs a feature gate of the operator"
    for name, group in groups(manifest)[1:]:
        if group.get("suspend"):
            yield f"{name}: to suspend a group needs a feature gate of the operator"


def redis_is_stated_once(manifest: Manifest) -> Iterator[str]:
    """A Redis that keeps the head's state stands in gcsFaultToleranceOptions alone."""
    spec = cluster_spec(manifest)
    head = spec.get("headGroupSpec") or {}
    set_by = variables((pod_of(head).get("containers") or [{}])[0])
    has_options = "gcsFaultToleranceOptions" in spec
    if "RAY_REDIS_ADDRESS" in set_by:
        yield "RAY_REDIS_ADDRESS is set on the head: use gcsFaultToleranceOptions.redisAddress"
    if has_options and ("REDIS_PASSWORD" in set_by or (head.get("rayStartParams") or {}).get("redis-password")):
        yield "Redis's password is set on the head: use gcsFaultToleranceOptions.redisPassword"
    if "REDIS_USERNAME" in set_by or (head.get("rayStartParams") or {}).get("redis-username"):
        yield "Redis's user is set on the head: use gcsFaultToleranceOptions.redisUsername"
    if has_options and (manifest.get("metadata", {}).get("annotations") or {}).get("ray.io/ft-enabled"):
        yield "the annotation ray.io/ft-enabled and gcsFaultToleranceOptions are both set: keep the second"


def job_has_one_cluster(manifest: Manifest) -> Iterator[str]:
    """A job brings its cluster or selects one; one that selects can neither be retried nor suspended."""
    if manifest["kind"] != "RayJob":
        return
    spec = manifest["spec"]
    selector = spec.get("clusterSelector")
    if not spec.get("rayClusterSpec") and not selector:
        yield "one of rayClusterSpec and clusterSelector must be there"
    if selector is not None and not selector.get("ray.io/cluster"):
        yield "clusterSelector has no ray.io/cluster"
    if selector and (spec.get("backoffLimit") or 0) > 0:
        yield "backoffLimit does not go with clusterSelector"
    if selector and spec.get("suspend"):
        yield "suspend does not go with clusterSelector"
    if selector and spec.get("submissionMode") == "SidecarMode":
        yield "clusterSelector does not go with SidecarMode"


def job_is_cleaned_up(manifest: Manifest) -> Iterator[str]:
    """ttlSecondsAfterFinished and suspend need a cluster that goes with its job."""
    if manifest["kind"] != "RayJob":
        return
    spec = manifest["spec"]
    goes, ttl = spec.get("shutdownAfterJobFinishes", False), spec.get("ttlSecondsAfterFinished", 0)
    if ttl < 0:
        yield f"ttlSecondsAfterFinished is {ttl}, and must not be negative"
    if ttl > 0 and not goes:
        yield "ttlSecondsAfterFinished needs shutdownAfterJobFinishes: true"
    if spec.get("suspend") and not goes:
        yield "suspend needs shutdownAfterJobFinishes: true"


def job_deadlines_are_positive(manifest: Manifest) -> Iterator[str]:
    """Deadlines are positive, retries not negative."""
    if manifest["kind"] != "RayJob":
        return
    for name in ("activeDeadlineSeconds", "preRunningDeadlineSeconds"):
        value = manifest["spec"].get(name)
        if value is not None and value <= 0:
            yield f"{name} is {value}, and must be positive"
    if manifest["spec"].get("backoffLimit", 0) < 0:
        yield f"backoffLimit is {manifest['spec']['backoffLimit']}, and must not be negative"


def job_mode_fits(manifest: Manifest) -> Iterator[str]:
    """A job that is submitted by hand is not retried; one submitted from the head has no pod of its own for it."""
    if manifest["kind"] != "RayJob":
        return
    spec = manifest["spec"]
    mode = spec.get("submissionMode", "K8sJobMode")
    if mode == "InteractiveMode" and spec.get("backoffLimit", 0) > 0:
        yield "backoffLimit does not go with InteractiveMode"
    if mode != "SidecarMode":
        return
    for name in ("submitterPodTemplate", "submitterConfig"):
        if name in spec:
            yield f"{name} does not go with SidecarMode"
    if pod_of(cluster_spec(manifest).get("headGroupSpec") or {}).get("restartPolicy", "Never") != "Never":
        yield "the head has a restartPolicy other than Never, with SidecarMode"


def entrypoint_is_one_command(manifest: Manifest) -> Iterator[str]:
    """The operator writes the entrypoint into a shell line of the submitter: `cd /app && train` trains in that pod."""
    if manifest["kind"] != "RayJob":
        return
    lexer = shlex.shlex(str(manifest["spec"].get("entrypoint", "")), posix=False, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        found = sorted({word for word in lexer if set(word) <= set("();<>|&")})
    except ValueError as exc:
        yield f"entrypoint cannot be read by a shell: {exc}"
        return
    if found:
        yield f"entrypoint has {' '.join(found)}, which the submitter's own shell acts on: quote it, or use a script"


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        names_are_short,
        groups_have_containers,
        resources_stand_once,
        labels_stand_outside,
        replicas_are_a_range,
        token_needs_its_ray,
        autoscaler_is_stated_once,
        second_autoscaler_for_idle_and_priority,
        no_feature_gates,
        redis_is_stated_once,
        job_has_one_cluster,
        job_is_cleaned_up,
        job_deadlines_are_positive,
        job_mode_fits,
        entrypoint_is_one_command,
    )
}
