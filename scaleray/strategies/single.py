"""One worker, no communication: what every other strategy must equal."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from scaleray.config.scale import StrategySettings
from scaleray.strategies.parallel import Parallel, cpu_state_dict


def apply(model: nn.Module, mesh: DeviceMesh | None, settings: StrategySettings) -> Parallel:
    """The model as it is."""
    return Parallel(model=model, module=model, full_state_dict=lambda: cpu_state_dict(model))
