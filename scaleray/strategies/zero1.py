"""ZeRO-1: data parallel training in which optimizer work and state are divided, with each parameter on one rank."""

import dataclasses
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from scaleray.config import RunConfig
from scaleray.errors import WorkloadError
from scaleray.profiling.collectives import BROADCAST
from scaleray.strategies import ddp
from scaleray.strategies.contract.parallel import Parallel
from scaleray.strategies.traffic.flat_broadcast import broadcast
from scaleray.strategies.traffic.ledger import Ledger


def apply(model: nn.Module, mesh: DeviceMesh | None, config: RunConfig, workload: Any) -> Parallel:
    """DDP in which the optimizer updates about 1/n of the parameters on each rank, and the other ranks receive its
    results. Collective.

    Works with every optimizer that updates a parameter from its own gradient and state. Gradients stay whole on every
    rank (they are reduced as in DDP). Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5.1 (P_os)."""
    parallel = ddp.apply(model, mesh, config, workload)
    assert mesh is not None  # ddp has checked it
    group = mesh.get_group("dp")
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    trained = [p for p in model.parameters() if p.requires_grad]
    owners = share_out([p.numel() * p.element_size() for p in trained], world_size)
    owner_of = {id(p): owner for p, owner in zip(trained, owners, strict=True)}
    all_ids = {id(p) for p in model.parameters()}
    parts = [[p for p, owner in zip(trained, owners, strict=True) if owner == r] for r in range(world_size)]
    bucket_bytes = config.strategy.bucket_size_mib * 2**20
    sent, ledger = 0.0, Ledger()
    entry = ledger.entry("dp", world_size, BROADCAST)

    def owns(parameter: nn.Parameter) -> bool:
        if id(parameter) not in all_ids:
            raise WorkloadError.problem(
                "optimizer()",
                f"has a parameter of shape {list(parameter.shape)} that the model does not register: "
                "zero1 shards only parameters of the model",
                "register it in the model, or use --strategy.name ddp",
            )
        return owner_of.get(id(parameter), 0) == rank

    def send_updates(step: int) -> None:
        nonlocal sent
        parallel.after_update(step)
        for parameter in trained:  # the optimizer's zero_grad knows this rank's part only
            parameter.grad = None
        for owner, part in enumerate(parts):
            num_bytes = broadcast(part, group, source=owner, bucket_bytes=bucket_bytes, entry=entry)
            sent += num_bytes if owner == rank else 0

    return dataclasses.replace(
        parallel,
        owns=owns,
        after_update=send_updates,
        is_partitioned=True,
        bytes_sent=lambda: parallel.bytes_sent() + sent,
        collectives=lambda: [*parallel.collectives(), *ledger.rows()],
    )


def share_out(sizes: list[int], num_parts: int) -> list[int]:
    """Part number of each item, chosen so that the sums of the parts are similar: the largest items come first, each in
    the lightest part.

    No part exceeds 4/3 - 1/(3 num_parts) of the smallest possible maximum. Source: Graham 1969, doi:10.1137/0117039."""
    weights, parts = [0] * num_parts, [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        parts[item] = min(range(num_parts), key=lambda part: (weights[part], part))
        weights[parts[item]] += sizes[item]
    return parts
