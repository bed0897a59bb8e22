"""The axes along which workers are neighbours: data (`dp`), shards within it, and the parts of a model."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from scaleray.config import RunConfig


def build_mesh(config: RunConfig, strategy: str, world_size: int, device_type: str) -> DeviceMesh:
    """The mesh of all workers. Collective. Axes: `dp`; `replicate` and `shard` for HSDP; `dp` and `tp` or `pp`.

    The axis with the most communication is the innermost, whose workers are neighbours on a node.
    """
    # DTensor keeps the results of its planning by the layout of a mesh, process groups included: in a process that has
    # left its group and joined another, as between two sizes of `verify`, they would name groups that are gone
    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    parts = config.model_parallel_size
    if strategy == "tensor":
        return init_device_mesh(device_type, (world_size // parts, parts), mesh_dim_names=("dp", "tp"))
    if strategy == "pipeline":
        return init_device_mesh(device_type, (world_size // parts, parts), mesh_dim_names=("dp", "pp"))
    if strategy == "fsdp" and config.fsdp.replicas > 1:
        shape = (config.fsdp.replicas, world_size // config.fsdp.replicas)
        return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device_type, (world_size,), mesh_dim_names=("dp",))
