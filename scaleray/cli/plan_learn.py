"""`scaleray plan --learn`: the team's own measured points, and what of them the plan uses."""

from __future__ import annotations

from scaleray.config import RunConfig
from scaleray.errors import UsageError
from scaleray.planner.answers.learning import Lesson, learn
from scaleray.planner.answers.team_points import TeamPoints, model_key
from scaleray.planner.cost.block_pass import Measured
from scaleray.planner.cost.uncertainty import Anchor
from scaleray.planner.hardware.kinds import Cluster
from scaleray.planner.hardware.lookup import Catalogue
from scaleray.planner.models.profile import ModelProfile

TRACKING = "tracking"
"""Value for the team's MLflow, where scaleray records anyway."""


def lesson_of(
    where: str, model: ModelProfile, cluster: Cluster, *, config: RunConfig | None, catalogue: Catalogue
) -> Lesson:
    """Corrections from the points there for this question. config: of the workload that is planned; None for a model by
    name. Raises UsageError if there are none for this kind of GPU.
    """
    key = None if config is None else model_key(config.to_dict())
    return learn(_points(where), model, cluster, key=key, catalogue=catalogue)


def used(lesson: Lesson) -> tuple[Measured | None, Anchor | None]:
    """The factors for the plan, and for points of its own model the one that it is nearest to, which narrows the
    intervals; nothing where they predict no better than data sheets."""
    if not lesson.is_used:
        return None, None
    nearest = lesson.nearest
    return lesson.measured, Anchor(nearest.layout, nearest.gpu) if lesson.is_of_model else None


def _points(where: str) -> TeamPoints:
    if where != TRACKING and "://" not in where:
        raise UsageError("--learn", where, f"it must be {TRACKING}, or MLflow's URI such as sqlite:////runs/mlflow.db")
    from scaleray.tracking.registry.points import points_in_mlflow

    return points_in_mlflow(None if where == TRACKING else where)
