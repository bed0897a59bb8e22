"""Single worker without communication: the reference for every other strategy."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from scaleray.config import RunConfig
from scaleray.strategies.contract.parallel import Parallel
from scaleray.strategies.contract.weight_shares import whole


def apply(model: nn.Module, mesh: DeviceMesh | None, config: RunConfig, workload: Any) -> Parallel:
    """Leave the model unchanged."""
    return Parallel(model=model, module=model, weights=lambda: whole(model, keeps=True), abandon=lambda: None)
