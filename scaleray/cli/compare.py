"""`scaleray compare`: what differs between recorded runs, studies or sweeps, and whether one became slower."""

from __future__ import annotations

from scaleray.cli.options import Json, Uri
from scaleray.cli.output import print_json
from scaleray.errors import ConfigError


def compare(*runs: str, uri: Uri = None, fail_if_slower: float | None = None, json: Json = False) -> int:
    """Show the differences between two or more trainings, studies or sweeps, each compared with the first.

    Differences in config, code, environment, topology and data; figures side by side; and whether step times differ
    beyond noise, with the 95 % interval. Those of the same config, code and machines count as repeats of each other:
    with at least two launches of each, what differs between two launches of the same is in the interval. Of single
    launches it is not known, and what looks slower is `inconclusive`, with the number of launches that would tell.

    Exit code 0 when done, 2 for bad usage; with --fail-if-slower 1 for a regression, 3 where it is inconclusive.

    Parameters
    ----------
    runs
        Folder or bucket of a run, study or sweep, its name in the default storage path, or its id or name in MLflow.
    fail_if_slower
        Exit with 1 when one is slower than the first by more than so many per cent, the whole interval beyond it; with
        3 when one looks slower by that much and its launches are too few to tell, or have no step times.
    """
    if fail_if_slower is not None and not 0 <= fail_if_slower < float("inf"):
        raise ConfigError("--fail-if-slower", fail_if_slower, "it must be per cent, 0 or more", "for example 3")
    from rich.console import Console
    from rich.text import Text

    from scaleray.reports.terminal.printed_record import print_whole
    from scaleray.studies.compare.comparison import EXIT_INCONCLUSIVE
    from scaleray.studies.compare.comparison import compare as run
    from scaleray.studies.compare.printed_comparison import show_comparison

    comparison = run(*runs, uri=uri)
    show_comparison(Console(stderr=json), comparison)
    if json:
        print_json(comparison.to_dict())
    if fail_if_slower is None:
        return 0
    slower, unclear = (find(fail_if_slower) for find in (comparison.slower_by_more_than, comparison.unclear_beyond))
    beyond = f"by more than {fail_if_slower:g} %"
    lines = [f"failed: {found.runs} is slower than {found.base} {beyond}" for found in slower]
    lines += [
        f"cannot tell whether {found.runs} is slower than {found.base} {beyond}: {found.words}" for found in unclear
    ]
    for line in lines:
        print_whole(Console(stderr=True, highlight=False), Text(line))
    return 1 if slower else EXIT_INCONCLUSIVE if unclear else 0
