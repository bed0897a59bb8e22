"""How good the planner is: published measurements, what it says of them, and its constants fitted to them.

    python -m jobs.planner_evidence validate DATA [--transfers]     the planner over folders of published measurements
    python -m jobs.planner_evidence fit DATA [--leave-out]          its constants, fitted again

Run in a checkout. DATA is a folder of JSON files, whose format `published/rows.py` describes.
"""

from __future__ import annotations

import dataclasses
import json as json_library
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from scaleray.errors import ConfigError, ScaleRayError, UsageError

app = App(name="python -m jobs.planner_evidence", help=__doc__, help_format="plaintext")
Json = Annotated[bool, Parameter(name="--json", negative="", help="Print the result as JSON on stdout.")]


@app.command
def validate(
    *data: Path,
    by: Literal["both", "source", "family"] = "both",
    skipped: bool = True,
    transfers: Annotated[bool, Parameter(negative="")] = False,
    json: Json = False,
) -> int:
    """Run the planner over folders of published measurements, beside the model that knows nothing.

    Parameters
    ----------
    data
        Folders of JSON files; their format is described in jobs.planner_evidence.published.rows.
    by
        Lines for each source, each family, or both.
    skipped
        List the rows that were not judged, with the reason. --no-skipped leaves them out.
    transfers
        Judge the intervals instead where rows are predicted from others that are far from them: from another kind of
        GPU, from an eighth of the GPUs, from another layout.
    """
    from rich.console import Console

    from jobs.planner_evidence.tables import score_table, skipped_lines, transfer_table
    from jobs.planner_evidence.transfers import transfer_scores, transferred
    from jobs.planner_evidence.validate import judge, score, scores
    from scaleray.records.terminal.printed_record import print_whole, width_of
    from scaleray.records.terminal.terminal_tables import as_rich

    seen, left_out = _observations(data)
    if transfers:
        lines = transfer_scores(transferred(seen))
        print_whole(console := Console(stderr=json), as_rich(transfer_table(lines), width=width_of(console)))
        if json:
            print(json_library.dumps({"transfers": [dataclasses.asdict(line) for line in lines]}, indent=2))
        return 0
    judged = judge(seen)
    tables = {
        "source": scores(judged, lambda one: one.seen.source),
        "family": scores(judged, lambda one: one.seen.family),
        "all": [score("all", judged)],
    }
    console = Console(stderr=json)
    for name in ("source", "family", "all"):
        if by in ("both", name) or name == "all":
            made = score_table(f"by {name}" if name != "all" else "all rows", tables[name])
            print_whole(console, as_rich(made, width=width_of(console)))
    if skipped:
        for line in (f"{len(left_out)} rows not judged:", *skipped_lines(left_out)):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    if json:
        print(
            json_library.dumps(
                {name: [dataclasses.asdict(line) for line in lines] for name, lines in tables.items()}
                | {"skipped": [dataclasses.asdict(one) for one in left_out]},
                indent=2,
            )
        )
    return 0


@app.command
def fit(*data: Path, rounds: int = 3, leave_out: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Fit the planner's constants to folders of published measurements, and print them beside those it has.

    Parameters
    ----------
    rounds
        Passes over the constants, with steps that shrink.
    leave_out
        Fit once without each source instead, and judge that source: how well the constants carry over.
    """
    from rich.console import Console

    from jobs.planner_evidence import fit as fitting
    from jobs.planner_evidence.tables import score_table
    from jobs.planner_evidence.validate import score, scores
    from scaleray.planner.cost.constants import DEFAULT, FITTED
    from scaleray.records.terminal.printed_record import print_whole, width_of
    from scaleray.records.terminal.terminal_tables import as_rich

    console = Console()

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    seen, _ = _observations(data)
    if leave_out:
        judged = fitting.leave_one_source_out(seen, rounds=rounds, say=say)
        lines = [*scores(judged, lambda one: one.seen.source), score("all", judged)]
        made = score_table("each source with constants fitted without it", lines)
        print_whole(console, as_rich(made, width=width_of(console)))
    else:
        found = fitting.fit(fitting.thinned(seen), rounds=rounds, say=say)
        own = fitting.loss_of(fitting.thinned(seen), DEFAULT)
        say(f"loss {found.start_loss:.4f} before, {found.loss:.4f} with these, {own:.4f} with the package's:")
        for name in FITTED:
            say(f"  {name:<26} {getattr(DEFAULT, name):<10.4g} -> {getattr(found.constants, name):.4g}")
        from jobs.planner_evidence.validate import judge

        judged = judge(seen, found.constants, with_pollux=False)
    say("intervals that hold 90 % of rows, as logarithms of measured over predicted:")
    for kind, (low, high, count) in sorted(fitting.spreads(judged).items()):
        say(f"  {kind:<26} {low:+.3f} to {high:+.3f}   ({count} rows)")
    return 0


def _observations(data: tuple[Path, ...]) -> tuple[list[Any], list[Any]]:
    from jobs.planner_evidence.published import observations, read_folder

    if not data:
        raise ConfigError(
            "data",
            None,
            "at least one folder of published measurements is needed",
            "python -m jobs.planner_evidence validate FOLDER",
        )
    for folder in data:
        if not folder.is_dir():
            raise UsageError("data folder", str(folder), "it is not a folder")
    return observations([row for folder in data for row in read_folder(folder)])


def main(arguments: list[str] | None = None) -> int:
    """Run a command; a user's slip is one message on stderr."""
    try:
        return int(app(arguments, result_action="return_value") or 0)
    except ScaleRayError as exc:
        print(f"{type(exc).__name__}: {exc}", file=sys.stderr)
        return exc.exit_code


if __name__ == "__main__":
    sys.exit(main())
