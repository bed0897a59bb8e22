"""One worker, no communication: what every other strategy must equal."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from scaleray.config import RunConfig
from scaleray.strategies.parallel import Parallel
from scaleray.strategies.weight_shares import whole


def apply(model: nn.Module, mesh: DeviceMesh | None, config: RunConfig, workload: Any) -> Parallel:
    """The model as it is."""
    return Parallel(model=model, module=model, weights=lambda: whole(model, keeps=True), abandon=lambda: None)
