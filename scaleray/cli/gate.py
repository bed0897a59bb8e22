"""`scaleray gate`: check from recorded evidence whether a training may go into production."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from scaleray.cli.options import Json, Uri
from scaleray.cli.output import Output, print_json

EXIT_CODES = {"pass": 0, "fail": 1, "inconclusive": 3}


def gate(
    *runs: str,
    against: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    policy: Path | None = None,
    study: str | None = None,
    certificates: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    gates: str | None = None,
    days: float | None = None,
    uri: Uri = None,
    json: Json = False,
) -> int:
    """Apply the gates to a training or a study: fingerprint, equality, scaling, convergence and operations.

    Each results in pass, fail or inconclusive, with its numbers and the next step. Missing evidence never passes. If
    only one run of the candidate or baseline is given, runs in the folders next to it that differ only in the seed
    count as its repeats; certificates and studies there are found as well.

    Against a registered version the gates are speed, convergence and data: they check whether today's runs are still
    like those of the promoted model, by the evidence and the policy stored at its promotion.

    Exit code 0 if all pass, 1 if one fails, 3 if one is inconclusive and none fails, 2 for bad usage.

    Parameters
    ----------
    runs
        The candidate: folder or bucket of a training, its name in the default storage path, or its id or name in
        MLflow. Further runs are repeats of it with other seeds. Or one scaling study, to which the gates scaling and
        equality are applied at its largest number of workers. Against a registered version, omit it to use all runs of
        its experiment in MLflow with the same training that started after its promotion and have finished or failed.
    against
        Runs of the baseline, or a version in MLflow's registry: NAME@ALIAS, such as digits@champion, or
        models:/NAME/VERSION.
    policy
        YAML file with the requirements; by default each key's default, or the policy of the version's promotion.
    study
        Scaling study of the candidate's training.
    certificates
        Folders or files of certificates of `scaleray verify`.
    gates
        Only these gates, separated by commas.
    days
        Number of past days from which runs of a registered version count, if no RUN is given: by default 8.
    """
    from rich.console import Console

    from scaleray.release.gate.gate import gate as run
    from scaleray.release.printed_gates import show_gates

    with Output(json=json).running():
        record = run(
            *runs,
            against=against or (),
            policy=policy,
            study=study,
            certificates=certificates or (),
            gates=gates.replace(" ", "").split(",") if gates else None,
            days=days,
            uri=uri,
        )
    show_gates(Console(stderr=json), record)
    if json:
        print_json(record.to_dict(), summary=record.summary)
    return EXIT_CODES[record.answer]
