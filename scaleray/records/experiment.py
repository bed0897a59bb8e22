"""Fields that a team needs of every run, study, sweep, plan and profile, and the place of each in MLflow. A field that
MLflow or scaleray records anyway keeps its name there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scaleray import metric_names as names

OWNER, PURPOSE, HARDWARE, TOPOLOGY = "mlflow.user", "scaleray.purpose", "scaleray.hardware", "scaleray.topology"
PROFILED = "scaleray.profiled"
"""Tag of a training whose only purpose is to see where its time goes."""
EXCEPTIONS = "scaleray.policy_exceptions"
"""Tag with each constraint of the team's policy that is broken, and the reason."""
INVALID = "scaleray.invalid"
"""Tag of an experiment that must not be used: the reason, its author and the time."""
SEAL = "scaleray.seal."
"""Beginning of tags with the SHA-256 of what was measured."""
CERTIFICATE_SHA256 = f"{SEAL}certificate"
"""Tag of a verification with the SHA-256 of its certificate.json."""


@dataclass(frozen=True)
class Field:
    """A field that every experiment has. place: its location in MLflow."""

    help: str
    place: str


REQUIRED: dict[str, Field] = {
    "owner": Field("who answers for it: tracking.owner, else the user's name", f"tag {OWNER}"),
    "purpose": Field("what it is for: tracking.purpose", f"tag {PURPOSE}"),
    "hardware": Field("processors or GPUs that it ran on, with their number", f"tag {HARDWARE}"),
    "topology": Field("nodes and workers", f"tag {TOPOLOGY}"),
    "global_batch": Field("samples or tokens of a step, over all workers", "param batch.global_size"),
    "rule": Field("rule by which the learning rate follows the batch", "param optimizer.rule"),
    "data_hash": Field("SHA-256 of the training data", "dataset train"),
    "code": Field("commit", "tag mlflow.source.git.commit"),
    "environment": Field("hash of packages, drivers and machine", "tag scaleray.environment_hash"),
    "cost": Field("worker hours, and their price where study.price_per_worker_hour is given", names.COST.name),
}
"""Fields that every experiment has, by name."""

KINDS = {
    "train": "run", "scaling-study": "study", "scaling-point": "point", "sweep": "sweep", "trial": "trial",
    "plan": "plan",
}  # fmt: skip
"""Name of a kind of run in the registry. A run that was profiled is a `profile`."""

COLUMNS: dict[str, str] = {
    "name": "its name",
    "kind": "run, profile, study, point (of a study), sweep, trial or plan",
    "status": "FINISHED, FAILED, KILLED or RUNNING",
    "started": "when it began, as 2026-11-24T03:05:00",
    "model": "the workload, without its path",
    "gpus": "number of workers, one for each GPU; of a study the largest",
    "strategy": "strategy",
    **{name: one.help for name, one in REQUIRED.items() if name != "cost"},
    "worker_hours": "hours of all workers together",
    "cost": "price of these hours",
    "samples_per_s": "throughput",
    "step_time_s": "seconds of a step",
    "efficiency": "throughput beside that of the base, over the ideal; of a study at its largest size",
    "speedup": "throughput beside that of the base",
    "mfu": "model FLOPs over the peak",
    "mode": "strong or weak, of a point",
    "invalid": "why it must not be used",
    "exceptions": "constraints of the team's policy that it breaks, with the reason",
}
"""Fields that may be asked for and are shown, by name."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One experiment as the registry knows it. values: of `COLUMNS`, only what is known.

    metrics and params: everything that MLflow has, by its names there. problem: why its numbers cannot be what was
    measured, where they cannot.
    """

    run_id: str
    parent_id: str | None = None
    values: dict[str, Any]
    metrics: Mapping[str, float] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    problem: str | None = None

    @property
    def kind(self) -> str:
        """Its kind."""
        return str(self.values["kind"])

    @property
    def is_usable(self) -> bool:
        """Whether its numbers may be used: neither invalid nor changed."""
        return self.problem is None and self.values.get("invalid") is None

    def asked(self) -> dict[str, Any]:
        """Everything that a condition can ask for, by name."""
        return {**self.params, **self.metrics, **self.values}

    def missing(self) -> list[str]:
        """Required fields that are not known."""
        return [name for name in REQUIRED if self.values.get("worker_hours" if name == "cost" else name) is None]

    def to_dict(self) -> dict[str, Any]:
        """The experiment as JSON can hold it."""
        known = {name: self.values.get(name) for name in COLUMNS}
        return {"run_id": self.run_id, **known, "missing": self.missing(), "problem": self.problem}
