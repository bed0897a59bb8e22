"""`scaleray compare`: differences between recorded runs, studies or sweeps, with a test for slowdowns."""

from __future__ import annotations

from scaleray.cli.options import Json, Uri
from scaleray.cli.output import print_json
from scaleray.errors import ConfigError


def compare(*runs: str, uri: Uri = None, fail_if_slower: float | None = None, json: Json = False) -> int:
    """Show the differences between two or more trainings, studies or sweeps, each compared with the first.

    It shows differences in config, code, environment, topology and data, results side by side, and whether step times
    differ beyond noise, with the 95 % interval. Runs with the same config, code and machines count as repeats of each
    other: with at least two launches of each, the interval includes the variation between launches. With single
    launches that variation is unknown, and an apparent slowdown is `inconclusive`, with the number of launches needed
    to decide.

    Exit code 0 when done, 2 for bad usage; with --fail-if-slower 1 for a regression, 3 if inconclusive.

    Parameters
    ----------
    runs
        Folder or bucket of a run, study or sweep, its name in the default storage path, or its id or name in MLflow.
    fail_if_slower
        Exit with 1 if one is slower than the first by more than this many per cent, with the whole interval beyond it;
        with 3 if one appears that much slower but has too few launches to decide, or no step times.
    """
    if fail_if_slower is not None and not 0 <= fail_if_slower < float("inf"):
        raise ConfigError("--fail-if-slower", fail_if_slower, "it must be a percentage of at least 0", "for example 3")
    from rich.console import Console
    from rich.text import Text

    from scaleray.records.terminal.printed_record import print_whole
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
        f"it is unclear whether {found.runs} is slower than {found.base} {beyond}: {found.words}" for found in unclear
    ]
    for line in lines:
        print_whole(Console(stderr=True, highlight=False), Text(line))
    return 1 if slower else EXIT_INCONCLUSIVE if unclear else 0
