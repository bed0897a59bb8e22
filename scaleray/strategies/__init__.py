"""Strategies that distribute a model over workers. Each is a function `apply(model, mesh, config, workload) ->
Parallel`."""

from scaleray.strategies import async_sgd, ddp, diloco, fsdp, gossip, local_sgd, single, tensor, zero1
from scaleray.strategies.contract.parallel import Parallel
from scaleray.strategies.pipeline import apply as pipeline

STRATEGIES = {
    "single": single.apply,
    "ddp": ddp.apply,
    "zero1": zero1.apply,
    "fsdp": fsdp.apply,
    "tensor": tensor.apply,
    "pipeline": pipeline.apply,
    "local_sgd": local_sgd.apply,
    "diloco": diloco.apply,
    "gossip": gossip.apply,
    "async_sgd": async_sgd.apply,
}

__all__ = ["STRATEGIES", "Parallel"]
