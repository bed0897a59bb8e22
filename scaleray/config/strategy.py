"""Strategy that spreads the model over the workers, and the settings of each but fsdp; shares of the workers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from scaleray.config.base import Count, Positive, Probability, Settings


class SharesSettings(Settings):
    """Equal shares, or shares in proportion to speed."""

    by: Literal["equal", "speed", "given"] = "equal"
    """How samples are shared. equal: in equal parts. speed: in proportion to what each worker is measured to compute in
    a second. given: in proportion to `speeds`. The samples of a step stay the same, and so does their sum."""
    speeds: tuple[Positive, ...] | None = None
    """With `by: given`: relative speed of each worker, in order of rank, such as [2, 1]. Which node has which rank is
    Ray's choice."""
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
    """Whom workers average with, and how far they may drift apart."""

    graph: Literal["ring", "exponential", "matching"] = "exponential"
    """gossip: the workers that a worker averages with. ring: both neighbours; exponential: one at distance 1, 2, 4, ...
    in turn; matching: random pairs, new each step."""
    is_asynchronous: bool = False
    """gossip: send parameters to neighbours and continue; theirs are mixed in when they arrive."""
    max_staleness: Annotated[int, Field(ge=0, le=1000)] = 4
    """async_sgd, asynchronous gossip: steps by which a worker may be ahead of the slowest (gossip: of those it hears
    from) before it waits. Each takes the memory of the trained parameters twice."""
    meet_every: Count = 50
    """Steps between two meetings of all workers, where losses are summed and decisions are made. Evaluations and
    checkpoints are meetings too."""


class LocalSgdSettings(Settings):
    """How often replicas meet, and what they do then."""

    sync_every: Count = 16
    """Optimizer steps between two averagings over all workers. 1 averages after every step. Between them the recorded
    loss is that of rank 0's own samples, and gradients, their norm and clipping are each worker's own."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Number of ordinary steps, with gradients averaged in each, before replicas go apart."""
    node_sync_every: Count | None = None
    """Hierarchical: steps between two averagings within a node; must divide `sync_every`. None: nodes do nothing of
    their own."""
    node_size: Count | None = None
    """Hierarchical: number of consecutive ranks that make a node (or a rack, or whatever is well connected). None: the
    ranks that run on one machine."""
    average_momentum: bool = True
    """local_sgd: average the optimizer's state together with the parameters."""
    outer_learning_rate: Positive = 0.7
    """diloco: step of the outer Nesterov optimizer on the mean change of the replicas."""
    outer_momentum: Probability = 0.9
    """diloco: momentum of the outer Nesterov optimizer."""

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
"""Schedules that can give a worker more than one stage."""


class PipelineSettings(Settings):
    """How the model's blocks become stages, and in which order micro-batches go through them."""

    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"] = "1f1b"
    """Order in which the micro-batches of a step (batch.micro_size) go through the stages. interleaved_1f1b and
    zero_bubble give each worker `stages_per_worker` stages, and order micro-batches in rounds of at least
    `parallel.pipeline`, as many in each."""
    stages_per_worker: Count | None = None
    """Stages on each worker. None: 1 for gpipe and 1f1b, else 2."""
    split: Literal["counted", "measured"] = "counted"
    """Measure by which stages are balanced: forward operations counted from parameters (2 for each parameter that
    multiplies), or the time of each block's forward pass, measured once at the start on rows of the training data."""

    @model_validator(mode="after")
    def _stages_suit_the_schedule(self) -> PipelineSettings:
        if self.stages_per_worker is None:
            return self
        if self.schedule not in INTERLEAVED and self.stages_per_worker != 1:
            raise ValueError(
                f"stages_per_worker: {self.schedule} has one stage a worker; use 1, "
                f"or the schedule {' or '.join(INTERLEAVED)}"
            )
        if self.schedule == "interleaved_1f1b" and self.stages_per_worker == 1:
            raise ValueError("stages_per_worker: interleaved_1f1b with one stage a worker is 1f1b; use 2 or more")
        return self

    @property
    def stages_of_each_worker(self) -> int:
        """Value of `stages_per_worker` with its default decided."""
        return self.stages_per_worker or (2 if self.schedule in INTERLEAVED else 1)


class TensorSettings(Settings):
    """How each layer is split over neighbouring workers."""

    sequence_parallel: bool = True
    """Split the operations between the layers (norms, residuals) along the sequence as well, where the
    workload's plan supports it."""


class StrategySettings(Settings):
    """How the model is spread over the workers."""

    name: Literal[
        "auto", "single", "ddp", "zero1", "fsdp", "tensor", "pipeline", "local_sgd", "diloco", "gossip", "async_sgd"
    ] = "auto"
    """Name of the strategy. auto: `single` for one worker, `ddp` for more."""
    bucket_size_mib: Positive = 25.0
    """DDP: gradients are reduced in buckets of this size while the backward pass still runs."""
    gradient_as_bucket_view: bool = True
    """DDP: gradients live inside the buckets, which saves one copy and its memory."""
    static_graph: bool = False
    """DDP: promise that every step uses the same parameters in the same order."""
    find_unused_parameters: bool = False
    """DDP: for models that skip parameters in some steps; costs a walk over the graph each step."""
