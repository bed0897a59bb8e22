"""Record of a promotion in MLflow's registry, or of a check of a promoted model."""

from dataclasses import dataclass

from scaleray.records.json_record import JsonRecord


@dataclass(frozen=True, kw_only=True)
class Promotion(JsonRecord):
    """Result of a promotion. answer: of the gates; version: the promoted one, None if a gate did not pass."""

    model: str
    alias: str | None
    answer: str
    gates: dict[str, str]
    """Result of each gate by name."""
    not_passed: list[str]
    """Checks of the gates that did not pass, with reasons."""
    run: str
    run_id: str
    weights: str | None = None
    """Which of the run's weights were used, as text."""
    promotion: str | None = None
    """Id of the promotion; equal for equal model, evidence and policy."""
    version: int | None = None
    was: int | None = None
    """Version to which the alias pointed before."""
    uri: str | None = None
    """URI for loading the model."""
    statement_sha256: str | None = None

    @property
    def summary(self) -> str:
        """The promoted version, or the reason why none was."""
        return "; ".join(self.lines())

    def lines(self) -> list[str]:
        """Gates that did not pass, and the promoted version."""
        name = f"{self.model}@{self.alias}" if self.alias else f"{self.model}/{self.version}"
        if self.version is None:
            return [*self.not_passed, f"nothing was promoted: {name} is unchanged"]
        was = f", was version {self.was}" if self.was not in (None, self.version) else ""
        return [*self.not_passed, f"{name} is version {self.version}{was}"]
