"""Tags and description of a promoted version in MLflow's registry."""

from __future__ import annotations

from scaleray.models.registry import PROMOTION_TAG, STATEMENT_TAG
from scaleray.records.gates import GateRecord
from scaleray.records.promotion import Promotion
from scaleray.records.run_record import RunRecord


def version_tags(found: Promotion, gates: GateRecord, *, by: str, statement_sha256: str) -> dict[str, str]:
    """Tags of the version: its promotion, its statement, the answers of the gates, and the user."""
    return {
        PROMOTION_TAG: str(found.promotion),
        STATEMENT_TAG: statement_sha256,
        "scaleray.gates": gates.answer,
        **{f"scaleray.gate.{name}": answer for name, answer in found.gates.items()},
        "scaleray.by": by,
    }


def version_description(found: Promotion, run: RunRecord) -> str:
    """Markdown for MLflow's page of the version."""
    rows = "\n".join(f"| {name} | {answer} |" for name, answer in found.gates.items())
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in sorted(run.metrics.items()) if value is not None)
    workers = f"{run.workers} worker{'s' * (run.workers > 1)}"
    return (
        f"{run.name}: {run.strategy} on {workers}, {run.steps} steps. {metrics}\n\n| gate | answer |\n|---|---|\n{rows}"
    )
