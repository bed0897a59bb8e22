"""The user's requirements for a cluster, and the values derived from them for all files."""

import re
from dataclasses import dataclass, field
from typing import Any

from scaleray.clusters.manifests import file_versions, grace
from scaleray.clusters.manifests.cloud_machines import Machine, machine_of
from scaleray.clusters.manifests.file_versions import as_numbers
from scaleray.errors import UsageError

LEFT_TO_THE_SYSTEM = 0.9
"""Share of a node's CPUs and memory that a pod requests; the rest is for kubelet and drivers."""
NEEDS_KUBERAY = {
    "spec.authOptions": "1.5.1",
    "spec.rayClusterSpec.authOptions": "1.5.1",
    "spec.preRunningDeadlineSeconds": "1.6.0",
}
"""Fields of the manifests that older operators do not support, and the release that introduced them."""


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """A cluster as the user specifies it. gpus: GPUs per node and their type. image, cpu_image: names that the nodes
    can pull. kuberay: release of the installed operator."""

    gpus: str = "8xh100"
    nodes: int = 2
    image: str = file_versions.IMAGE
    cpu_image: str = file_versions.CPU_IMAGE
    kuberay: str = file_versions.KUBERAY
    machine: Machine = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "machine", machine_of(self.gpus))
        if self.nodes < 1:
            raise UsageError("--nodes", self.nodes, "a cluster needs at least one node")
        for name, image in (("--image", self.image), ("--cpu-image", self.cpu_image)):
            if not has_fixed_tag(image):
                raise UsageError(
                    name,
                    image,
                    "it must name a tag other than latest, or a digest",
                    f"for example REGISTRY/{file_versions.IMAGE}; with latest, two nodes may run different images",
                )
        check_kuberay(self.kuberay)

    def names(self) -> dict[str, Any]:
        """Values for the templates, by name."""
        machine = self.machine
        return {
            "v": file_versions,
            "grace": grace,
            "machine": machine,
            "nodes": self.nodes,
            "image": self.image,
            "cpu_image": self.cpu_image,
            "workers": self.nodes * machine.gpus,
            "cpus": max(1, int(machine.cpus * LEFT_TO_THE_SYSTEM)),
            "memory_gib": int(machine.memory_gib * LEFT_TO_THE_SYSTEM),
            # a training's batches are small in comparison; Ray's object store takes 30 % of a pod's memory by default
            "shm_gib": max(1, int(machine.memory_gib * LEFT_TO_THE_SYSTEM * 0.3)),
        }


def has_fixed_tag(image: str) -> bool:
    """Whether an image is specified by digest or by a tag other than latest."""
    if "@" in image:
        return bool(re.search(r".@sha256:[0-9a-f]{64}$", image))
    _, colon, tag = image.rpartition("/")[2].partition(":")
    return bool(colon) and bool(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", tag)) and tag != "latest"


def check_kuberay(version: str) -> None:
    """Raise UsageError for an operator that does not support the manifests."""
    if len(as_numbers(version)) < 2:
        raise UsageError("--kuberay", version, f"it must be a release such as {file_versions.KUBERAY}")
    newer = {name: since for name, since in NEEDS_KUBERAY.items() if as_numbers(since) > as_numbers(version)}
    if newer:
        oldest = max(newer.values(), key=as_numbers)
        raise UsageError(
            "--kuberay",
            version,
            "it does not support " + ", ".join(f"{name} (since {since})" for name, since in newer.items()),
            f"upgrade the operator to {oldest} or newer; without authOptions, anyone who can reach a pod can run "
            "code in it",
        )
