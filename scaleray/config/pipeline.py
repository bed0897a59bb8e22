"""Pipeline parallelism: `strategy.name: pipeline`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from scaleray.config.base import Count, Settings

INTERLEAVED = ("interleaved_1f1b", "zero_bubble")
"""Schedules that can give a worker more than one stage."""


class PipelineSettings(Settings):
    """How the model's blocks become stages, and in which order micro-batches go through them."""

    size: Annotated[int, Field(ge=2)] = 2
    """Number of workers that the stages of a replica lie on. scale.workers / size replicas train on data of their own,
    and sum the gradients of each stage at the end of a step."""
    data_axis: Literal["ddp", "fsdp"] = "ddp"
    """How replicas hold their stages. ddp: every replica holds its stages whole, and gradients are summed with one
    all-reduce. fsdp: replicas share out each stage's parameters, gradients and optimizer state between steps; in a step
    parameters are gathered once, and gradients reduced once to the shards. Parameters of several stages (a tied head)
    and outside the blocks stay whole.
    """
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"] = "1f1b"
    """Order in which the micro-batches of a step (batch.micro_size) go through the stages. interleaved_1f1b and
    zero_bubble give each worker `stages_per_worker` stages, and order micro-batches in rounds of at least
    `size`, as many in each."""
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
