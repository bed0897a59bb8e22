"""Where the time of a run went: phases, lateness, collectives, goodput and memory, in record.json under `profile`.

A `RankMeasurements` is what one worker has measured; `scaleray/profiling/` makes a `RunProfile` of those of all ranks.
What could not be measured is None or left out, never 0. Durations are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from scaleray.common import metric_names as names

if TYPE_CHECKING:
    import numpy as np  # plans read records without it

MOST_BUCKETS = 200
"""Buckets that a run's steps are divided into at most, for figures over time."""


@dataclass(frozen=True)
class Spread:
    """Something that every step has, such as the seconds of a phase: over all measured steps, and over time."""

    total: float
    """Sum over all measured steps."""
    median: float
    p90: float
    series: list[float] = field(default_factory=list)
    """Mean of a step in each bucket of `RunProfile.buckets`."""


@dataclass(frozen=True)
class Buckets:
    """Steps in a row that series have one value for."""

    first_step: int
    """Number of the first measured step, from 1."""
    width: int
    """Steps in each bucket; the last one may have fewer."""
    count: int


@dataclass(frozen=True)
class BucketLateness:
    """How late a rank came to the collectives of one group of gradients in the backward pass, after the first rank."""

    bucket: int
    """Number of the group in the backward pass, from 0 for the last layers: a bucket of DDP, a unit of FSDP."""
    layers: str
    """Layers whose gradients it carries, such as `blocks.0-3`."""
    late_s: Spread
    last_share: float
    """Share of the steps in which this rank came last."""


@dataclass(frozen=True)
class Straggler:
    """A rank that makes the others wait, step after step."""

    rank: int
    phase: str
    """`forward` or `backward`: the pass in which it loses its time, as far as its arrivals tell. A delay between two
    steps' passes counts as one of the forward pass."""
    bucket: int | None
    """Group of gradients, as in `RankProfile.lateness`, that was the first to be late; None in the forward pass."""
    layers: str
    """Layers in which the time is lost; empty where it may be anywhere from the step before to the end of the forward
    pass."""
    late_s: float
    """Seconds that a step adds to its lateness there: the median of blocks of steps."""
    share: float
    """The same as a share of a step."""
    steps: int
    """Number of steps that were looked at."""
    p_value: float
    """Bound on the probability that ranks of the same speed show this somewhere."""


@dataclass(frozen=True)
class MemoryPeak:
    """The moment when a worker had most memory."""

    num_bytes: int
    step: int
    """Step in which it was, from 1."""
    phase: str
    """Phase of it, as `scaleray.records.phases` names them; empty where only the step is known."""
    at_s: float
    """Seconds after the start of the run."""


@dataclass(frozen=True)
class MemoryNumbers:
    """Memory that a worker holds without using it, by the reason, and the most it had. None: not measurable here."""

    rounding_bytes: int | None = None
    """Allocated less requested: blocks are rounded up."""
    cached_bytes: int | None = None
    """Reserved less active: kept by the allocator for the next request."""
    stranded_bytes: int | None = None
    """Unused parts of split blocks: the true fragmentation. They are among the cached bytes."""
    largest_hole_bytes: int | None = None
    """Largest piece that can be had without asking the device for more."""
    resident_bytes: int | None = None
    """Memory of the process on the host, with Python, torch and input."""
    retries: int | None = None
    """Times that the allocator had to give back all it kept, and ask again."""
    peak: MemoryPeak | None = None
    """Most that was allocated on the device; on the CPU, most resident memory that was seen."""
    series: dict[str, list[float | None]] = field(default_factory=dict)
    """Each of the above over time, in the buckets of the profile, by its name here; None for one without a sample."""


@dataclass(frozen=True)
class RankProfile:
    """Where the time of one rank went."""

    rank: int
    node: str
    device: str
    """`cpu` or `cuda`: on a GPU its own time is divided, by events, elsewhere that of the host."""
    steps: int
    """Number of measured steps. The first of a process is not among them: it compiles, and fills caches."""
    step: Spread
    """Seconds of a step, with an evaluation or a checkpoint that followed the one before."""
    phases: dict[str, Spread]
    """Seconds of each part of a step, by the values of `Phase`; a part that cannot be separated here is missing."""
    worst_gap: float | None
    """Largest difference between a step and the sum of its parts, in any step, as a share of the step."""
    pauses: Spread | None = None
    """Seconds of the garbage collector in a step, in whatever phases it fell; None where that was not measured."""
    late_s: Spread | None = None
    """How long after the first rank this one came to the collectives of a step, as the worst of them; None where
    arrivals are not measured."""
    lateness: list[BucketLateness] = field(default_factory=list)
    memory: MemoryNumbers = field(default_factory=MemoryNumbers)


@dataclass(frozen=True)
class CollectiveRow:
    """One kind of collective in one group, over all measured steps of one rank."""

    rank: int
    group: str
    """Name of the group, such as `dp`."""
    group_size: int
    operation: str
    count: int
    num_bytes: float
    """Payload that this rank gave, each once, whatever the algorithm made of it."""
    seconds: float | None = None
    """Time from the rank's own arrival to the end, summed; None where it is not measured."""
    bus_bandwidth: float | None = None
    """Bytes a second on the busiest link, by the size of this group."""
    exposed_share: float | None = None
    """Share of `seconds` in which the rank stood still for it."""


@dataclass(frozen=True)
class LinkRow:
    """Bandwidth from one rank to another, which `scaleray profile` measures for each pair alone after its steps."""

    sender: int
    receiver: int
    bytes_per_s: float
    num_bytes: int
    """Bytes of a message."""


@dataclass(frozen=True)
class Goodput:
    """How much of a run's time was steps that count, and what became of the rest. The seconds sum to `elapsed_s`."""

    elapsed_s: float
    seconds: dict[str, float]
    """Seconds by class: `productive` steps, `start`, `restart`, `repeated`, `input`, `checkpoint`, `evaluation`,
    `other`."""
    attempts: int = 1
    """How often the run was started: once, and once more for each time it was resumed or lost workers."""
    repeated_steps: int = 0
    """Steps that were taken again after a resume."""
    longest_without_checkpoint_s: float | None = None
    """Longest time of training whose work no checkpoint held yet: what a lost worker would have cost at worst. None
    where no step was taken, and in older records."""

    def shares(self) -> dict[str, float]:
        """Share of each class in the time that has gone by."""
        return {name: seconds / self.elapsed_s for name, seconds in self.seconds.items()} if self.elapsed_s else {}


@dataclass(frozen=True)
class RunProfile:
    """Where the time of a run went, on all its ranks."""

    buckets: Buckets
    ranks: list[RankProfile]
    closes: bool
    """Whether, on every rank, the parts of all its steps add up to those steps within 1 %."""
    gap: float | None
    """Difference between the steps and the sum of their parts, as a share, on the rank where it is worst."""
    gap_rank: int | None = None
    stragglers: list[Straggler] = field(default_factory=list)
    """Ranks that are late beyond chance, the worst first; healthy runs have none."""
    collectives: list[CollectiveRow] = field(default_factory=list)
    goodput: Goodput | None = None
    notes: list[str] = field(default_factory=list)
    """Missing measurements, and why."""
    traced_steps: int = 0
    """Steps at its end that a trace has slowed, which are not judged."""
    links: list[LinkRow] = field(default_factory=list)
    """Each pair of ranks that was measured alone, both ways."""

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
        """The profile in a record.json, of which newer versions may have more keys. None where there is none, or none
        that can be read."""
        try:
            return None if values is None else TypeAdapter(cls).validate_python(values)
        except ValidationError:
            return None


@dataclass(frozen=True)
class Places:
    """Collectives of a step at which arrivals are measured, in the order in which a rank comes to them."""

    forward: tuple[str, ...]
    """Layers that a rank computed before each place of the forward pass; empty where there were none."""
    backward: tuple[str, ...]
    """Layers whose gradients are computed before each place of the backward pass."""
    buckets: tuple[int, ...]
    """Number of the group of gradients that each of these places belongs to: it has one where they are reduced, and
    others on the way there."""
    bucket_layers: tuple[str, ...]
    """Layers of each group of gradients."""
    meets_once: bool
    """Whether a rank continues computing while collectives run, and waits for all of them at the end of the pass, as in
    DDP; otherwise it waits for each, as in FSDP.
    """
    end_of_forward: str = ""
    """Layers that a rank computes between the last place of the forward pass and the begin of the backward pass; empty
    where that is the whole forward pass and more."""


@dataclass(frozen=True)
class RankArrivals:
    """When the gradients of one rank were ready for their collectives, in seconds on the clock of its host."""

    rank: int
    clock: str
    """Name of the clock. Times of ranks with the same one can be compared as they are."""
    places: Places
    num_steps: int
    """Steps that were measured; of these, some have a row."""
    steps: np.ndarray = field(repr=False, compare=False)
    """Numbers of the steps that have a row, int64 (rows,)."""
    begun: np.ndarray = field(repr=False, compare=False)
    """Begin of the last backward pass, float64 (rows,)."""
    came: np.ndarray = field(repr=False, compare=False)
    """Seconds from there to the arrival at each place, negative in the forward pass, float32 (rows, places); NaN where
    a step did not come by."""
    met: np.ndarray = field(repr=False, compare=False)
    """Seconds from there until the collectives of the pass had ended, float32 (rows,)."""


@dataclass(frozen=True)
class RankMeasurements:
    """Measurements of one worker's steps, as they come to the driver."""

    rank: int
    node: str
    device: str
    first_step: int
    """Number of the first measured step, from 1."""
    num_steps: int
    columns: tuple[str, ...]
    """Names of the columns: `step`, values of `Phase`, and `pauses`."""
    every: int
    """Each how manyth step has a row."""
    rows: np.ndarray = field(repr=False, compare=False)
    """Seconds in single steps, float32 (rows, columns): of steps `first_step`, `first_step + every`, ..."""
    totals: np.ndarray = field(repr=False, compare=False)
    """Seconds in all measured steps, float64 (columns,)."""
    series: np.ndarray = field(repr=False, compare=False)
    """Seconds in each bucket, summed, float64 (buckets, columns)."""
    bucket_width: int
    """Steps in each bucket."""
    worst_gap: float | None
    """See `RankProfile.worst_gap`."""
    gap: float | None
    """Difference between all measured steps and the sum of their parts, as a share."""
    memory: MemoryNumbers = field(default_factory=MemoryNumbers)
    arrivals: RankArrivals | None = None
    """When it came to the collectives of its steps; None where that was not measured."""
    collectives: list[CollectiveRow] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    """Missing measurements, and why."""
    links: list[LinkRow] = field(default_factory=list)
    """Bandwidth of what this rank sent to each other one, if that was measured."""
