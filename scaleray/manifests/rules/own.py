"""What scaleray asks of a manifest beyond what the operator does: a locked door, one version, room for a training."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from scaleray.manifests import versions
from scaleray.manifests.grace import POD_BY_ITSELF_S, RAY_STOP, RAY_STOP_BY_ITSELF_S, SAVING
from scaleray.manifests.rules.kuberay import Manifest, Rule, boxes, cluster_spec, groups, pod_of, variables
from scaleray.manifests.wanted import has_fixed_tag

METRICS = {"head": ("metrics", "as-metrics", "dash-metrics"), "worker": ("metrics",)}
"""Ports that a PodMonitor reads."""
START_PARAMETERS = frozenset(
    {"num-cpus", "num-gpus", "memory", "resources", "object-store-memory", "dashboard-host", "metrics-export-port"}
)
"""Options of `ray start` that a manifest may have; others are likely to be slips of the pen."""
SIZE = re.compile(r"(\d+)(Ki|Mi|Gi|Ti)?")
FACTOR = {None: 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
SMALLEST_SHM_SHARE = 0.25
PART_OF = "app.kubernetes.io/part-of"


def pods(manifest: Manifest) -> Iterator[tuple[str, Manifest]]:
    """Every pod that a manifest makes: head, workers and who submits."""
    for name, group in groups(manifest):
        yield name, group.get("template") or {}
    if "submitterPodTemplate" in manifest.get("spec", {}):
        yield "submitter", manifest["spec"]["submitterPodTemplate"]


def bytes_of(size: Any) -> int:
    """A size of Kubernetes in bytes; 0 for what is none."""
    found = SIZE.fullmatch(str(size))
    return int(found[1]) * FACTOR[found[2]] if found else 0


def a_token_is_asked_for(manifest: Manifest) -> Iterator[str]:
    """Whoever reaches a head without a token runs code on it. The mode is written out: unset is not token."""
    spec = cluster_spec(manifest)
    if spec and (spec.get("authOptions") or {}).get("mode") != "token":
        yield "authOptions.mode is not token: whoever reaches a pod may run code in it"
    for name, group in groups(manifest):
        for container in boxes(pod_of(group)):
            for variable in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
                if isinstance(variables(container).get(variable), str):
                    yield f"{name} sets {variable} as plain text: KubeRay gives it from a secret"


def images_have_versions(manifest: Manifest) -> Iterator[str]:
    """Images are named by a fixed tag, the same for all pods, with the Ray and Python that the tag says."""
    ray = cluster_spec(manifest).get("rayVersion")
    images = set()
    for name, template in pods(manifest):
        pod = template.get("spec") or {}
        images |= {str(container.get("image", "")) for container in pod.get("containers") or ()}
        for container in boxes(pod):
            image = str(container.get("image", ""))
            if not has_fixed_tag(image):
                yield f"{name} has the image {image!r}: name a tag other than latest, or a digest"
            said = re.search(r"ray(\d+\.\d+\.\d+)", image)
            if said and ray and said[1] != ray:
                yield f"{name} has an image with Ray {said[1]}, and rayVersion is {ray}"
            python = re.search(r"-py(\d+)", image)
            if python and python[1] != versions.PYTHON.replace(".", ""):
                yield f"{name} has an image with Python {python[1]}, and {versions.PYTHON} is asked for"
    if len(images) > 1:
        yield f"the pods have different images: {', '.join(sorted(images))}"
    if ray is not None and ray != versions.RAY:
        yield f"rayVersion is {ray}, and scaleray runs with {versions.RAY}"


def pods_have_no_rights(manifest: Manifest) -> Iterator[str]:
    """No root, no token of Kubernetes, nothing of the host."""
    for name, template in pods(manifest):
        pod = template.get("spec") or {}
        context = pod.get("securityContext") or {}
        if context.get("runAsNonRoot") is not True or not context.get("runAsUser"):
            yield f"{name} may run as root: securityContext.runAsNonRoot and runAsUser"
        if (context.get("seccompProfile") or {}).get("type") != "RuntimeDefault":
            yield f"{name} has no seccompProfile RuntimeDefault"
        if pod.get("automountServiceAccountToken") is not False:
            yield f"{name} gets a token of Kubernetes, which a training does not need"
        for key in ("hostNetwork", "hostPID", "hostIPC"):
            if pod.get(key):
                yield f"{name} has {key}"
        for volume in pod.get("volumes") or ():
            if "hostPath" in volume:
                yield f"{name} mounts {volume['hostPath'].get('path')} of the host"


def containers_have_no_rights(manifest: Manifest) -> Iterator[str]:
    """A root that cannot be written, no capabilities, no more rights than it starts with."""
    for name, template in pods(manifest):
        for container in boxes(template.get("spec") or {}):
            context = container.get("securityContext") or {}
            if context.get("allowPrivilegeEscalation") is not False or context.get("privileged"):
                yield f"{name} may gain rights: securityContext.allowPrivilegeEscalation: false"
            if context.get("readOnlyRootFilesystem") is not True:
                yield f"{name} can write its image: securityContext.readOnlyRootFilesystem: true"
            if (context.get("capabilities") or {}).get("drop") != ["ALL"]:
                yield f"{name} keeps capabilities: drop: [ALL]"
            if context.get("runAsUser") == 0:
                yield f"{name} runs as root"
            if context.get("runAsNonRoot") is False:
                yield f"{name} may run as root: securityContext.runAsNonRoot"


def what_is_written_has_a_place(manifest: Manifest) -> Iterator[str]:
    """With a read-only root, Ray's session, the home folder and shared memory are volumes, and every mount has one."""
    for name, template in pods(manifest):
        pod = template.get("spec") or {}
        volumes = {volume["name"]: volume for volume in pod.get("volumes") or ()}
        for container in boxes(pod):
            for missing in sorted({mount["name"] for mount in container.get("volumeMounts") or ()} - set(volumes)):
                yield f"{name} mounts the volume {missing}, which the pod does not have"
        for container in pod.get("containers") or ():
            mounts = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts") or ()}
            wanted = (
                ("/tmp", "/home/ray") if name == "submitter" else ("/tmp", "/home/ray", "/dev/shm", "/mnt/scaleray")
            )
            for path in wanted:
                if path not in mounts:
                    yield f"{name} has no volume at {path}"
            if name == "submitter" or mounts.get("/dev/shm") not in volumes:
                continue
            shm = volumes[mounts["/dev/shm"]].get("emptyDir") or {}
            memory = bytes_of((container.get("resources", {}).get("limits") or {}).get("memory"))
            if shm.get("medium") != "Memory" or bytes_of(shm.get("sizeLimit")) < SMALLEST_SHM_SHARE * memory:
                yield f"{name} has too little shared memory: a quarter of its {memory / 2**30:.0f} GiB, in memory"


def shares_are_stated(manifest: Manifest) -> Iterator[str]:
    """CPUs and memory are asked for, memory is limited to just that, and GPUs stand among the limits alone."""
    for name, template in pods(manifest):
        pod = template.get("spec") or {}
        # one that is put in for a look cannot ask for any
        for container in (*(pod.get("initContainers") or ()), *(pod.get("containers") or ())):
            resources = container.get("resources") or {}
            requests, limits = resources.get("requests") or {}, resources.get("limits") or {}
            if not requests.get("cpu") or not bytes_of(requests.get("memory")):
                yield f"{name} does not say which CPUs and memory it needs"
            if requests.get("memory") != limits.get("memory"):
                yield f"{name} may be ended when the node's memory is full: requests.memory == limits.memory"
            unknown = {*requests, *limits} - {"cpu", "memory", "nvidia.com/gpu", "ephemeral-storage"}
            if unknown:
                yield f"{name} asks for {', '.join(sorted(unknown))}"
            gpus = limits.get("nvidia.com/gpu")
            if gpus is not None and not (str(gpus).isdigit() and int(gpus) > 0):
                yield f"{name} asks for {gpus} GPUs"
            if gpus is None and "nvidia.com/gpu" in requests:
                yield f"{name} asks for GPUs among its requests: Kubernetes wants them among the limits"
            if gpus is not None and not pod.get("tolerations"):
                yield f"{name} has no toleration for nodes with GPUs"


def parameters_of_ray_exist(manifest: Manifest) -> Iterator[str]:
    """Start parameters are free text to the schema, and Ray ends a pod that has one it does not know."""
    for name, group in groups(manifest):
        for key in sorted(set(group.get("rayStartParams") or {}) - START_PARAMETERS):
            yield f"{name} has the start parameter {key}, which is not known here"


def pods_are_selected(manifest: Manifest) -> Iterator[str]:
    """Policy and monitoring select pods by a label; a pod without it stands outside."""
    for name, template in pods(manifest):
        if ((template.get("metadata") or {}).get("labels") or {}).get(PART_OF) != "scaleray":
            yield f"{name} has no label {PART_OF}: scaleray, so no network policy holds for it"
    for name, group in groups(manifest):
        wanted = METRICS["head" if name == "head" else "worker"]
        containers = pod_of(group).get("containers") or [{}]
        ports = {port.get("name") for port in containers[0].get("ports") or ()}
        for missing in sorted(set(wanted) - ports):
            yield f"{name} has no port named {missing}, which the PodMonitor reads"


def a_training_has_time_to_save(manifest: Manifest) -> Iterator[str]:
    """The head, where the driver runs, says how long saving may take: less than Ray waits before it kills, and Ray no
    longer than Kubernetes."""
    for name, group in groups(manifest)[:1]:
        pod = pod_of(group)
        given = variables((pod.get("containers") or [{}])[0])
        if SAVING not in given:
            yield f"{name} does not set {SAVING}: a training that is asked to leave would have 2.5 s to save"
        saving, stop = _seconds(given.get(SAVING, 2.5)), _seconds(given.get(RAY_STOP, RAY_STOP_BY_ITSELF_S))
        whole = _seconds(pod.get("terminationGracePeriodSeconds", POD_BY_ITSELF_S))
        if saving is None or stop is None or whole is None:
            yield f"{name} has {SAVING}, {RAY_STOP} or terminationGracePeriodSeconds that is no number of seconds"
            continue
        if saving >= stop:
            yield f"{name} has {SAVING} {saving:g}, and Ray kills after {stop:g} s: less than {RAY_STOP}"
        if stop > whole:
            yield f"{name} has {RAY_STOP} {stop:g}, more than its terminationGracePeriodSeconds {whole:g}"


def _seconds(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def jobs_end(manifest: Manifest) -> Iterator[str]:
    """A job that is tried again goes on, waits for room no longer than it says, and leaves nothing behind."""
    if manifest["kind"] != "RayJob":
        return
    spec = manifest["spec"]
    for name in ("preRunningDeadlineSeconds", "activeDeadlineSeconds"):
        if name not in spec:
            yield f"{name} is missing: the job may hold its pods for ever"
    if not spec.get("shutdownAfterJobFinishes"):
        yield "shutdownAfterJobFinishes is not true: the cluster stays when the job is over"
    if spec.get("backoffLimit") and "--resume auto" not in spec.get("entrypoint", ""):
        yield "backoffLimit without --resume auto: a second try would train from the beginning"
    if not re.search(r"(python -m )?scaleray [a-z]+", spec.get("entrypoint", "")):
        yield "entrypoint is no command of scaleray"


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        a_token_is_asked_for,
        images_have_versions,
        pods_have_no_rights,
        containers_have_no_rights,
        what_is_written_has_a_place,
        shares_are_stated,
        parameters_of_ray_exist,
        pods_are_selected,
        a_training_has_time_to_save,
        jobs_end,
    )
}
