"""Profile of a run: time in phases, lateness, collectives, goodput and memory; under `profile` in record.json.

`RankMeasurements` holds the measurements of one worker; `scaleray/profiling/` combines those of all ranks into a
`RunProfile`. Values that could not be measured are None or omitted, never 0. Durations are in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from scaleray.common import metric_names as names

if TYPE_CHECKING:
    import numpy as np  # planning reads records without numpy

MOST_BUCKETS = 200
"""Maximum number of buckets into which a run's steps are divided for figures over time."""


@dataclass(frozen=True)
class Spread:
    """A quantity measured in every step, such as the seconds of a phase: its sum over the steps, and its values over
    time."""

    total: float
    """Sum over all measured steps."""
    median: float
    p90: float
    series: list[float] = field(default_factory=list)
    """Mean per step in each bucket of `RunProfile.buckets`."""


@dataclass(frozen=True)
class Buckets:
    """Division of the steps into buckets. A series has one value for each bucket."""

    first_step: int
    """Number of the first measured step, from 1."""
    width: int
    """Number of steps in each bucket; the last one may have fewer."""
    count: int


@dataclass(frozen=True)
class BucketLateness:
    """Lateness of a rank behind the earliest one, at the collectives of one group of gradients in the backward pass."""

    bucket: int
    """Number of the group in the backward pass, from 0 for the last layers: a bucket of DDP, or a unit of FSDP."""
    layers: str
    """Layers whose gradients it contains, such as `blocks.0-3`."""
    late_s: Spread
    last_share: float
    """Share of the steps in which this rank arrived last."""


@dataclass(frozen=True)
class Straggler:
    """A rank that makes the others wait in step after step."""

    rank: int
    phase: str
    """`forward` or `backward`: the pass in which it loses time, as far as arrivals show. A delay between the passes of
    two steps counts for the forward pass."""
    bucket: int | None
    """First group of gradients, as in `RankProfile.lateness`, that was late; None in the forward pass."""
    layers: str
    """Layers in which the time is lost; empty if it may be lost anywhere from the previous step to the end of the
    forward pass."""
    late_s: float
    """Seconds added per step to its lateness there: median over blocks of steps."""
    share: float
    """These seconds as a share of a step."""
    steps: int
    """Number of evaluated steps."""
    p_value: float
    """Upper bound on the probability that this occurs at any rank although all are equally fast."""


@dataclass(frozen=True)
class MemoryPeak:
    """Peak of a worker's memory use."""

    num_bytes: int
    step: int
    """Number of the step, from 1."""
    phase: str
    """Its phase, named as in `scaleray.records.phases`; empty if only the step is known."""
    at_s: float
    """Seconds after the start of the run."""


@dataclass(frozen=True)
class MemoryNumbers:
    """Memory that a worker holds without using it, by cause, and its peak. None: not measurable here."""

    rounding_bytes: int | None = None
    """Allocated minus requested bytes, since blocks are rounded up."""
    cached_bytes: int | None = None
    """Reserved minus active bytes, which the allocator keeps for later requests."""
    stranded_bytes: int | None = None
    """Unused parts of split blocks, which is true fragmentation. Included in the cached bytes."""
    largest_hole_bytes: int | None = None
    """Largest block available without requesting more from the device."""
    resident_bytes: int | None = None
    """Memory of the process on the host, including Python, torch and input."""
    retries: int | None = None
    """Number of times that the allocator had to release its cache and retry."""
    peak: MemoryPeak | None = None
    """Peak of memory allocated on the device; on the CPU, peak of observed resident memory."""
    series: dict[str, list[float | None]] = field(default_factory=dict)
    """Each of the above over time, by its field name, in the buckets of the profile; None without a sample."""


@dataclass(frozen=True)
class RankProfile:
    """How one rank spent its time."""

    rank: int
    node: str
    device: str
    """`cpu` or `cuda`: on a GPU, the parts are the device's own time, measured by events; otherwise the host's."""
    steps: int
    """Number of measured steps, without a process's first step, which compiles and fills caches."""
    step: Spread
    """Seconds of a step, including an evaluation or checkpoint after the previous step."""
    phases: dict[str, Spread]
    """Seconds of each part of a step, by the values of `Phase`; parts that cannot be separated here are missing."""
    worst_gap: float | None
    """Largest difference between a step and the sum of its parts in any step, as a share of the step."""
    pauses: Spread | None = None
    """Seconds of garbage collection in a step, in any phase; None if not measured."""
    late_s: Spread | None = None
    """Largest delay of this rank behind the earliest one at any collective of a step; None if arrivals are not
    measured."""
    lateness: list[BucketLateness] = field(default_factory=list)
    memory: MemoryNumbers = field(default_factory=MemoryNumbers)


@dataclass(frozen=True)
class CollectiveRow:
    """One type of collective in one group, over all measured steps of one rank."""

    rank: int
    group: str
    """Name of the group, such as `dp`."""
    group_size: int
    operation: str
    count: int
    num_bytes: float
    """Payload that this rank contributed, counted once per call, whatever the algorithm."""
    seconds: float | None = None
    """Total seconds from the rank's own arrival to the end; None if not measured."""
    bus_bandwidth: float | None = None
    """Bytes per second on the busiest link, for the size of this group."""
    exposed_share: float | None = None
    """Share of `seconds` in which it stalled the rank."""


@dataclass(frozen=True)
class LinkRow:
    """Bandwidth from one rank to another, measured pair by pair after the steps of `scaleray profile`."""

    sender: int
    receiver: int
    bytes_per_s: float
    num_bytes: int
    """Bytes of a message."""


@dataclass(frozen=True)
class Goodput:
    """Share of a run's time spent in steps that count, and a breakdown of the rest. The seconds sum to `elapsed_s`."""

    elapsed_s: float
    seconds: dict[str, float]
    """Seconds by class: `productive` steps, `start`, `restart`, `repeated`, `input`, `checkpoint`, `evaluation`,
    `other`."""
    attempts: int = 1
    """Number of starts of the run: 1, plus 1 for each resume or loss of workers."""
    repeated_steps: int = 0
    """Number of steps repeated after a resume."""
    longest_without_checkpoint_s: float | None = None
    """Longest training time without a checkpoint, which is the most that a lost worker could have cost. None if no step
    was taken, and in older records."""

    def shares(self) -> dict[str, float]:
        """Share of each class in the elapsed time."""
        return {name: seconds / self.elapsed_s for name, seconds in self.seconds.items()} if self.elapsed_s else {}


@dataclass(frozen=True)
class RunProfile:
    """How all ranks of a run spent their time."""

    buckets: Buckets
    ranks: list[RankProfile]
    closes: bool
    """Whether the parts of the steps sum to the steps within 1 % on every rank."""
    gap: float | None
    """Relative difference between the steps and the sum of their parts, on the rank where it is largest."""
    gap_rank: int | None = None
    stragglers: list[Straggler] = field(default_factory=list)
    """Ranks that are late beyond chance, worst first; healthy runs have none."""
    collectives: list[CollectiveRow] = field(default_factory=list)
    goodput: Goodput | None = None
    notes: list[str] = field(default_factory=list)
    """Missing measurements, with reasons."""
    traced_steps: int = 0
    """Number of steps at the end that a trace slowed down, and that are not evaluated."""
    links: list[LinkRow] = field(default_factory=list)
    """Every pair of ranks that was measured separately, in both directions."""

    def figures(self) -> dict[str, float]:
        """One value for each metric of a profile, by its name in MLflow."""
        whole = sum(rank.step.total for rank in self.ranks)
        parts = dict.fromkeys((name for rank in self.ranks for name in rank.phases), 0.0)
        for rank in self.ranks:
            for name, spread in rank.phases.items():
                parts[name] += spread.total
        return {
            **({names.PROFILE_GAP.name: self.gap} if self.gap is not None else {}),
            **(
                {names.GOODPUT.name: self.goodput.shares()["productive"]}
                if self.goodput and self.goodput.elapsed_s
                else {}
            ),
            **({names.PART_SHARE.name.replace("PART", part): s / whole for part, s in parts.items()} if whole else {}),
        }

    @classmethod
    def of(cls, values: Mapping[str, Any] | None) -> RunProfile | None:
        """Read the profile of a record.json, ignoring unknown keys of newer versions. None if it is missing or
        unreadable."""
        try:
            return None if values is None else TypeAdapter(cls).validate_python(values)
        except ValidationError:
            return None


@dataclass(frozen=True)
class Places:
    """Points of a step at which arrivals are measured, in the order in which a rank reaches them."""

    forward: tuple[str, ...]
    """Layers that a rank computed before each place of the forward pass; empty if there were none."""
    backward: tuple[str, ...]
    """Layers whose gradients are computed before each place of the backward pass."""
    buckets: tuple[int, ...]
    """Number of the group of gradients to which each place of the backward pass belongs. A group has one place where it
    is reduced, and may have earlier ones."""
    bucket_layers: tuple[str, ...]
    """Layers of each group of gradients."""
    meets_once: bool
    """Whether a rank computes while collectives run and waits for all of them at the end of the pass, as in DDP;
    otherwise it waits for each, as in FSDP.
    """
    end_of_forward: str = ""
    """Layers that a rank computes between the last place of the forward pass and the start of the backward pass; empty
    if that includes more than the forward pass."""


@dataclass(frozen=True)
class RankArrivals:
    """Times at which one rank's gradients were ready for their collectives, in seconds on its host's clock."""

    rank: int
    clock: str
    """Name of the clock. Times of ranks with the same clock are directly comparable."""
    places: Places
    num_steps: int
    """Number of measured steps, some of which have a row."""
    steps: np.ndarray = field(repr=False, compare=False)
    """Numbers of the steps with a row, int64 (rows,)."""
    begun: np.ndarray = field(repr=False, compare=False)
    """Start of the last backward pass, float64 (rows,)."""
    came: np.ndarray = field(repr=False, compare=False)
    """Seconds from `begun` to the arrival at each place, negative in the forward pass, float32 (rows, places); NaN if a
    step did not pass the place."""
    met: np.ndarray = field(repr=False, compare=False)
    """Seconds from `begun` to the end of the pass's collectives, float32 (rows,)."""


@dataclass(frozen=True)
class RankMeasurements:
    """Measurements of one worker's steps, as sent to the driver."""

    rank: int
    node: str
    device: str
    first_step: int
    """Number of the first measured step, from 1."""
    num_steps: int
    columns: tuple[str, ...]
    """Names of the columns: `step`, values of `Phase`, and `pauses`."""
    every: int
    """Interval between steps with a row."""
    rows: np.ndarray = field(repr=False, compare=False)
    """Seconds in single steps `first_step`, `first_step + every`, ..., float32 (rows, columns)."""
    totals: np.ndarray = field(repr=False, compare=False)
    """Total seconds of all measured steps, float64 (columns,)."""
    series: np.ndarray = field(repr=False, compare=False)
    """Total seconds in each bucket, float64 (buckets, columns)."""
    bucket_width: int
    """Number of steps in each bucket."""
    worst_gap: float | None
    """See `RankProfile.worst_gap`."""
    gap: float | None
    """Relative difference between all measured steps and the sum of their parts."""
    memory: MemoryNumbers = field(default_factory=MemoryNumbers)
    arrivals: RankArrivals | None = None
    """Arrivals at the collectives of its steps; None if not measured."""
    collectives: list[CollectiveRow] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    """Missing measurements, with reasons."""
    links: list[LinkRow] = field(default_factory=list)
    """Bandwidth from this rank to each other rank, if measured."""
