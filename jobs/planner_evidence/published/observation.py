"""One published measurement as the planner is asked about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scaleray.config.hardware.hardware_kinds import Cluster
from scaleray.planner.cost.layout import Layout
from scaleray.planner.models.block_counts import ModelProfile

MemoryKind = Literal["allocated", "reserved", "device"]


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One measurement.

    `series` is the same for points that one curve joins: all but the layout and the number of GPUs.
    """

    source: str
    family: str
    row: str
    series: tuple[str, ...]
    model: ModelProfile
    layout: Layout
    cluster: Cluster
    fused_attention: bool
    step_time_s: float | None
    memory_bytes: float | None = None
    memory_kind: MemoryKind = "allocated"
    out_of_memory: bool = False
    is_digitised: bool = False
    is_trace: bool = False

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that the step ran on."""
        return self.layout.num_gpus
