"""`scaleray verify`: is the distributed run still the same training?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cyclopts import Parameter

from scaleray.cli.options import ConfigFile, Flag, Json, Overrides, whole_numbers
from scaleray.cli.output import Output, print_json, written_in
from scaleray.progress import stage

if TYPE_CHECKING:
    from scaleray.config import RunConfig
    from scaleray.launch.verify.certificate import Certificate
    from scaleray.launch.verify.plan import Question


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Variants to compare, and how."""

    strategies: str = "own"
    """Names with commas; own: the config's own; all: every one that there is, of which those that do not take this
    workload are listed."""
    world_sizes: str | None = None
    """Numbers of workers, with commas. By default 1 and 2, or 1 and the workers of one model where it is split."""
    accumulation: str = "1,3"
    """Micro-batches in each worker's step, with commas."""
    steps: int = 20
    """Optimizer steps to compare, from the first of the training."""
    bound: float | None = None
    """Largest relative difference of a step's loss, its gradient norm and the final parameters. By default what fits
    the precision: 1e-9 in fp64, 1e-4 in fp32, 0.05 in bf16 and fp16."""
    precision: Literal["fp64", "fp32", "bf16", "fp16"] = "fp64"
    """Arithmetic of the check. Honest differences are far below 1e-9 in fp64; a workload that leaves float64 itself
    can be checked in fp32, more coarsely."""
    resume: Flag = False
    """Interrupt each at a random step instead, resume it, and name the guilty state where it differs."""
    seed: int | None = None
    """Seed of the random steps of --resume, to repeat an answer."""
    local: Flag = False
    """Run in plain gloo processes on this machine, without Ray."""


def verify(
    *overrides: Overrides, config: ConfigFile = None, options: VerifyOptions = VerifyOptions(), json: Json = False
) -> int:
    """Check that the config's strategy, or others, repeats the training of one process, step by step.

    Compared are one process, and the strategy on several workers, with and without accumulation.

    A mismatch names the first step and parameter that differ, and of which class that is. Exit code 0 when everything
    that promises equality is equal, 1 when not, 2 for bad usage. Keys of the config can be given as options, as for
    train.
    """
    from scaleray.config import load_config
    from scaleray.reports.terminal.verification import WIDTH

    resolved = load_config(config, flags=overrides)
    pieces = whole_numbers("--accumulation", options.accumulation)
    output = Output(json=json, width=WIDTH)
    with output.running():
        with stage("importing"):
            from scaleray.launch.verify.plan import Question, default_world_sizes

        given = options.world_sizes
        sizes = default_world_sizes(resolved) if given is None else whole_numbers("--world-sizes", given)
        names = [s.strip() for s in options.strategies.split(",")]
        question = Question(names, sizes, pieces, options.steps, options.bound, options.precision)
        check = _resumes if options.resume else _equality
        certificate, lines = check(resolved, question, options, config.resolve().parent if config else None, output)
    for line in lines:
        output.show(line)
    if json:
        print_json(certificate.to_dict(), written=written_in(certificate.run_dir), summary=certificate.summary)
    return 0 if certificate.passed else 1


def _resumes(
    config: RunConfig, question: Question, options: VerifyOptions, base_dir: Path | None, output: Output
) -> tuple[Certificate, list[Any]]:
    with stage("importing"):
        from scaleray.launch.verify.resume import verify_resumes

    answer = verify_resumes(config, question, seed=options.seed, local=options.local, say=output.say, base_dir=base_dir)
    return answer, [
        f"{answer.verdict} ({answer.duration_s:.0f} s, {answer.where})",
        f"certificate:  {answer.run_dir}/certificate.json",
    ]


def _equality(
    config: RunConfig, question: Question, options: VerifyOptions, base_dir: Path | None, output: Output
) -> tuple[Certificate, list[Any]]:
    with stage("importing"):
        from scaleray.launch.verify.verify import verify as run
        from scaleray.reports.terminal.verification import as_text, lines, table

    certificate = run(config, question, local=options.local, say=output.say, render=as_text, base_dir=base_dir)
    return certificate, [table(certificate, width=output.console.width), *lines(certificate)]
