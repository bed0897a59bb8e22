"""Record of one call of the gates."""

from dataclasses import dataclass
from typing import Any

from scaleray.records.gate_answer import Answer, GateResult
from scaleray.records.json_record import JsonRecord


@dataclass(frozen=True, kw_only=True)
class GateRecord(JsonRecord):
    """Results of the gates, readable without the code that wrote them."""

    answer: Answer
    gates: list[GateResult]
    run: str
    candidates: list[str]
    baselines: list[str]
    policy: dict[str, Any]
    notes: list[str]
    date: str

    @property
    def summary(self) -> str:
        """Result of each gate, and every check that did not pass."""
        answers = ", ".join(f"{gate.gate} {gate.answer}" for gate in self.gates)
        return "; ".join([answers, *self.not_passed])

    @property
    def not_passed(self) -> list[str]:
        """The checks that did not pass, each with its gate."""
        return [
            f"{gate.gate}: {check.what}: {check.words}"
            for gate in self.gates
            for check in gate.checks
            if check.answer != "pass"
        ]

    def lines(self) -> list[str]:
        """Lines with the overall result, the result of each gate, and the checks that did not pass."""
        found = [f"{self.answer}: {self.run}"]
        for gate in self.gates:
            found.append(f"{gate.gate}: {gate.answer}")
            found += [f"  {check.what}: {check.words}" for check in gate.checks if check.answer != "pass"]
        return found
