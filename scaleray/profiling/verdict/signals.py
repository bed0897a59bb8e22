"""Input of a verdict: seconds of each part of each step on each rank, and other facts of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scaleray.records.phases import PARTS, Phase

Seconds = npt.NDArray[np.float64]
"""Times, (ranks, steps)."""
OWN: tuple[Phase, ...] = tuple(part for part in PARTS if part not in (Phase.COMMUNICATION, Phase.STRAGGLER))
"""Parts of a step in which a rank waits for no other one."""


@dataclass(frozen=True)
class LateAt:
    """The first collective of a backward pass that a rank is late at: its number from 0, and the layers before it."""

    bucket: int
    layers: str


@dataclass(frozen=True)
class Signals:
    """Measurements of steps in steady state, one row a rank.

    parts: seconds by OWN; one that is missing was not measured apart. waits: seconds in which a rank stood still for
    collectives: for the slowest rank and for the link together; None where it was not measured. unexplained: share of
    the steps that no part accounts for. window: steps that each column is the mean of.
    """

    parts: Mapping[Phase, Seconds]
    waits: Seconds | None
    unexplained: float = 0.0
    window: int = 1
    late_at: Mapping[int, LateAt] = field(default_factory=dict)
    """Place where the gradients of a rank begin to be late, by rank, as far as arrivals at collectives tell."""
    pauses: Seconds | None = None
    """Seconds of the garbage collector, wherever in the step they fell; None: not measured."""
    retries: Seconds | None = None
    """Times that the device's allocator gave its cache back and asked again; None: not measured."""
    stranded_share: float | None = None
    """Largest share of a device's memory that was free and in pieces; None: not measured."""
    reserved_share: float | None = None
    """Largest share of a device's memory that the allocator held."""
    last_operation: str = ""
    """The collective that is waited for last, as `all-reduce of bucket 0 (blocks.0-3)`."""
    bus_bandwidth: float | None = None
    """Bytes per second of the collectives that take the most time, by the size of their group."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks that measured."""
        return next(iter(self.parts.values())).shape[0]

    @property
    def num_columns(self) -> int:
        """Number of steps, or of windows of steps."""
        return next(iter(self.parts.values())).shape[1]

    @property
    def num_steps(self) -> int:
        """Number of steps that the columns represent."""
        return self.num_columns * self.window


@dataclass(frozen=True)
class Facts:
    """Facts of a training that its times do not show."""

    workers: int
    strategy: str
    accumulation_steps: int = 1
    global_batch_size: int = 0
    device: str = "cpu"
    is_oversubscribed: bool = False
    settings: Mapping[str, object] = field(default_factory=dict)
    """Values of the config by dotted key, for advice that does not ask for what is set already."""

    def setting(self, key: str, default: object = None) -> object:
        """The value of a dotted key of the config."""
        return self.settings.get(key, default)
