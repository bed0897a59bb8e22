"""`scaleray verify`: is the distributed run still the same training?"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from scaleray.cli.numbers import whole_numbers


def verify(
    *overrides: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    config: Annotated[Path | None, Parameter(name=["--config", "-c"], help="YAML file of the run.")] = None,
    strategies: str = "all",
    world_sizes: str = "1,2",
    accumulation: str = "1,3",
    steps: int = 20,
    bound: float = 1e-9,
    precision: Literal["fp64", "fp32", "bf16", "fp16"] = "fp64",
    resume: Annotated[bool, Parameter(negative="")] = False,
    seed: int | None = None,
    local: bool = False,
    json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Check that every strategy and number of workers repeats the training of one process, step by step.

    For a mismatch: the first step and parameter that differ, and of which class that is. Exit code 0 when everything that
    promises equality is equal, 1 when not, 2 for bad usage. Keys of the config can be given as options, as for train.

    Parameters
    ----------
    strategies
        Names with commas, or all: every one that there is; those that do not take this workload are listed.
    world_sizes
        Numbers of workers, with commas.
    accumulation
        Micro-batches in each worker's step, with commas.
    steps
        Optimizer steps to compare, from the first of the training.
    bound
        Largest relative difference of a step's loss, its gradient norm and the final parameters.
    precision
        Arithmetic of the check. Honest differences need 1e-9 in fp64, about 1e-4 in fp32.
    resume
        The resume certificate instead: interrupt each at a random step, resume it from its checkpoint, and compare with the
        run that was not interrupted, to the bit. Where they differ, the guilty state is named.
    seed
        Of the random steps of --resume, to repeat an answer.
    local
        In plain gloo processes on this machine, without Ray.
    json
        Print the certificate as JSON on stdout; everything else goes to stderr.
    """
    from rich.console import Console

    from scaleray.config import load_config

    resolved = load_config(config, flags=overrides)
    sizes, pieces = whole_numbers("--world-sizes", world_sizes), whole_numbers("--accumulation", accumulation)
    from scaleray.launch.verification_plan import Question
    from scaleray.launch.verify import verify as run
    from scaleray.reports.verification import WIDTH, as_text, lines, table

    question = Question([s.strip() for s in strategies.split(",")], sizes, pieces, steps, bound, precision)
    console = Console(stderr=json)
    if not console.is_terminal:
        console.width = WIDTH

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    base_dir = config.resolve().parent if config else None
    # Ray prints what its daemons say to stdout, which is the record's
    quiet = contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext()
    if resume:
        from scaleray.launch.verify_resume import verify_resumes

        with quiet:
            answer = verify_resumes(resolved, question, seed=seed, local=local, say=say, base_dir=base_dir)
        say(f"{answer.verdict} ({answer.duration_s:.0f} s, {answer.where})")
        say(f"certificate:  {answer.run_dir}/certificate.json")
        if json:
            print(answer.to_json())
        return 0 if answer.passed else 1
    with quiet:
        certificate = run(resolved, question, local=local, say=say, render=as_text, base_dir=base_dir)
    console.print(table(certificate, width=console.width))
    for line in lines(certificate):
        say(line)
    if json:
        print(certificate.to_json())
    return 0 if certificate.passed else 1
