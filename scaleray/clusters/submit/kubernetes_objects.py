"""Kubernetes objects of a submission: a RayJob, and a ConfigMap with the uploaded code."""

import base64
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from scaleray.clusters.manifests.cluster_spec import NEEDS_KUBERAY, ClusterSpec
from scaleray.clusters.manifests.file_versions import as_numbers
from scaleray.clusters.manifests.written_files import files
from scaleray.clusters.submit.clusters import KubernetesCluster
from scaleray.clusters.submit.programs import run
from scaleray.errors import ClusterError, ConfigError

Manifest = dict[str, Any]
LONGEST_JOB_NAME = 47
"""Maximum characters of a RayJob's name, to which the operator appends."""
SUBMITTED = {"app.kubernetes.io/managed-by": "scaleray-submit"}
COMMAND = "scaleray/command"
"""Annotation of a RayJob: the submitted command."""
QUEUE = "kueue.x-k8s.io/queue-name"
PACKAGE_AT = "/opt/scaleray-package"
LARGEST_PACKAGE = 1_000_000
"""Maximum bytes of a package in base 64, since a ConfigMap holds 1 MiB."""
CODE_AT = "/mnt/scaleray/code"
"""Folder for the unpacked code, on the volume that all pods share."""
START = """\
# unpacks the code on the shared volume, and runs the given command in it
set -eu
mkdir -p "{code}"
python -m zipfile -e "{package}/working_dir.zip" "{code}"
cd "{code}"
exec python -m "$@" {rest}
"""


@dataclass(frozen=True)
class Objects:
    """Objects to create. job: the RayJob. package: the ConfigMap. others: further objects of the user's manifest."""

    job: Manifest
    package: Manifest
    others: tuple[Manifest, ...] = ()

    @property
    def name(self) -> str:
        """The job's name."""
        found: str = self.job["metadata"]["name"]
        return found

    @property
    def images(self) -> list[str]:
        """Images of the job's pods."""
        return sorted({str(box.get("image", "")) for _, group in groups(self.job) for box in _boxes(group)})

    @property
    def ray_version(self) -> str:
        """Ray version of the image according to the manifest; empty if not given."""
        return str((self.job["spec"].get("rayClusterSpec") or {}).get("rayVersion", ""))

    @property
    def python_version(self) -> str:
        """Python version in the images' tags, such as 3.11; empty if not given."""
        found = next((m for image in self.images if (m := re.search(r"-py(\d)(\d+)", image))), None)
        return f"{found[1]}.{found[2]}" if found else ""

    def as_yaml(self) -> str:
        """All objects, in kubectl's format."""
        return yaml.safe_dump_all([*self.others, self.package, self.job], sort_keys=False)


def kubernetes_name(name: str) -> str:
    """A name in the form that Kubernetes requires: lower-case letters, digits and dashes, short enough for a RayJob."""
    kept = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    kept = kept if kept[:1].isalpha() else f"job-{kept}"
    if len(kept) <= LONGEST_JOB_NAME:
        return kept
    # the time at its end distinguishes jobs of one config
    return f"{kept[:20].rstrip('-')}-{kept[-(LONGEST_JOB_NAME - 21) :].lstrip('-')}"


def objects_of(
    cluster: KubernetesCluster,
    *,
    name: str,
    command: Sequence[str],
    package: bytes,
    secret_names: Sequence[str] = (),
    folder: Path,
) -> Objects:
    """Return the objects of a submission. command: of scaleray, such as train -c FILE. package: the code as a zip file.
    folder: base of a relative path to the cluster's manifest. Raises UsageError.
    """
    encoded = base64.b64encode(package).decode()
    if len(encoded) > LARGEST_PACKAGE:
        raise ConfigError.problem(
            "--working-dir",
            f"needs {len(package) / 2**20:.1f} MiB when packed, but Kubernetes stores code in a ConfigMap, which "
            f"holds at most {LARGEST_PACKAGE * 3 // 4 / 2**20:.1f} MiB",
            "exclude files in .rayignore, or put the code into an image based on cluster/image",
        )
    job, others = _job_and_others(cluster, folder)
    _named(job, cluster, name, command)
    _entered(job, name, command)
    for _, group in groups(job):
        for box in _boxes(group):
            known = [one for one in box.get("env") or () if one.get("name") not in secret_names]
            box["env"] = [*known, *(_from_secret(one, cluster.secret) for one in secret_names)]
    head = (job["spec"].get("rayClusterSpec") or {}).get("headGroupSpec") or {}
    pod_of(head).setdefault("volumes", []).append({"name": "package", "configMap": {"name": name}})
    for box in _boxes(head)[:1]:
        mount = {"name": "package", "mountPath": PACKAGE_AT, "readOnly": True}
        box.setdefault("volumeMounts", []).append(mount)
    # the words of the entrypoint pass through three shells and must be plain; the user's words pass through this file
    start = START.format(code=f"{CODE_AT}/{name}", package=PACKAGE_AT, rest=shlex.join(command[1:]))
    return Objects(job, _config_map(name, start, encoded), tuple(others))


def groups(manifest: Manifest) -> list[tuple[str, Manifest]]:
    """Name and specification of the head and of each group of workers."""
    spec = _ray_cluster(manifest)
    head = [("head", spec["headGroupSpec"])] if "headGroupSpec" in spec else []
    return head + [(group.get("groupName", "?"), group) for group in spec.get("workerGroupSpecs") or ()]


def pod_of(group: Manifest) -> Manifest:
    """The specification of a group's pods."""
    found: Manifest = (group.get("template") or {}).get("spec") or {}
    return found


def _ray_cluster(manifest: Manifest) -> Manifest:
    """Specification of the Ray cluster; empty if the job selects an existing one."""
    spec = manifest.get("spec", {})
    found: Manifest = spec if manifest.get("kind") == "RayCluster" else spec.get("rayClusterSpec") or {}
    return found


def too_new_fields(manifest: Manifest, kuberay: str) -> dict[str, str]:
    """Fields of a manifest that this release of the operator does not support, with the release that introduced
    them."""
    found = {}
    for path, since in NEEDS_KUBERAY.items():
        node: object = manifest
        for part in path.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        if node is not None and as_numbers(since) > as_numbers(kuberay):
            found[path] = since
    return found


def refuse_unsafe(objects: Objects, *, kuberay: str) -> None:
    """Raise ClusterError if the operator is too old for a job, or if its pods do not require a token."""
    if newer := too_new_fields(objects.job, kuberay):
        oldest = max(newer.values(), key=as_numbers)
        raise ClusterError.problem(
            "The KubeRay operator",
            f"{kuberay} does not support {', '.join(newer)}, which this job uses",
            f"upgrade the operator to {oldest} or newer, or set a manifest for {kuberay} as the cluster's `manifest`",
        )
    spec = _ray_cluster(objects.job)
    if spec and (spec.get("authOptions") or {}).get("mode") != "token":
        raise ClusterError.problem(
            "The RayJob",
            f"{objects.name} does not set authOptions.mode to token: anyone who can reach a pod could run code in it",
            "set spec.rayClusterSpec.authOptions to {mode: token} in the manifest",
        )


def _job_and_others(cluster: KubernetesCluster, folder: Path) -> tuple[Manifest, list[Manifest]]:
    """The unmodified RayJob, and the other objects of the user's manifest."""
    if cluster.manifest is None:
        given = {name: value for name, value in (("gpus", cluster.gpus), ("kuberay", cluster.kuberay)) if value}
        image = {"image": cluster.image, "cpu_image": cluster.image} if cluster.image else {}
        path = f"kubernetes/job-{'gpu' if cluster.gpus else 'cpu'}/rayjob.yaml"
        text = files(ClusterSpec(nodes=cluster.nodes, **given, **image), ["kubernetes"])[path]
        documents, source = list(yaml.safe_load_all(text)), path
    else:
        source = str((folder / Path(cluster.manifest).expanduser()).resolve())
        documents = _documents(Path(source))
    jobs = [one for one in documents if one.get("kind") == "RayJob"]
    if len(jobs) != 1:
        raise ConfigError(
            "manifest", source, f"it must contain one RayJob, not {len(jobs)}", "for example cluster/kubernetes/job-gpu"
        )
    return jobs[0], [one for one in documents if one.get("kind") != "RayJob"]


def _documents(path: Path) -> list[Any]:
    try:
        if path.is_dir():
            built = run(["kubectl", "kustomize", str(path)])
            if built.code:
                raise ConfigError.problem("manifest", f"{path} cannot be built by kustomize: {built.problem}")
            text = built.out
        else:
            text = path.read_text()
        return [one for one in yaml.safe_load_all(text) if isinstance(one, dict)]
    except OSError as exc:
        raise ConfigError.problem("manifest", f"{path} cannot be read: {exc.strerror}") from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise ConfigError.problem("manifest", f"{path} is not YAML: {' '.join(str(exc).split())[:200]}") from exc


def _named(job: Manifest, cluster: KubernetesCluster, name: str, command: Sequence[str]) -> None:
    about = job.setdefault("metadata", {})
    about["name"] = name
    about["namespace"] = cluster.namespace
    about["labels"] = {**(about.get("labels") or {}), **SUBMITTED}
    about["annotations"] = {**(about.get("annotations") or {}), COMMAND: shlex.join(["scaleray", *command])}
    if cluster.queue:
        about["labels"][QUEUE] = cluster.queue
        job["spec"]["suspend"] = True  # Kueue starts it once there is room for all of its pods


def _entered(job: Manifest, name: str, command: Sequence[str]) -> None:
    """Set the command. A retried training resumes; all other commands are not retried."""
    resumes = command[0] == "train"
    words = ["bash", f"{PACKAGE_AT}/start.sh", "scaleray", command[0], *(["--resume", "auto"] if resumes else [])]
    if resumes and any(one == "--resume" or one.startswith("--resume=") for one in command):
        words = words[:-2]
    job["spec"]["entrypoint"] = shlex.join(words)
    if "--resume" not in words:
        job["spec"]["backoffLimit"] = 0


def _config_map(name: str, start: str, package: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": {**SUBMITTED, "app.kubernetes.io/part-of": "scaleray"}},
        "data": {"start.sh": start},
        "binaryData": {"working_dir.zip": package},
    }


def _from_secret(variable: str, secret: str) -> Manifest:
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": variable}}}


def _boxes(group: Manifest) -> list[Manifest]:
    return list(pod_of(group).get("containers") or ())


def service_names(objects: Objects) -> Iterator[tuple[str, str]]:
    """Kind and name of objects that the job's pods need but the manifest lacks."""
    held = {(one.get("kind", ""), (one.get("metadata") or {}).get("name", "")) for one in objects.others}
    wanted = {("NetworkPolicy", "scaleray")}
    for _, group in groups(objects.job):
        pod = pod_of(group)
        if account := pod.get("serviceAccountName"):
            wanted.add(("ServiceAccount", account))
        for volume in pod.get("volumes") or ():
            if claim := (volume.get("persistentVolumeClaim") or {}).get("claimName"):
                wanted.add(("PersistentVolumeClaim", claim))
    has_policy = any(kind == "NetworkPolicy" for kind, _ in held)
    yield from sorted(one for one in wanted - held if not (one[0] == "NetworkPolicy" and has_policy))
