"""Registry fields that every run, study, sweep, plan and profile has in MLflow."""

from dataclasses import dataclass
from typing import Any

OWNER, PURPOSE, HARDWARE, TOPOLOGY = "mlflow.user", "scaleray.purpose", "scaleray.hardware", "scaleray.topology"
PROFILED = "scaleray.profiled"
"""Tag of a training that was run only for its profile."""
EXCEPTIONS = "scaleray.policy_exceptions"
"""Tag that lists each violated constraint of the team's policy with the reason."""
INVALID = "scaleray.invalid"
"""Tag of an experiment whose numbers must not be used: the reason, its author and the time."""
SEAL = "scaleray.seal."
"""Prefix of tags with the SHA-256 of measurements."""
CERTIFICATE_SHA256 = f"{SEAL}certificate"
"""Tag of a verification with the SHA-256 of its certificate.json."""


REQUIRED = (
    "owner", "purpose", "hardware", "topology", "global_batch", "rule", "data_hash", "code", "environment", "cost",
)  # fmt: skip
"""Fields of every experiment; docs/experiments.md lists their places in MLflow."""

KINDS = {
    "train": "run", "scaling-study": "study", "scaling-point": "point", "sweep": "sweep", "trial": "trial",
    "plan": "plan",
}  # fmt: skip
"""Registry name of each kind of run; a profiled run is a `profile`."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One experiment in the registry. values: its known fields by name. problem: evidence that its numbers were changed
    since the measurement; None if they were not."""

    run_id: str
    parent_id: str | None = None
    values: dict[str, Any]
    problem: str | None = None

    @property
    def kind(self) -> str:
        """Kind of the experiment."""
        return str(self.values["kind"])

    @property
    def is_usable(self) -> bool:
        """Whether its numbers may be used, as they are neither marked invalid nor changed."""
        return self.problem is None and self.values.get("invalid") is None
