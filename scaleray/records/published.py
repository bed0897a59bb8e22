"""Inputs to a run's published metrics: facts known before its start, and samples from its workers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from scaleray.records.start import steady_time

RAYS_JOB = "RAY_JOB_SUBMISSION_ID"
"""Environment variable that Ray sets in a job's driver."""


@dataclass(frozen=True)
class PublishedFacts:
    """Facts that a run publishes from its start, and how it publishes them."""

    port: int | None = None
    """Port on 127.0.0.1 at which its metrics are served; None: they are not served."""
    job: str = ""
    """Submission id of the Ray job, if it is one."""
    checkpoint_every_steps: int | None = None
    checkpoint_every_s: float | None = None
    expected_samples_per_s: float | None = None
    flops_per_sample: float | None = None
    peak_flops_per_s: float | None = None
    """Dense peak of one worker's device; None until the workers are known."""
    precision: str = "fp32"


@dataclass(frozen=True)
class CountedFlops:
    """FLOPs of one sample, forward and backward, as counted during the run."""

    flops_per_sample: float


@dataclass(frozen=True)
class LinksMeasured:
    """The slowest link, found by measuring each pair of ranks. source, to: its ranks; `any` if all links of one rank
    are slow.
    """

    step: int
    source: str
    to: str
    bytes_per_s: float
    usual_bytes_per_s: float | None
    """Bandwidth of the other links; None if there are too few to compare."""
    recorded_at: float = field(default_factory=steady_time, compare=False)


@dataclass(frozen=True)
class RankSample:
    """Measurements of one worker over the steps since its last sample. Values that could not be measured are None or
    omitted."""

    rank: int
    node: str
    world_size: int
    step: int
    """Number of its last step."""
    step_at: float
    """Time at the end of that step, in seconds since 1970."""
    step_time_s: float | None = None
    """Mean time of a step."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Mean seconds per step of each part, by the values of `Phase`."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes by kind: `used`, `resident`, `peak`, `rounding`, `cached`, `stranded`, `largest_hole`."""
    memory_limit_bytes: int | None = None
    ahead_s: tuple[float, ...] = ()
    """Median seconds from its arrival at each synchronisation of a step to the end of the step's collectives; the
    worker with the smallest value arrived last."""
    device: str = ""
    """Name of its GPU; empty on a CPU."""
    recorded_at: float = field(default_factory=steady_time, compare=False)
