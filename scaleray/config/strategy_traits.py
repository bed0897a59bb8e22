"""Table of the traits of each strategy that other modules depend on."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Traits of a strategy, which other modules use instead of lists of names."""

    axes: tuple[str, ...] = ("replicate",)
    """Axes of the mesh over which it spreads a model, see `config.parallel`."""
    trains_apart: bool = False
    """Whether workers have different values of the same parameters, which agree only approximately or at intervals. All
    other strategies give the result of a single process: a run may continue under another of them.
    """
    reduces_by_ddp: bool = False
    """Whether DDP sums the gradients once per step, so that they can be compressed and workers can run different
    numbers of micro-batches."""
    sums_gradients: bool = False
    """Whether each worker has its own samples, and gradients are summed over workers in every step."""
    sharding: Literal["none", "zero1", "zero3"] = "none"
    """State that is sharded over the workers: nothing, the optimizer's state, or parameters, gradients and state."""
    splits_replica: bool = False
    """Whether several workers together have one replica and compute the same samples; no worker can do its part of a
    step alone."""
    averages_now_and_then: bool = False
    """Whether workers take independent steps between averagings, after a warm-up under DDP, if any."""
    mixes_with_neighbours: bool = False
    """Whether workers exchange parameters with some of the others in every step."""
    can_repeat_steps: bool = True
    """Whether a step can be repeated on all workers, with smaller micro-batches."""
    can_try_micro_sizes: bool = True
    """Whether steps can be tried before the training without leaving a trace."""

    @property
    def splits_parameters(self) -> bool:
        """Whether a worker has only a part of the parameters while the model is in use."""
        return self.splits_replica or self.sharding == "zero3"


APART = ("pipeline", "replicate", "shard", "tensor")
TRAITS: dict[str, Traits] = {
    "single": Traits(axes=("replicate", "context")),
    "ddp": Traits(axes=("replicate", "context"), reduces_by_ddp=True, sums_gradients=True),
    "zero1": Traits(axes=("replicate", "context"), reduces_by_ddp=True, sums_gradients=True, sharding="zero1"),
    "fsdp": Traits(axes=("replicate", "shard", "context", "expert"), sums_gradients=True, sharding="zero3"),
    "tensor": Traits(axes=("replicate", "shard", "context", "tensor", "expert"), splits_replica=True),
    "pipeline": Traits(
        axes=("pipeline", "replicate", "shard", "context", "tensor"),
        splits_replica=True,
        can_repeat_steps=False,
        can_try_micro_sizes=False,
    ),
    "local_sgd": Traits(axes=APART, trains_apart=True, averages_now_and_then=True, can_repeat_steps=False),
    "diloco": Traits(axes=APART, trains_apart=True, averages_now_and_then=True, can_repeat_steps=False),
    "gossip": Traits(trains_apart=True, mixes_with_neighbours=True, can_repeat_steps=False),
    "async_sgd": Traits(
        trains_apart=True, mixes_with_neighbours=True, can_repeat_steps=False, can_try_micro_sizes=False
    ),
}  # fmt: skip


def traits_of(strategy: str) -> Traits:
    """Return a strategy's traits; those of `single` for `auto`, and for a name that is not allowed in a config."""
    return TRAITS.get(strategy, TRAITS["single"])


def names_with(trait: str) -> tuple[str, ...]:
    """Names of the strategies with a trait, in the order of the table."""
    return tuple(name for name, traits in TRAITS.items() if getattr(traits, trait))
