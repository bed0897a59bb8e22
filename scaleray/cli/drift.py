"""`scaleray drift`: whether today's runs are still like those of a promoted model."""

from __future__ import annotations

from pathlib import Path

from scaleray.cli.gate import EXIT_CODES
from scaleray.cli.options import Json
from scaleray.cli.output import Output, print_json
from scaleray.cli.run_options import Uri


def drift(
    model: str, *runs: str, days: float = 8.0, policy: Path | None = None, uri: Uri = None, json: Json = False
) -> int:
    """Hold today's runs against those of a promoted model: their speed, how they learn, and their data.

    Each is answered like a gate, with pass, fail or inconclusive. Data are compared by their hash, and where that
    differs by the columns, their types, and means and deviations of their values.

    Exit code 0 when all pass, 1 when one fails, 3 when one is inconclusive and none fails, 2 for bad usage.

    Parameters
    ----------
    model
        NAME@ALIAS or NAME/VERSION in MLflow's registry, such as digits@champion.
    runs
        Runs of today. By default the finished ones in MLflow of the promoted run's experiment that train the same and
        began after its promotion.
    days
        Days back in which such runs count as today's.
    policy
        YAML file with the sections drift and convergence; by default the policy that the model was promoted with.
    """
    from rich.console import Console

    from scaleray.launch.drift.drift import drift as run_drift
    from scaleray.reports.terminal.gates import show_gates

    output = Output(json=json)
    with output.running():
        record = run_drift(model, runs, days=days, policy=policy, uri=uri)
    show_gates(Console(stderr=json), record)
    if json:
        print_json(record.to_dict())
    return EXIT_CODES[record.answer]
