"""`scaleray cluster up`, `status` and `down` as functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scaleray.installed import names_what_is_missing

if TYPE_CHECKING:
    from scaleray.launch.cluster.local_clusters import LocalCluster


@names_what_is_missing
def cluster_up(
    name: str = "local", *, nodes: int = 1, cpus: int | None = None, port: int | None = None
) -> LocalCluster:
    """Start a Ray cluster of several nodes on this machine, which runs until `cluster_down`; with `with`, until the end
    of the context.

    name: of at most 12 letters, to have several at once. nodes: its head among them. cpus: that each node hands out,
    which may be more than the machine has; None shares out one more than it has. port: of the head on 127.0.0.1; None
    takes one that is free. Raises UsageError.
    """
    from scaleray.launch.cluster import local_clusters

    return local_clusters.up(name, num_nodes=nodes, cpus=cpus, port=port)


@names_what_is_missing
def cluster_status(name: str | None = None) -> list[LocalCluster]:
    """The clusters that this user has started on this machine, or that of this name, as they are now."""
    from scaleray.launch.cluster import local_clusters, local_state

    found = map(local_clusters.status, local_state.names() if name is None else [name])
    return [cluster for cluster in found if cluster is not None]


@names_what_is_missing
def cluster_down(name: str = "local") -> bool:
    """End a cluster of this machine and everything that it started; False where none of this name is up."""
    from scaleray.launch.cluster import local_clusters

    return local_clusters.down(name) is not None
