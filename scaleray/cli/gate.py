"""`scaleray gate`: whether a training may go into production, by evidence that was recorded."""

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
    """Ask the gates about a training or a study: fingerprint, equality, scaling, convergence and operations.

    Each answers pass, fail or inconclusive, with its numbers and what to do next. Missing evidence never passes. Runs
    of the same but the seed in the folders next to the candidate and the baseline count as their repeats where only one
    of them is given; certificates and studies there are found as well.

    Against a registered version the gates are speed, convergence and data: whether today's runs are still like those of
    the promoted model, by the evidence and the policy that were kept at its promotion.

    Exit code 0 when all pass, 1 when one fails, 3 when one is inconclusive and none fails, 2 for bad usage.

    Parameters
    ----------
    runs
        The candidate: folder or bucket of a training, its name in the default storage path, or its id or name in
        MLflow. More runs are repeats of it with other seeds. Or one scaling study, of which scaling and equality are
        asked, at its largest number of workers. None against a registered version: the runs in MLflow of its
        experiment that train the same, began after its promotion and have finished or failed.
    against
        Runs of the baseline, or a version in MLflow's registry: NAME@ALIAS, such as digits@champion, or
        models:/NAME/VERSION.
    policy
        YAML file of what is asked; by default every key has its own default, or that of the version's promotion.
    study
        Scaling study of the candidate's training.
    certificates
        Folders or files of certificates of `scaleray verify`.
    gates
        Only these gates, with commas between them.
    days
        Days back in which runs since the promotion of a registered version count, when no RUN is given: by default 8.
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
