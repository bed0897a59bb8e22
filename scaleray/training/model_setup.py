"""The order in which a model becomes a training set-up. It stands here once, with the reason beside each line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from scaleray.checkpoints.consolidated import load_weights
from scaleray.config import RunConfig
from scaleray.errors import WorkloadError
from scaleray.reproducibility.seeding import (
    check_equal_parameters,
    check_equal_structure,
    seed_everything,
    stream_seed,
    use_deterministic_algorithms,
)
from scaleray.scaling.recipe import Recipe
from scaleray.strategies import STRATEGIES, Parallel
from scaleray.strategies.mesh import build_mesh
from scaleray.training import optimizers, precision
from scaleray.training.place import Place
from scaleray.workload import call_user_code


@dataclass(frozen=True)
class Setup:
    """Everything the loop needs to take steps."""

    parallel: Parallel
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    precision: precision.Precision
    num_parameters: int
    initial_hash: str


def prepare(workload: Any, config: RunConfig, recipe: Recipe, place: Place, *, is_resumed: bool = False) -> Setup:
    """Build the model and everything around it. Collective: every worker calls it.

    is_resumed: a checkpoint will be loaded into it, so that `workload.weights` is not needed any more.
    """
    if config.deterministic:
        use_deterministic_algorithms()
    # the same seed on every rank, so that every rank draws the same initial parameters
    seed_everything(stream_seed(config.seed, "model"))
    with place.device:  # build where it will live: no copy of a large model through the CPU
        model = call_user_code(workload.build_model, what="build_model()", doing="building the model")
    _check_model(model)
    # device before optimizer, which holds references to the parameters
    model.to(place.device)
    # dtype before the strategy: DDP sizes its buckets by the parameters it is given
    arithmetic = precision.prepare(model, place.device, config.precision)
    num_parameters = sum(p.numel() for p in model.parameters())
    # before the strategy, whose collectives would wait for ever for ranks that built another model
    check_equal_structure(model, place.group)
    mesh = build_mesh(config, recipe.strategy, place.world_size, place.device.type) if place.group else None
    if config.deterministic:
        # DDP lays its buckets out anew after the first step, which changes the order of its sums: a resumed run would
        # start with the first layout again. It does not do so while it looks for unused parameters.
        strategy = config.strategy.model_copy(update={"find_unused_parameters": True, "static_graph": False})
        config = config.model_copy(update={"strategy": strategy})
    parallel = STRATEGIES[recipe.strategy](model, mesh, config, workload)
    if config.workload.weights is not None and not is_resumed:
        # after the strategy, so that each rank reads its own shards only; nobody writes there meanwhile
        load_weights(parallel.module.state_dict(), config.workload.weights, is_part=bool(parallel.parameter_names))
    # after the strategy, which may broadcast: what matters is what the first step starts from
    initial_hash = check_equal_parameters(
        parallel.module, place.group, is_partitioned=parallel.is_partitioned and parallel.run_micro_batches is not None
    )
    # the optimizer last: a strategy may have replaced parameters
    optimizer = optimizers.build(workload, parallel.module, config, recipe, owns=parallel.owns)
    schedule = optimizers.build_schedule(optimizer, config, recipe)
    # from here on ranks must differ, or dropout would use the same mask on every rank; ranks of one replica must not,
    # as they may each compute a part of the same activations
    seed_everything(stream_seed(config.seed, "dropout", place.data_rank))
    return Setup(
        parallel=parallel,
        optimizer=optimizer,
        schedule=schedule,
        precision=arithmetic,
        num_parameters=num_parameters,
        initial_hash=initial_hash,
    )


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise WorkloadError("build_model()", type(model).__name__, "it must return a torch.nn.Module")
    lazy = [name for name, parameter in model.named_parameters() if nn.parameter.is_lazy(parameter)]
    if lazy:
        raise WorkloadError(
            "the model",
            f"with lazy parameters ({lazy[0]})",
            "their shapes are needed before the first batch",
            "run one dummy batch through it in build_model()",
        )
    if not any(p.requires_grad for p in model.parameters()):
        count = sum(1 for _ in model.parameters())
        raise WorkloadError(
            "the model",
            f"without trainable parameters ({count} frozen)",
            "at least one must need a gradient",
            "check requires_grad",
        )
