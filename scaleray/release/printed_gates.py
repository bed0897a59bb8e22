"""Print the gates' answers on the terminal: each gate with its checks, then the overall answer."""

from rich.console import Console

from scaleray.records.gate_answer import Check
from scaleray.records.gates import GateRecord

SIGNS = {"pass": "pass", "fail": "FAIL", "inconclusive": "open"}


def show_gates(console: Console, record: GateRecord) -> None:
    """Print the gates' answers."""

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    say(f"{record.run}: {_runs(record.candidates)}; baseline: {_runs(record.baselines)}")
    for note in record.notes:
        say(note)
    for gate in record.gates:
        say("")
        say(f"{gate.gate}: {gate.answer}")
        for check in gate.checks:
            say(f"  {SIGNS[check.answer]}  {check.what}: {check.words}")
            if more := _more(check):
                say(f"        {more}")
    say("")
    names = ", ".join(gate.gate for gate in record.gates if gate.answer == record.answer)
    say("pass: every gate" if record.answer == "pass" else f"{record.answer}: {names}")


def _more(check: Check) -> str:
    parts = []
    if check.power is not None and check.answer != "fail":
        parts.append(f"an equally good model passes with a probability of {check.power:.0%}")
    if check.runs_needed is not None and check.answer != "fail":
        likely = "90 % take" if check.power is not None else "it takes"
        parts.append(f"{likely} {check.runs_needed} {check.needed_of}")
    if check.remedy and check.answer != "pass":
        parts.append(f"next: {check.remedy}")
    return "; ".join(parts)


def _runs(names: list[str]) -> str:
    return f"{len(names)} run{'' if len(names) == 1 else 's'}" if names else "none"
