"""Records of a model that is promoted, or checked, in MLflow's registry."""

from __future__ import annotations

from dataclasses import dataclass

from scaleray.records.json_record import JsonRecord


@dataclass(frozen=True, kw_only=True)
class Promotion(JsonRecord):
    """What became of a promotion. answer: of the gates; version: None where they did not let it through."""

    model: str
    alias: str | None
    answer: str
    gates: dict[str, str]
    """Answer of each gate by its name."""
    lines: list[str]
    """What did not pass, and why."""
    run: str
    run_id: str
    weights: str | None = None
    """Which weights of the run, in words."""
    promotion: str | None = None
    """Id of the promotion, the same for the same model, evidence and policy."""
    version: int | None = None
    was: int | None = None
    """Version that the alias named before."""
    uri: str | None = None
    """How others load the model."""
    statement_sha256: str | None = None
