"""Requirements of a team on a model before it goes into production: one section for each gate.

An omitted key has its default; None disables a check. A requirement whose fact is unknown makes a gate inconclusive,
never passed."""

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from scaleray.config.base import Settings, Target
from scaleray.release.gates.confidence import ALPHA, Better


class FingerprintPolicy(Settings):
    """Facts that candidate and baseline must have in common."""

    may_differ: tuple[str, ...] = ("environment.memory_gib", "environment.cpu.cores", "environment.cpu.threads")
    """Prefixes of keys below `code.`, `environment.` and `data.` that may differ."""
    allow_uncommitted: bool = False
    """Whether runs with uncommitted changes may pass."""


class EqualityPolicy(Settings):
    """Requirements on the certificate of `scaleray verify`."""

    max_age_days: Annotated[float | None, Field(gt=0)] = 90.0
    """Oldest certificate that counts, in days."""
    max_bound: Annotated[float, Field(gt=0)] = 1e-6
    """Largest allowed bound of a certificate."""


class ScalingPolicy(Settings):
    """Efficiency that a scaling study must show for the candidate's number of workers."""

    min_efficiency: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Smallest efficiency; the lower end of its interval must be above it."""
    mode: Literal["strong", "weak"] = "strong"
    """Curve that is evaluated."""
    base_workers: Annotated[int, Field(ge=1)] = 1
    """Largest number of workers with which a study may begin; its efficiency is relative to this number."""
    min_launches: Annotated[int, Field(ge=2)] = 3
    """Fewest measurements of a number of workers; a single measurement does not show the spread."""


class ConvergencePolicy(Settings):
    """Largest amount by which the candidate may learn worse than the baseline, and the required proof."""

    target: Target | None = None
    """Target for which samples are compared, such as `test/accuracy >= 0.97`; None: the config's own `stop.at`."""
    margin: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Largest share by which the candidate may need more samples to the target."""
    metric: str | None = None
    """Metric of the last evaluation to compare in addition, and its better direction, such as `test/loss min`; None:
    the target's."""
    metric_margin: Annotated[float, Field(gt=0)] = 0.01
    """Largest amount by which the candidate's metric may be worse, in the metric's own unit."""
    ask_for: Literal["not worse", "equal"] = "not worse"
    """Whether the candidate may be better by more than the margin."""
    not_faster_than_chance: bool = False
    """Whether a candidate that needs suspiciously few samples fails, by MLPerf's test. Only for unchanged recipes, as
    it refuses better ones."""
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = ALPHA
    """Probability of passing at the margin, for each test."""
    min_runs: Annotated[int, Field(ge=2)] = 5
    """Fewest runs of each side."""
    may_miss: Annotated[int, Field(ge=0)] = 0
    """Number of candidates that may miss the target."""

    @field_validator("metric")
    @classmethod
    def _has_direction(cls, metric: str | None) -> str | None:
        if metric is not None and not re.fullmatch(r"\S+/\S+ (min|max)", metric):
            raise ValueError("it must be a metric and its better direction, min or max, such as test/loss min")
        return metric

    @property
    def metric_name(self) -> str | None:
        """Name of the metric in `metric`, or None."""
        return self.metric.partition(" ")[0] if self.metric is not None else None

    @property
    def better(self) -> Better | None:
        """Better direction of `metric`; None without it."""
        return None if self.metric is None else "lower" if self.metric.endswith(" min") else "higher"


class OperationsPolicy(Settings):
    """Requirements on the operation of every candidate."""

    min_goodput: Annotated[float | None, Field(gt=0, le=1)] = None
    """Smallest share of a run's time in productive steps; the lower end of the interval over the candidates must
    be above it."""
    max_checkpoint_interval_s: Annotated[float | None, Field(gt=0)] = None
    """Longest measured training time without a checkpoint, in s: the work lost with a worker."""
    min_faults_survived: Annotated[int | None, Field(ge=1)] = None
    """Fewest times that finished runs of this training resumed from a checkpoint after a fault."""
    min_memory_headroom: Annotated[float | None, Field(ge=0, lt=1)] = None
    """Smallest share of free device memory at the peak."""
    max_nonfinite_steps: Annotated[int | None, Field(ge=0)] = 0
    """Maximum number of steps whose loss or gradient is not finite."""
    no_alerts_of: tuple[str, ...] = ("critical",)
    """Severities at which no alert may have been raised."""


class DriftPolicy(Settings):
    """Allowed drift from the runs of a registered version (`scaleray gate --against NAME@ALIAS`); `convergence`
    evaluates how they learn."""

    margin_slower: Annotated[float, Field(gt=0)] = 0.1
    """Largest share by which a sample may take longer."""
    margin_shares: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Largest difference between the shares of rows below any value of a column (the distance of Kolmogorov and
    Smirnov): 0.15 if normal rows have moved by 0.38 of their standard deviation."""
    max_new: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """Largest share of rows with a value that the promoted data lacked, such as a new label, or with a non-finite
    one."""
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = ALPHA
    """Probability of passing at a margin, for each test."""
    min_runs: Annotated[int, Field(ge=2)] = 3
    """Fewest runs of each side for comparing speed."""


class Policy(Settings):
    """The whole policy, as in its YAML file."""

    fingerprint: FingerprintPolicy = FingerprintPolicy()
    equality: EqualityPolicy = EqualityPolicy()
    scaling: ScalingPolicy = ScalingPolicy()
    convergence: ConvergencePolicy = ConvergencePolicy()
    operations: OperationsPolicy = OperationsPolicy()
    drift: DriftPolicy = DriftPolicy()
