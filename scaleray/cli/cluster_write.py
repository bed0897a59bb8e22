"""`scaleray cluster write`: the files of every kind of cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

Kind = Literal["all", "local", "kubernetes", "slurm", "ray-up", "image", "skypilot"]
FOLDER = Path("cluster")


def write(
    *,
    kind: Kind = "all",
    gpus: str | None = None,
    nodes: int | None = None,
    image: str | None = None,
    cpu_image: str | None = None,
    kuberay: str | None = None,
    folder: Path = FOLDER,
    check: bool = False,
    overwrite: bool = False,
) -> int:
    """Write the files that start a cluster, all from one table of versions and sizes.

    Parameters
    ----------
    kind
        System that the cluster runs on; by default all of them.
    gpus
        GPUs of a node and their kind; by default 8xh100.
    nodes
        Nodes with GPUs; by default 2.
    image
        Image as the nodes pull it, with a tag other than latest; by default the name that cluster/image gives it.
    cpu_image
        The same for nodes without GPUs.
    kuberay
        Release of the KubeRay operator that runs on the Kubernetes cluster.
    folder
        Where to write; each kind has a folder in it.
    check
        Only compare the files there with those that would be written. Exit code 1 where they differ.
    overwrite
        Replace files that differ.
    """
    from scaleray.manifests.files import write_cluster_files

    given = {"gpus": gpus, "nodes": nodes, "image": image, "cpu_image": cpu_image, "kuberay": kuberay}
    stated: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    lines = write_cluster_files(folder, kind=kind, check=check, overwrite=overwrite, **stated)
    for line in lines:
        print(line)
    if check:
        print(f"{len(lines)} files are not what would be written" if lines else "all files are what would be written")
        return 1 if lines else 0
    print(f"{len(lines)} files written; what to do next: docs/cluster.md")
    return 0
