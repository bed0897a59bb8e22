"""How a model is spread over workers. Each strategy is a function `apply(model, mesh, config, workload) -> Parallel`."""

from scaleray.strategies import ddp, pipeline, single, tensor
from scaleray.strategies.parallel import Parallel

STRATEGIES = {"single": single.apply, "ddp": ddp.apply, "pipeline": pipeline.apply, "tensor": tensor.apply}

__all__ = ["STRATEGIES", "Parallel"]
