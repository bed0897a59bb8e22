"""`scaleray cluster`: write a cluster's files, and run clusters on this machine."""

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
from scaleray.common.printed import quantity

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
    """Write the files that start a cluster, all from a single table of versions and sizes.

    Parameters
    ----------
    kind
        Type of cluster; by default all.
    gpus
        GPUs per node and their type; by default 8xh100.
    nodes
        Number of nodes with GPUs; by default 2.
    image
        Name of the image for the nodes, with a tag other than latest; by default the one built by cluster/image.
    cpu_image
        Name of the image for nodes without GPUs.
    kuberay
        Release of the KubeRay operator on the Kubernetes cluster.
    folder
        Folder to write to; each type gets a subfolder.
    check
        Only compare the existing files with the ones that would be written. Exit code 1 if they differ.
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
        print(f"{len(lines)} files differ from the generated ones" if lines else "all files are up to date")
        return 1 if lines else 0
    print(f"{quantity(len(lines), 'file')} written; next steps: docs/cluster.md")
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

    It listens only on 127.0.0.1 and requires this user's token.

    Parameters
    ----------
    name
        Name of the cluster, at most 12 characters; needed to run several at once.
    nodes
        Number of nodes, including the head.
    cpus
        CPUs that each node offers, possibly more than the machine has; by default enough that all nodes together
        offer more than the machine has.
    port
        Port of the head on 127.0.0.1; by default a free one.
    block
        Stay in the foreground until Ctrl-C, then end the cluster.
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
    """Show the clusters started by `scaleray cluster up`, with their nodes and how to connect. Exit code 1 if a node is
    lost or no cluster is up.

    Parameters
    ----------
    name
        Show only this cluster.
    export
        Print only the settings that connect this shell's programs: eval "$(scaleray cluster status --export)".
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
    """End a cluster started by `scaleray cluster up` and all of its processes, but nothing else.

    Parameters
    ----------
    name
        Name of the cluster.
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
