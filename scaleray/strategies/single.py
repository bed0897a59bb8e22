"""One worker, no communication: what every other strategy must equal."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from scaleray.config import RunConfig
from scaleray.strategies.parallel import Parallel, cpu_state_dict


def apply(model: nn.Module, mesh: DeviceMesh | None, config: RunConfig, workload: Any) -> Parallel:
    """The model as it is."""
    return Parallel(model=model, module=model, full_state_dict=lambda: cpu_state_dict(model), abandon=lambda: None)
