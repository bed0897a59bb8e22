"""Provenance of every run in MLflow: its user, its commit, and its data."""

from collections.abc import Mapping
from typing import Any

from scaleray.common import metric_names as names
from scaleray.common.own_folder import user_name

TRAINING = "train"


def source_tags(workload: str, git: Mapping[str, Any]) -> dict[str, str]:
    """MLflow's own tags for the owner, the source and the commit. git: result of `reproducibility.fingerprint`."""
    tags = {"scaleray.workload": workload, "mlflow.source.name": workload, "mlflow.source.type": "JOB"}
    if (user := user_name()) is not None:
        tags["mlflow.user"] = user
    if git:
        tags["mlflow.source.git.commit"] = git["commit"]
        if git["is_dirty"] is not None:
            tags["scaleray.git_is_dirty"] = str(git["is_dirty"]).lower()
    return tags


def cost_of(worker_s: float, *, price_per_worker_hour: float | None) -> dict[str, float]:
    """Metrics of the cost of an experiment. worker_s: seconds of all workers together."""
    hours = worker_s / 3600
    price = {} if price_per_worker_hour is None else {names.COST.name: hours * price_per_worker_hour}
    return {names.WORKER_HOURS.name: hours, **price}


def dataset(split: str, facts: Mapping[str, Any], *, workload: str) -> dict[str, Any]:
    """Arguments of `LogDataset` for a split. facts: from the description of its source."""
    return {
        "name": split,
        "digest": str(facts.get("sha256") or "unhashed")[:32],
        "context": "training" if split == TRAINING else "evaluation",
        "source": {"workload": workload, "split": split},
        "profile": dict(facts),
    }
