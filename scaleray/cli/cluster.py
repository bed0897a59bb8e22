"""`scaleray cluster`: the files and processes of the clusters that trainings run on."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cyclopts import App

from scaleray.cli.options import Flag, Json
from scaleray.cli.output import print_json, with_stages

if TYPE_CHECKING:
    from scaleray.clusters.local_clusters import LocalCluster

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
    from scaleray.clusters.manifests.written_files import write_cluster_files

    given = {"gpus": gpus, "nodes": nodes, "image": image, "cpu_image": cpu_image, "kuberay": kuberay}
    stated: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    lines = write_cluster_files(folder, kind=kind, check=check, overwrite=overwrite, **stated)
    for line in lines:
        print(line)
    if check:
        print(f"{len(lines)} files differ from what would be written" if lines else "all files are as written")
        return 1 if lines else 0
    print(f"{len(lines)} files written; what to do next: docs/cluster.md")
    return 0


def up(
    name: str = "local",
    *,
    nodes: int = 1,
    cpus: int | None = None,
    port: int | None = None,
    block: Flag = False,
    json: Json = False,
) -> int:
    """Start a Ray cluster of several nodes on this machine, which runs until `scaleray cluster down`.

    It listens on 127.0.0.1 alone and wants the token of this user.

    Parameters
    ----------
    name
        Its name, of at most 12 letters, to have several at once.
    nodes
        How many nodes it has, its head among them.
    cpus
        CPUs that each node hands out, which may be more than the machine has; by default one more than that in all.
    port
        Port of the head on 127.0.0.1; by default one that is free.
    block
        Stay until Ctrl-C, and end the cluster then.
    """
    from scaleray.clusters.local_clusters import cluster_up
    from scaleray.common.guarded import ending_like_ctrl_c

    with ending_like_ctrl_c():
        with with_stages():
            cluster = cluster_up(name, nodes=nodes, cpus=cpus, port=port)
        if not block:
            _show([cluster], json=json)
            return 0
        with contextlib.suppress(KeyboardInterrupt), cluster:
            _show([cluster], json=json)
            print("\nCtrl-C ends it.", flush=True)
            signal.pause()
    return 0


def status(name: str | None = None, *, export: Flag = False, json: Json = False) -> int:
    """Show the clusters of `scaleray cluster up` with their nodes and how to connect. Exit code 1 where a node is lost,
    or none is up.

    Parameters
    ----------
    name
        One of them alone.
    export
        Print only what lets programs of this shell find it: eval "$(scaleray cluster status --export)".
    """
    from scaleray.clusters.local_clusters import cluster_status

    found = cluster_status(name)
    if export and found:
        print(_export(found[0]))
        return 0
    if not found and not json:
        print("no cluster is up on this machine" if name is None else f"no cluster {name} is up on this machine")
        return 1
    _show(found, json=json)
    return 0 if found and all(cluster.is_up for cluster in found) else 1


def down(name: str = "local", *, json: Json = False) -> int:
    """End a cluster of `scaleray cluster up` with everything that it started, and nothing else.

    Parameters
    ----------
    name
        Which one.
    """
    from scaleray.clusters.local_clusters import cluster_down

    with with_stages():
        was_up = cluster_down(name) is not None
    if json:
        print_json({"name": name, "was_up": was_up})
    else:
        print(f"cluster {name} is down" if was_up else f"no cluster {name} is up on this machine")
    return 0


def _show(clusters: list[LocalCluster], *, json: bool) -> None:
    if json:
        print_json({"clusters": [dataclasses.asdict(cluster) for cluster in clusters]})
        return
    for number, cluster in enumerate(clusters):
        if number:
            print()
        print(f"cluster {cluster.name}: {cluster.address}, dashboard {cluster.dashboard}")
        for node in cluster.nodes:
            has = ", ".join(f"{count:g} {kind}{'s' if count != 1 else ''}" for kind, count in node.resources.items())
            print(f"  {node.name:<8} {node.state:<9} {has or f'see {node.log}'}")
        print(f"\n  {_export(cluster)}\n  scaleray train -c FILE          # then, in this shell")
        print(f"  scaleray submit -c FILE --to {cluster.dashboard}\n  scaleray cluster down {cluster.name}")


def _export(cluster: LocalCluster) -> str:
    return "export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in cluster.environment().items())


cluster_app = App(
    name="cluster", help="Start a cluster on this machine; write files to start one elsewhere.", help_format="plaintext"
)
for command in (up, status, down, write):
    cluster_app.command(command)
