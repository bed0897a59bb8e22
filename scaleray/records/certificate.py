"""Certificates of `scaleray verify`: the question, each variant's outcome, the verdict, and the environment."""

import math
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from scaleray.records.json_record import JsonRecord

FILE = "certificate.json"
DATE = "%Y-%m-%dT%H:%M:%S%z"
Difference = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A difference, which is null in JSON if it is not finite."""


def _with_date(text: str) -> str:
    datetime.strptime(text, DATE)
    return text


@dataclass(frozen=True)
class Divergence:
    """Point at which two runs diverge. step: from 1; 0 is before the first step. parameter: the first one that differs,
    in model order."""

    step: int
    quantity: str
    """The quantity that differs: `model`, `dtype`, `initial parameters`, `parameters before`, `state before`, `buffers
    before`, `replicas before`, `rows`, `inputs`, `layers`, `count`, `loss`, `gradient`, `buffers`, `learning rate`,
    `parameters`, `final values`, `final weights`, `steps`, `restored parameters`, `restored state`, `restored buffers`,
    `evaluation`, `masks`, `averaging`, `own gradient`, `sent gradient` or `resume`."""
    difference: Difference
    parameter: str | None = None


@dataclass(frozen=True)
class Comparison:
    """Largest relative differences over a whole run, and its first divergence. NaN: not compared."""

    loss: Difference = math.nan
    grad_norm: Difference = math.nan
    parameters: Difference = math.nan
    """Largest difference of the final values, relative to each tensor's largest value."""
    divergence: Divergence | None = None

    @property
    def is_equal(self) -> bool:
        """Whether all differences are within the bound."""
        return self.divergence is None

    @property
    def largest(self) -> float:
        """The largest of the differences."""
        return max((d for d in (self.loss, self.grad_norm, self.parameters) if not math.isnan(d)), default=math.nan)


@dataclass(frozen=True)
class Mismatch:
    """Step and quantity in which a variant diverges from the reference, and the class of the mismatch."""

    step: int
    quantity: str
    parameter: str | None
    difference: Difference
    cause: str
    why: str


@dataclass(frozen=True)
class Outcome:
    """Result of one variant. verdict: equal, as promised, differs, or refused."""

    strategy: str
    world_size: int
    accumulation: int
    verdict: str
    words: str = ""
    """Limits of the verdict's scope, if any, or the reason for a refusal."""
    comparison: Comparison = field(default_factory=Comparison)
    own: Comparison | None = None
    """Comparison in the run's own precision, over steps that all start from the initial parameters; its limit is what
    rounding explains."""
    mismatch: Mismatch | None = None
    bound: float | None = None
    """Largest relative difference that counted as equal; larger than requested if rounding errors grow."""
    duration_s: float = 0.0
    workers: list[dict[str, Any]] = field(default_factory=list)
    """Hardware types of its workers, with their device."""
    layout: str = ""
    """Parallel degrees, such as `pipeline 2 x tensor 2`, if more than one axis has several workers."""

    @property
    def label(self) -> str:
        """Name of the variant, such as `ddp x 2`, with the number of micro-batches if it accumulates."""
        more = f", {self.accumulation} micro-batches" if self.accumulation > 1 else ""
        return (self.layout or f"{self.strategy} x {self.world_size}") + more


@dataclass(frozen=True)
class ResumeOutcome:
    """Result of one interruption. guilty: names of the parts of the state that differed; empty if none did."""

    label: str
    world_size: int
    interrupt_at: int
    steps: int
    is_equal: bool
    guilty: list[str]
    comparison: Comparison = field(default_factory=Comparison)
    duration_s: float = 0.0
    not_run: str = ""
    """Reason why this variant cannot run the workload, although one process can; empty if it ran."""


@dataclass(frozen=True, kw_only=True)
class Certificate(JsonRecord):
    """Fields common to all certificates, readable without the code that wrote them."""

    passed: bool
    verdict: str
    workload: str
    config_hash: str
    environment_hash: str
    bound: float
    precision: str
    steps: int
    where: str
    """Environment of the workers: Ray or gloo processes."""
    date: Annotated[str, AfterValidator(_with_date)]
    duration_s: float
    outcomes: list[Any]
    config: dict[str, Any]
    environment: dict[str, Any]
    run_dir: str
    tracking_uri: str
    run_id: str
    mlflow_link: str

    def lines(self) -> list[str]:
        """Lines with the verdict, what was verified, and the location of the certificate."""
        return [
            f"{'passed' if self.passed else 'failed'}: {self.verdict}",
            f"{self.workload}: {self.steps} steps in {self.precision}, bound {self.bound:g}, {len(self.outcomes)} "
            f"variants, {self.where}, {self.duration_s:.0f} s",
            f"MLflow: {self.mlflow_link}",
            f"certificate: {self.run_dir}/{FILE}",
        ]


@dataclass(frozen=True, kw_only=True)
class EqualityCertificate(Certificate):
    """Certificate on whether distributed runs equal the training of one process."""

    outcomes: list[Outcome]
    own_precision: str
    strategies: list[str]
    """Names of the strategies that ran, as in a run's record; `auto` is resolved."""
    world_sizes: list[int]
    accumulation: list[int]
    global_batch_size: int
    data: dict[str, Any]
    course: dict[str, int] = field(default_factory=dict)
    """Events within the compared steps: rows of an epoch, step of the resume, batch size after it, rows of an
    evaluation."""

    @property
    def written_at(self) -> float:
        """Seconds since 1970."""
        return datetime.strptime(self.date, DATE).timestamp()

    @property
    def workers(self) -> list[dict[str, Any]]:
        """Hardware of the compared workers; empty if only that of the driver is known."""
        return [worker for outcome in self.outcomes for worker in outcome.workers]


@dataclass(frozen=True, kw_only=True)
class ResumeCertificate(Certificate):
    """Certificate on whether interrupted and resumed runs equal the uninterrupted one.

    seed: random seed for the steps of interruption.
    """

    outcomes: list[ResumeOutcome]
    seed: int
