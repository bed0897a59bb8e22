"""Who ran what, from which commit, on which data: what every run in MLflow says of where it comes from."""

from __future__ import annotations

import contextlib
import getpass
from collections.abc import Mapping
from typing import Any

TRAINING = "train"


def source_tags(workload: str, git: Mapping[str, Any]) -> dict[str, str]:
    """MLflow's own tags for the owner, the source and its commit. git: as `reproducibility.fingerprint` found it."""
    tags = {"scaleray.workload": workload, "mlflow.source.name": workload, "mlflow.source.type": "JOB"}
    with contextlib.suppress(KeyError, OSError):  # in a container the user may have no name
        tags["mlflow.user"] = getpass.getuser()
    if git:
        tags["mlflow.source.git.commit"] = git["commit"]
        if git["is_dirty"] is not None:
            tags["scaleray.git_is_dirty"] = str(git["is_dirty"]).lower()
    return tags


def dataset(split: str, facts: Mapping[str, Any], *, workload: str) -> dict[str, Any]:
    """A split as the arguments of `LogDataset`. facts: as its source describes itself."""
    return {
        "name": split,
        "digest": str(facts.get("sha256") or "unhashed")[:32],
        "context": "training" if split == TRAINING else "evaluation",
        "source": {"workload": workload, "split": split},
        "profile": dict(facts),
    }
