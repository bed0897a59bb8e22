"""`scaleray verify`: check that distributed runs are the same training."""

from __future__ import annotations

from typing import Annotated

from scaleray.cli.options import AS_OPTIONS, ConfigFile, Json, Overrides
from scaleray.cli.output import Output, print_json, written_in
from scaleray.common.progress import stage
from scaleray.verification.verify_options import VerifyOptions


def verify(
    *overrides: Overrides,
    config: ConfigFile = None,
    options: Annotated[VerifyOptions, AS_OPTIONS] = VerifyOptions(),
    json: Json = False,
) -> int:
    """Check that the config's strategy, or others, repeats the training of one process, step by step.

    It compares one process with the strategy on several workers, with and without accumulation.

    A mismatch is reported with the first step and parameter that differ, and its class. Exit code 0 if everything that
    guarantees equality is equal, 1 if not, 2 for bad usage. Config keys can be given as options, as for train.
    """
    from scaleray.planner.ask.auto_layout import load_planned
    from scaleray.verification.printed_certificate import WIDTH, lines, table

    resolved = load_planned(config, overrides)
    output = Output(json=json, width=WIDTH)
    with output.running():
        with stage("importing"):
            from scaleray.records.certificate import EqualityCertificate
            from scaleray.verification.verify import verify as run

        base_dir = config.resolve().parent if config else None
        certificate = run(resolved, options=options, say=output.say, base_dir=base_dir)
    if isinstance(certificate, EqualityCertificate):
        output.show(table(certificate, width=output.console.width))
        found = lines(certificate)
    else:
        found = [f"{certificate.verdict} ({certificate.duration_s:.0f} s, {certificate.where})"]
        found.append(f"certificate:  {certificate.run_dir}/certificate.json")
    for line in found:
        output.say(line)
    if json:
        print_json(certificate.to_dict(), written=written_in(certificate.run_dir), summary=certificate.summary)
    return 0 if certificate.passed else 1
