"""Sharded training for tests of what must work on shards, whatever else the fsdp strategy does.

Import it where workers need `strategy.name: fsdp`: it adds nothing where the table has that strategy.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

from scaleray.strategies import STRATEGIES
from scaleray.strategies.parallel import Parallel, full


def shard(model: Any, mesh: Any, config: Any, workload: Any) -> Parallel:
    """torch's fully_shard on the whole model as one unit."""
    module = fully_shard(model, mesh=mesh)
    return Parallel(
        model=module,
        module=module,
        gradient_divisor=mesh.size(),
        total_norm=lambda gradients: full(torch.nn.utils.get_total_norm(gradients)),
        forward_is_collective=True,
        full_state_dict=partial(_whole, module, mesh.get_rank()),
    )


def _whole(module: Any, rank: int) -> dict[str, Any]:
    state = {name: full(value.detach()) for name, value in module.state_dict().items()}
    return {name: value.cpu() for name, value in state.items()} if rank == 0 else {}


STRATEGIES.setdefault("fsdp", shard)
