"""How a model is spread over workers. Each strategy is a function `apply(model, mesh, config, workload) -> Parallel`."""

from scaleray.strategies import ddp, fsdp, single, zero1
from scaleray.strategies.parallel import Parallel

STRATEGIES = {"single": single.apply, "ddp": ddp.apply, "zero1": zero1.apply, "fsdp": fsdp.apply}

__all__ = ["STRATEGIES", "Parallel"]
