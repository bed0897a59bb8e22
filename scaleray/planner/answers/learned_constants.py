"""Learn corrections from a team's own measured steps: ratios of measured to predicted time for compute and collectives,
which must improve predictions of held-out steps.

The two factors are the most likely ones, if the error of a step's logarithm is `NOISE` and the factors' prior is 1
within `DOUBT`. They are validated on held-out points: each study is predicted from all others, or each point if there
is only one study. They are used only if they help there.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scipy.optimize import least_squares

from scaleray.common.printed import quantity
from scaleray.config.hardware.hardware_kinds import Cluster
from scaleray.config.hardware.lookup import Catalogue
from scaleray.errors import UsageError
from scaleray.planner.answers.calibration import MOST_COMM
from scaleray.planner.answers.team_points import TeamPoint, TeamPoints
from scaleray.planner.cost.block_pass import Measured
from scaleray.planner.cost.layout import Layout
from scaleray.planner.cost.step_time import step_time
from scaleray.planner.models.block_counts import ModelProfile

NOISE = 0.15
"""Standard deviation of the logarithm of measured over predicted steps near a measured one, as in `uncertainty`."""
DOUBT = (1.0, 0.5)
"""Prior standard deviations of the logarithms of both factors: wide for compute, since rates of CPUs are known only to
an order of magnitude; for communication, the variation among catalogues."""
MOST_COMPUTE = 20.0
"""Largest factor, up or down, by which compute is scaled; a larger error is not in its rate."""


@dataclass(frozen=True)
class Errors:
    """Median and largest relative error of step times."""

    median: float
    largest: float

    @classmethod
    def of(cls, logarithms: Sequence[float]) -> Errors:
        """Errors from logarithms of measured over predicted."""
        shares = [math.expm1(abs(one)) for one in logarithms]
        return cls(statistics.median(shares), max(shares))

    def __str__(self) -> str:
        return f"{100 * self.median:.3g} % (largest {100 * self.largest:.3g} %)"


@dataclass(frozen=True)
class Lesson:
    """Learned corrections. points: those from which they were learned. before, after: errors on held-out points; after
    is None if there are too few points.
    """

    measured: Measured
    points: tuple[TeamPoint, ...]
    before: Errors
    after: Errors | None
    left_out: str
    is_of_model: bool
    nearest: TeamPoint

    @property
    def is_used(self) -> bool:
        """Whether to use the factors, since they predict held-out points better than data sheets do."""
        return self.after is not None and self.after.median < self.before.median

    def lines(self) -> list[str]:
        """Lines on the learned corrections and how much they improve predictions."""
        studies = len({point.study for point in self.points})
        whose = "this model" if self.is_of_model else "other models"
        number = f"{studies} studies" if studies != 1 else "1 study"
        taught = f"{quantity(len(self.points), 'point')} in {number} of {whose}"
        factors = f"compute x {self.measured.compute_scale:.3g}, communication x {self.measured.comm_scale:.3g}"
        if self.after is None:
            return [f"learned nothing from {taught}: at least two are needed, so that one can test the other"]
        errors = f"median error of a step: {self.before} from data sheets, {self.after} as learned; {self.left_out}"
        if self.is_used:
            return [f"learned from {taught}: {factors}", errors]
        return [f"learned from {taught}, but not used: predictions did not improve", errors]


def learn(known: TeamPoints, model: ModelProfile, cluster: Cluster, *, key: str | None, catalogue: Catalogue) -> Lesson:
    """Return corrections from the points on the cluster's type of GPU, using only the same model's points if there are
    any. key: of the planned model, None if it is not the team's own. Raises UsageError without such points.
    """
    on_gpu = [point for point in known.points if point.gpu == cluster.gpu.name]
    if not on_gpu:
        others = ", ".join(sorted({point.gpu for point in known.points}))
        hint = f"omitted: {'; '.join(known.skipped[:3])}" if known.skipped else "plan for hardware that was measured"
        found = f"found points only on {others}" if known.points else "found no points"
        raise UsageError.problem("--learn", f"{found}, but the plan is for {cluster.gpu.name}", hint)
    own = [point for point in on_gpu if point.model == key]
    points = own or on_gpu
    asked = [_Asked(point, model if point.model == key else known.profile(point.model), catalogue) for point in points]
    before = [one.error(Measured()) for one in asked]
    studies = sorted({point.study for point in points})
    groups = [[one for one in asked if one.point.study == name] for name in studies]
    if len(groups) == 1:
        groups = [[one] for one in asked]
    after = None
    if len(groups) > 1:
        after = Errors.of([
            one.error(fit)
            for group in groups
            for fit in [_fit([other for other in asked if other not in group])]
            for one in group
        ])  # fmt: skip
    left_out = "each study from the others" if len(studies) > 1 else "each point from the others of its study"
    nearest = min(points, key=lambda point: abs(math.log(point.workers / cluster.num_gpus)))
    return Lesson(_fit(asked), tuple(points), Errors.of(before), after, left_out, bool(own), nearest)


class _Asked:
    """A measured point as a question to the planner."""

    def __init__(self, point: TeamPoint, model: ModelProfile, catalogue: Catalogue) -> None:
        self.point, self.model = point, model
        self.layout: Layout = point.layout
        self.cluster = point.cluster(catalogue)

    def error(self, measured: Measured) -> float:
        """Logarithm of the measured over the predicted step."""
        found = step_time(self.model, self.layout, self.cluster, measured=measured, fused_attention=self._is_fused)
        return math.log(self.point.step_time_s / found.total_s)

    @property
    def _is_fused(self) -> bool:
        return "bf16" in self.cluster.gpu.peak_tflops and self.layout.precision not in ("fp32", "tf32")


def _fit(asked: Sequence[_Asked]) -> Measured:
    """Return the most likely factors, with equal weight for each study."""
    studies = [one.point.study for one in asked]
    weights = [math.sqrt(len(asked) / len(set(studies)) / studies.count(study)) / NOISE for study in studies]

    def residuals(logarithms: Sequence[float]) -> list[float]:
        measured = _factors(logarithms)
        misses = [weight * one.error(measured) for weight, one in zip(weights, asked, strict=True)]
        return [*misses, *(value / doubt for value, doubt in zip(logarithms, DOUBT, strict=True))]

    ends = [math.log(MOST_COMPUTE), math.log(MOST_COMM)]
    found = least_squares(residuals, [0.0, 0.0], bounds=([-end for end in ends], ends), diff_step=1e-3)
    return _factors(found.x)


def _factors(logarithms: Sequence[float]) -> Measured:
    compute, comm = (math.exp(float(value)) for value in logarithms)
    return replace(Measured(), compute_scale=compute, comm_scale=comm)
