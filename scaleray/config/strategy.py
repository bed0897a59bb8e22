"""Settings of the strategy, which distributes the model over the workers, except those of FSDP, and of the workers'
shares."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from scaleray.config.base import Count, Positive, Probability, Settings


class SharesSettings(Settings):
    """Division of a step's samples among the workers: equal, or in proportion to speed."""

    by: Literal["equal", "speed", "given"] = "equal"
    """How samples are divided. equal: in equal parts. speed: in proportion to each worker's measured samples per
    second. given: in proportion to `speeds`. The samples of a step stay the same."""
    speeds: tuple[Positive, ...] | None = None
    """With `by: given`: relative speed of each worker, in order of rank, such as [2, 1]. Ray assigns ranks to nodes."""
    measure_every: Count = 50
    """With `by: speed`: steps between two measurements, after each of which the shares may change."""
    smallest: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Smallest share of a worker, relative to an equal share."""

    @model_validator(mode="after")
    def _speeds_are_given_where_they_are_used(self) -> SharesSettings:
        if (self.by == "given") != (self.speeds is not None):
            raise ValueError("shares.by given and shares.speeds belong together: give both or neither")
        return self


class GossipSettings(Settings):
    """Workers to average with, and how far they may drift apart."""

    graph: Literal["ring", "exponential", "matching"] = "exponential"
    """gossip: partners for averaging. ring: both neighbours; exponential: one at distance 1, 2, 4, ... in turn;
    matching: random pairs, redrawn every step."""
    is_asynchronous: bool = False
    """gossip: send parameters to neighbours and continue; mix in theirs when they arrive."""
    max_staleness: Annotated[int, Field(ge=0, le=1000)] = 4
    """async_sgd, asynchronous gossip: steps by which a worker may be ahead of the slowest one (gossip: of its partners)
    before it waits. Each step of lead needs twice the memory of the trained parameters."""
    meet_every: Count = 50
    """Steps between two synchronisations of all workers, at which losses are summed and decisions are made. Evaluations
    and checkpoints also synchronise."""


class LocalSgdSettings(Settings):
    """How often replicas synchronise, and how."""

    sync_every: Count = 16
    """Optimizer steps between two averagings over all workers. 1 averages after every step. In between, the recorded
    loss is that of the first replica's samples, and gradients, their norm and clipping are local to each replica."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Number of initial steps with averaged gradients, before replicas train separately."""
    node_sync_every: Count | None = None
    """Hierarchical: steps between two averagings within a node; must divide `sync_every`. None: no averaging within
    nodes."""
    node_size: Count | None = None
    """Hierarchical: number of consecutive ranks that form a node (or a rack, or another well-connected group). None:
    the ranks on one machine."""
    average_momentum: bool = True
    """local_sgd: average the optimizer's state together with the parameters."""
    outer_learning_rate: Positive = 0.7
    """diloco: step size of the outer Nesterov optimizer on the mean change of the replicas."""
    outer_momentum: Probability = 0.9
    """diloco: momentum of the outer Nesterov optimizer."""
    fragments: Count = 1
    """diloco: parts into which the layers are divided, in order and equally many parameters each. Each part takes its
    outer step every `sync_every` steps, one part after the other at equal intervals."""
    overlap: Annotated[int, Field(ge=0)] = 0
    """diloco: steps during which replicas train on while a fragment is summed; the outer step follows."""
    mixing: Probability = 0.0
    """diloco: weight of a replica's own values when a fragment takes its outer step. 0: the new values replace them."""

    @property
    def streams(self) -> bool:
        """Whether replicas never agree on all parameters at once."""
        return self.fragments > 1 or self.overlap > 0 or self.mixing > 0

    @property
    def fragment_every(self) -> int:
        """Steps between the outer steps of two fragments."""
        return self.sync_every // self.fragments

    @model_validator(mode="after")
    def _fragments_follow_each_other(self) -> LocalSgdSettings:
        if self.sync_every % self.fragments:
            raise ValueError(
                f"local_sgd.fragments: it is {self.fragments}, and must divide sync_every, {self.sync_every}"
            )
        if self.overlap >= self.fragment_every:
            raise ValueError(
                f"local_sgd.overlap: it is {self.overlap}, and the next fragment begins after {self.fragment_every} "
                "steps; use fewer"
            )
        if self.streams and self.node_sync_every is not None:
            raise ValueError("local_sgd.node_sync_every: fragments are averaged over all replicas; omit it")
        return self

    @model_validator(mode="after")
    def _nodes_meet_more_often(self) -> LocalSgdSettings:
        often = self.node_sync_every
        if often is not None and (often >= self.sync_every or self.sync_every % often):
            raise ValueError(
                f"local_sgd.node_sync_every: it is {often}, and must be a smaller divisor of "
                f"sync_every, {self.sync_every}"
            )
        if self.node_size is not None and often is None:
            raise ValueError("local_sgd.node_size: it has no effect without node_sync_every")
        return self


INTERLEAVED = ("interleaved_1f1b", "zero_bubble")
"""Schedules that support more than one stage per worker."""


class PipelineSettings(Settings):
    """Division of the model's blocks into stages, and the order of micro-batches."""

    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"] = "1f1b"
    """Order in which the micro-batches of a step (batch.micro_size) pass through the stages. interleaved_1f1b and
    zero_bubble give each worker `stages_per_worker` stages, and order micro-batches in equal rounds of at least
    `parallel.pipeline`."""
    stages_per_worker: Count | None = None
    """Stages per worker. None: 1 for gpipe and 1f1b, otherwise 2."""
    split: Literal["counted", "measured"] = "counted"
    """How stages are balanced: by forward operations counted from parameters (2 for each parameter that multiplies), or
    by the time of each block's forward pass, measured once at the start on rows of the training data."""

    @model_validator(mode="after")
    def _stages_suit_the_schedule(self) -> PipelineSettings:
        if self.stages_per_worker is None:
            return self
        if self.schedule not in INTERLEAVED and self.stages_per_worker != 1:
            raise ValueError(
                f"stages_per_worker: {self.schedule} has one stage per worker; use 1,  "
                f"or the schedule {' or '.join(INTERLEAVED)}"
            )
        if self.schedule == "interleaved_1f1b" and self.stages_per_worker == 1:
            raise ValueError("stages_per_worker: interleaved_1f1b with one stage per worker is 1f1b; use 2 or more")
        return self

    @property
    def stages_of_each_worker(self) -> int:
        """Value of `stages_per_worker` with its default resolved."""
        return self.stages_per_worker or (2 if self.schedule in INTERLEAVED else 1)


class TensorSettings(Settings):
    """Division of each layer over neighbouring workers."""

    sequence_parallel: bool = True
    """Also split the operations between the layers (norms, residuals) along the sequence, if the workload's plan
    supports it."""


class ContextSettings(Settings):
    """Division of sequences over the workers of `parallel.context`."""

    exchange: Literal["heads", "ring"] = "heads"
    """Exchange within attention. heads: each worker gets all tokens of some heads, whose number the workers must
    divide. ring: keys and values pass from worker to worker during the computation, for any number of heads."""


class StrategySettings(Settings):
    """How the model is distributed over the workers."""

    name: Literal[
        "auto", "single", "ddp", "zero1", "fsdp", "tensor", "pipeline", "local_sgd", "diloco", "gossip", "async_sgd"
    ] = "auto"
    """Name of the strategy. auto: `single` for one worker, `ddp` for more."""
    bucket_size_mib: Positive = 25.0
    """DDP: size of the buckets in which gradients are reduced during the backward pass."""
    gradient_as_bucket_view: bool = True
    """DDP: let gradients be views of the buckets, which saves one copy and its memory."""
    static_graph: bool = False
    """DDP: declare that every step uses the same parameters in the same order."""
    find_unused_parameters: bool = False
    """DDP: support models that skip parameters in some steps; costs a traversal of the graph per step."""
