"""What a mutation pass found: a line of JSON for each mutant as it is judged, and a page of Markdown at the end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs.mutation.judge import Outcome
from jobs.mutation.mutants import Mutant

EQUIVALENT = Path(__file__).parent / "equivalent.json"
LONGEST = 60


def row_of(mutant: Mutant, outcome: Outcome, reasons: Mapping[tuple[str, ...], str]) -> dict[str, Any]:
    """Everything about one mutant. A survivor that is argued to change nothing is `equivalent`."""
    reason = reasons.get(mutant.key, "")
    verdict = "equivalent" if outcome.verdict == "survived" and reason else outcome.verdict
    return {
        "file": mutant.file,
        "line": mutant.line,
        "function": mutant.function,
        "operator": mutant.operator,
        "before": mutant.before,
        "after": mutant.after,
        "verdict": verdict,
        "by": outcome.by,
        "tests": outcome.num_tests,
        "seconds": outcome.seconds,
        "reason": reason if verdict == "equivalent" else "",
    }


def equivalent_ones(path: Path = EQUIVALENT) -> dict[tuple[str, ...], str]:
    """Why mutants change nothing that anybody could notice, by `Mutant.key`."""
    return {tuple(one["mutant"]): one["reason"] for one in json.loads(path.read_text())}


def append(path: Path, row: Mapping[str, Any]) -> None:
    """One line; a pass that is interrupted keeps what it has."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """All rows so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def share_killed(rows: Sequence[Mapping[str, Any]]) -> float:
    """Of those that change something."""
    real = [row for row in rows if row["verdict"] != "equivalent"]
    return sum(row["verdict"] in ("killed", "timed out") for row in real) / len(real) if real else 1.0


def page(rows: Sequence[Mapping[str, Any]], *, title: str, about: Iterable[str]) -> str:
    """Markdown: the counts by room, then survivors and equivalent ones, then every mutant."""
    counts = Counter((_room(row), row["verdict"]) for row in rows)
    rooms = sorted({_room(row) for row in rows})
    verdicts = ("killed", "timed out", "survived", "not judged", "equivalent")
    lines = [
        f"# {title}",
        "",
        *about,
        "",
        f"**{share_killed(rows):.1%} killed** of {sum(r['verdict'] != 'equivalent' for r in rows)}.",
        "",
    ]
    lines += [f"| room | {' | '.join(verdicts)} |", "|---" + "|--:" * len(verdicts) + "|"]
    lines += [f"| {room} | {' | '.join(str(counts[room, v]) for v in verdicts)} |" for room in rooms]
    for verdict, heading in (("survived", "Survivors"), ("equivalent", "Equivalent: nobody could notice")):
        if chosen := [row for row in rows if row["verdict"] == verdict]:
            lines += ["", f"## {heading}", "", "| where | change | why |", "|---|---|---|"]
            lines += [f"| {_where(row)} | {_change(row)} | {row['reason']} |" for row in chosen]
    lines += ["", "## All", "", "| where | change | verdict | by |", "|---|---|---|---|"]
    lines += [
        f"| {_where(row)} | {_change(row)} | {row['verdict']} | {_cell(row['by'].rpartition('::')[2])} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def _room(row: Mapping[str, Any]) -> str:
    return str(row["file"]).split("/")[1]


def _where(row: Mapping[str, Any]) -> str:
    return f"{str(row['file']).removeprefix('scaleray/')}:{row['line']}"


def _change(row: Mapping[str, Any]) -> str:
    return f"{row['operator']}: {_cell(row['before'])} -> {_cell(row['after']) or 'nothing'}"


def _cell(text: str) -> str:
    flat = " ".join(text.split())
    short = flat if len(flat) <= LONGEST else flat[: LONGEST - 3] + "..."
    return f"`{short}`".replace("|", "\\|") if short else ""
