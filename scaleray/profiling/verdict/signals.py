"""Input of a verdict: seconds of each part of each step on each rank, and other facts of the run."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scaleray.records.phases import PARTS, Phase

Seconds = npt.NDArray[np.float64]
"""Times (ranks, steps)."""
OWN: tuple[Phase, ...] = tuple(part for part in PARTS if part not in (Phase.COMMUNICATION, Phase.STRAGGLER))
"""Parts of a step in which a rank does not wait for another one."""


@dataclass(frozen=True)
class LateAt:
    """First collective of a backward pass for which a rank is late: its index, and the layers before it."""

    bucket: int
    layers: str


@dataclass(frozen=True)
class Signals:
    """Measurements of steps in steady state, one row per rank.

    parts: seconds by OWN; a missing part was not measured separately. waits: seconds that a rank was stalled in
    collectives, for the slowest rank and for the link together; None if not measured. unexplained: share of the steps
    that no part accounts for. window: number of steps averaged in each column.
    """

    parts: Mapping[Phase, Seconds]
    waits: Seconds | None
    unexplained: float = 0.0
    window: int = 1
    late_at: Mapping[int, LateAt] = field(default_factory=dict)
    """Place where a rank's gradients become late, by rank, if known from arrivals at collectives."""
    pauses: Seconds | None = None
    """Seconds of garbage collection anywhere in the step; None: not measured."""
    retries: Seconds | None = None
    """Number of times that the device's allocator released its cache and retried; None: not measured."""
    stranded_share: float | None = None
    """Largest share of a device's memory that was free and fragmented; None: not measured."""
    reserved_share: float | None = None
    """Largest share of a device's memory that the allocator held."""
    last_operation: str = ""
    """Last collective that a step waits for, such as `all-reduce of bucket 0 (blocks.0-3)`."""
    bus_bandwidth: float | None = None
    """Bytes per second of the collectives that take the most time, by the size of their group."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks with measurements."""
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
    """Config values by dotted key, so that advice does not suggest what is already set."""

    def setting(self, key: str, default: object = None) -> object:
        """Return the value of a dotted config key."""
        return self.settings.get(key, default)
