"""Records of a model that is promoted, or checked, in MLflow's registry."""

from __future__ import annotations

from dataclasses import dataclass

from scaleray.records.json_record import JsonRecord


@dataclass(frozen=True, kw_only=True)
class Promotion(JsonRecord):
    """Result of a promotion. answer: of the gates; version: None if the gates refused it."""

    model: str
    alias: str | None
    answer: str
    gates: dict[str, str]
    """Answer of each gate by its name."""
    not_passed: list[str]
    """Checks of the gates that did not pass, and why."""
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

    @property
    def summary(self) -> str:
        """The version that was promoted, or why none was."""
        return "; ".join(self.lines())

    def lines(self) -> list[str]:
        """Gates that did not pass, and the promoted version."""
        name = f"{self.model}@{self.alias}" if self.alias else f"{self.model}/{self.version}"
        if self.version is None:
            return [*self.not_passed, f"nothing is promoted: {name} stays as it is"]
        was = f", was version {self.was}" if self.was not in (None, self.version) else ""
        return [*self.not_passed, f"{name} is version {self.version}{was}"]
