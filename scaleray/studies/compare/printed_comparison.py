"""A comparison on the terminal: the runs, their differences, their measurements side by side, and the verdicts."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from scaleray.records.terminal.printed_record import print_whole, width_of
from scaleray.records.terminal.terminal_tables import as_rich
from scaleray.records.text.study_sweep_tables import Table
from scaleray.studies.compare.comparison import Comparison

LONGEST_VALUE = 60
MOST_DIFFERENCES = 25
"""Maximum rows of the table; --json has all."""


def show_comparison(console: Console, comparison: Comparison) -> None:
    """Print a comparison."""

    def say(text: str) -> None:
        print_whole(console, Text(text))

    for run in comparison.runs:
        repeats = f", a repeat of {run.group}" if run.group != run.label else ""
        say(f"{run.label}: {comparison.kind} {run.name}{repeats} ({run.where})")
    say("")
    if not comparison.differences:
        say("no differences in config, code, environment, topology and data")
    for table in tables(comparison):
        print_whole(console, as_rich(table, width=width_of(console)))
    for note in comparison.notes:
        say(note)
    for verdict in comparison.verdicts:
        say(str(verdict))


def tables(comparison: Comparison) -> list[Table]:
    """Tables of differences, if any, and of measurements."""
    labels = tuple(run.label for run in comparison.runs)
    shown = comparison.differences[:MOST_DIFFERENCES]
    more = len(comparison.differences) - len(shown)
    rows = tuple((d.section, d.key, *_short(d.values)) for d in shown)
    notes = (f"{more} more differences are in --json.",) if more else ()
    found = [Table("Differences", ("of", "key", *labels), rows, notes, has_words=True)] if rows else []
    figures = tuple((row.name, *row.shown) for row in comparison.figures)
    return [*found, Table("Figures", ("", *labels), figures)]


def _short(values: Sequence[Any]) -> list[str]:
    """Values as text; long ones are shortened to their differing parts."""
    texts = [", ".join(map(str, value)) if isinstance(value, list) else str(value) for value in values]
    if max(map(len, texts)) <= LONGEST_VALUE:
        return texts
    same = 0
    while same < min(map(len, texts)) and len({text[same] for text in texts}) == 1:
        same += 1
    start = max(0, same - 10)
    cut = [("..." if start else "") + text[start : start + LONGEST_VALUE] for text in texts]
    return [c + ("..." if len(text) > start + LONGEST_VALUE else "") for c, text in zip(cut, texts, strict=True)]
