"""Degrees of parallelism: numbers of workers along the axes of the mesh, whose product is the number of workers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import model_validator

from scaleray.config.base import Count, Settings
from scaleray.config.strategy_traits import traits_of
from scaleray.errors import ConfigError

Degree = Count | Literal["auto"] | None
AUTO = "auto"
AXES = ("pipeline", "replicate", "shard", "context", "tensor")
"""Axes of the mesh, from the outermost to the innermost."""


class ParallelSettings(Settings):
    """Numbers of workers along each axis, whose product is `scale.workers`. `auto` for one axis takes the workers that
    the others leave; `parallel: auto` takes the planner's layout. A single worker always has the whole model."""

    pipeline: Degree = None
    """Workers over which the stages of a replica are distributed. None: 2 under `strategy.name: pipeline`, otherwise
    1."""
    replicate: Degree = None
    """Groups of workers that each have the whole state; gradients are summed over the groups or, under local_sgd and
    diloco, parameters are averaged occasionally. None: all workers that the other axes leave, but 1 under fsdp and
    tensor, where `shard` gets them. Both together are HSDP."""
    shard: Degree = None
    """Workers over which the state is sharded: parameters, gradients and the optimizer's (FSDP). In a pipeline, a
    stage's parameters are gathered once per step, and gradients reduced once; parameters shared by several stages (a
    tied head) or outside the blocks stay whole. None: the remaining workers under fsdp and tensor, otherwise 1."""
    context: Degree = None
    """Workers that share each sequence, cut by `scaleray.parallel.part` in the workload; see `context.exchange`. A
    sharded state is also sharded over them. None: 1."""
    tensor: Degree = None
    """Workers that share each layer, by the workload's `tensor_plan`. None: 2 under `strategy.name: tensor`, else 1."""
    expert: Count | None = None
    """Workers over which the experts of `scaleray.parallel.MixtureOfExperts` are divided; each sends its tokens to
    those of their experts. These workers are neighbours along `shard` and `context`, whose product this number must
    divide; it is not a separate axis. None: 1."""

    def least_workers(self, strategy: str) -> int:
        """The smallest number of workers above one that these degrees allow, with `auto` and the rest as 1."""
        given = [2 if getattr(self, axis) is None and strategy == axis else getattr(self, axis) for axis in AXES]
        return max(math.prod(value for value in given if isinstance(value, int)), self.expert or 1)

    def within(self, strategy: str) -> ParallelSettings:
        """Degrees within a replica that the given strategy supports, including shards if it splits replicas."""
        traits = traits_of(strategy)
        axes = {"pipeline", "context", "tensor", *(["shard"] if traits.splits_replica else [])} & set(traits.axes)
        axes = set() if traits.trains_apart else axes
        return ParallelSettings(**{axis: getattr(self, axis) for axis in axes})

    @model_validator(mode="after")
    def _one_is_auto(self) -> ParallelSettings:
        if len(found := [name for name, value in self if value == AUTO]) > 1:
            raise ValueError(f"{' and '.join(found)}: only one degree can be auto")
        return self


@dataclass(frozen=True)
class Degrees:
    """Numbers of workers along each axis of the mesh, from the outermost axis to the innermost: the axis with the most
    communication is the innermost, whose workers are neighbours on a node."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    """Workers that divide the experts, within `shard` and `context`."""

    @property
    def workers(self) -> int:
        """Number of workers of the mesh."""
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def data(self) -> int:
        """Number of shares into which the global batch is divided."""
        return self.replicate * self.shard

    @property
    def model(self) -> int:
        """Number of workers that together hold one replica of the model and compute the same samples."""
        return self.pipeline * self.context * self.tensor

    @property
    def whole(self) -> int:
        """Number of parts into which the state is divided, by stages, shards and layers."""
        return self.pipeline * self.shard * self.tensor

    def data_rank(self, rank: int) -> int:
        """Index of a rank's share of the global batch."""
        return rank // (self.context * self.tensor) % self.data

    def replica(self, data_rank: int) -> list[int]:
        """Ranks that together compute a share of the global batch, in order."""
        near = self.context * self.tensor
        first = [(stage * self.data + data_rank) * near for stage in range(self.pipeline)]
        return [start + number for start in first for number in range(near)]

    @property
    def replicas(self) -> list[list[int]]:
        """Ranks of each replica, by its share of the global batch."""
        return [self.replica(data_rank) for data_rank in range(self.data)]

    @property
    def token_shares(self) -> list[list[int]]:
        """Ranks that compute the same tokens of a share of the global batch, for all tokens of all shares in order."""
        stages = range(0, self.workers, self.workers // self.pipeline)
        firsts = range(0, self.workers // self.pipeline, self.tensor)
        return [[stage + first + number for stage in stages for number in range(self.tensor)] for first in firsts]

    def text(self) -> str:
        """The degrees above 1, such as `pipeline 2 x tensor 2`."""
        return " x ".join(f"{name} {degree}" for name, degree in asdict(self).items() if degree > 1) or "1 worker"


def all_degrees(workers: int) -> list[Degrees]:
    """Return all ways to divide this number of workers into degrees."""
    divisors = [n for n in range(1, workers + 1) if workers % n == 0]
    cuts = (Degrees(*cut) for cut in itertools.product(divisors, repeat=len(AXES)))
    return [degrees for degrees in cuts if degrees.workers == workers]


def short_form(parallel: Mapping[str, Any]) -> str | None:
    """Return the strategy implied by a config's degrees if none is named; None if they imply none."""

    def is_asked(axis: str) -> bool:
        return parallel.get(axis) not in (None, 1)

    axes = {"pipeline": "pipeline", "tensor": "tensor", "shard": "fsdp", "expert": "fsdp"}
    return next((strategy for axis, strategy in axes.items() if is_asked(axis)), None)


def degrees_of(settings: ParallelSettings, strategy: str, workers: int) -> Degrees:
    """Return the degrees for this number of workers. Raises ConfigError if their product differs from it, or if the
    strategy lacks an axis."""
    if workers == 1:
        return Degrees()
    traits, given = traits_of(strategy), {axis: getattr(settings, axis) for axis in AXES}
    for axis in ("pipeline", "context", "tensor"):
        if given[axis] is None:
            given[axis] = 2 if strategy == axis else 1
    if strategy == "pipeline" and given["pipeline"] == 1:
        raise ConfigError("parallel.pipeline", 1, "a pipeline needs at least two workers", "use --strategy.name auto")
    rest = "shard" if "shard" in traits.axes and strategy != "pipeline" and not traits.trains_apart else "replicate"
    if AUTO not in given.values():
        rest = rest if given[rest] is None else next((a for a in ("replicate", "shard") if given[a] is None), "")
    else:
        rest = next(axis for axis, value in given.items() if value == AUTO)
    known = {axis: value or 1 for axis, value in given.items() if axis != rest}
    product = math.prod(known.values())
    if workers % product or (not rest and workers != product):
        asked = " x ".join(f"{axis} {value}" for axis, value in known.items() if value > 1) or "1"
        multiple = "their product" if not rest else "a multiple of their product"
        fit = f"{product}" if not rest else f"{max(1, workers // product) * product}"
        raise ConfigError(
            "parallel", asked, f"scale.workers is {workers}, and must be {multiple}, {product}",
            f"use --scale.workers {fit}, or other degrees",
        )  # fmt: skip
    known["expert"] = settings.expert or 1
    found = Degrees(**known, **({rest: workers // product} if rest else {}))
    if (shared := found.shard * found.context) % found.expert:
        raise ConfigError(
            "parallel.expert", found.expert,
            f"it must divide shard x context, which is {found.shard} x {found.context}",
            f"possible: {', '.join(str(n) for n in range(1, shared + 1) if shared % n == 0)}",
        )  # fmt: skip
    for axis, degree in asdict(found).items():
        if degree > 1 and axis == "expert" and axis not in traits.axes:
            why = f"strategy.name is {strategy}, which does not divide experts"
            if strategy == "pipeline":
                why = "the replicas of a pipeline stage order their micro-batches independently"
            raise ConfigError("parallel.expert", degree, why, "use it only with replicate, shard, context and tensor")
        if degree > 1 and axis not in traits.axes:
            raise ConfigError(
                f"parallel.{axis}", degree, f"strategy.name is {strategy}, which has no such axis",
                "use --strategy.name auto, which follows the degrees",
            )  # fmt: skip
    return found
