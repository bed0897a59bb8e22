"""`scaleray study`: how does the training scale, and is the next doubling worth it?"""

from __future__ import annotations

import contextlib
import shlex
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from scaleray.cli.numbers import whole_numbers


def study(
    *overrides: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    config: Annotated[Path | None, Parameter(name=["--config", "-c"], help="YAML file of the run.")] = None,
    world_sizes: str = "1,2",
    mode: str = "strong",
    repeats: int = 5,
    steps: int = 40,
    seconds: float = 3.0,
    to_target: Annotated[bool, Parameter(negative="")] = False,
    noise: Annotated[bool, Parameter(negative="")] = False,
    relaunch: Annotated[bool, Parameter(negative="")] = False,
    oversubscribe: Annotated[bool, Parameter(negative="")] = False,
    force: Annotated[bool, Parameter(negative="")] = False,
    points_of: tuple[str, ...] = (),
    seed: int = 0,
    local: bool = False,
    json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Measure the training on several numbers of workers: curves with intervals, where the time goes, the next doubling.

    All sizes are measured inside one group of workers, in turns and in random order. What was measured before under the same
    conditions is reused, so that the same command continues a study that was interrupted. Keys of the config can be given as
    options, as for train; study.price_per_worker_hour adds costs.

    Parameters
    ----------
    world_sizes
        Numbers of workers, with commas.
    mode
        strong: the config's global batch divided among the workers. weak: a global batch that grows with them. Or both, with a
        comma.
    repeats
        Turns of each size.
    steps
        Optimizer steps of a turn, at least; those of its warm-up are left out.
    seconds
        Length of a turn, at least.
    to_target
        Train each size to the config's stop.at as well, and report time and samples to it.
    noise
        Measure the gradient noise scale of each size, as noise_scale.measure auto does: in the training to the target, or over
        a turn's steps that are not timed.
    relaunch
        Launch each size on its own instead of as a part of the largest group.
    oversubscribe
        Measure although workers must share cores; every figure is marked.
    force
        Measure anew what is known already.
    points_of
        Folder of another study whose points stand on the same curves; refused if it was measured under other conditions.
    seed
        Of the order of turns.
    local
        In plain gloo processes on this machine, without Ray.
    json
        Print the record as JSON on stdout; everything else goes to stderr.
    """
    from rich.console import Console

    from scaleray.config import load_config

    sizes, modes = (
        whole_numbers("--world-sizes", world_sizes),
        [word.strip() for word in mode.split(",") if word.strip()],
    )
    resolved = load_config(config, flags=overrides)
    from scaleray.launch.study_plan import Question
    from scaleray.training.ladder import Effort

    question = Question(
        world_sizes=sizes, modes=modes, repeats=repeats, effort=Effort(steps=steps, seconds=seconds), to_target=to_target, noise=noise,
        relaunch=relaunch, oversubscribe=oversubscribe, force=force, seed=seed,
    )  # fmt: skip
    from scaleray.launch.study import study as run
    from scaleray.reports.record_terminal import show_record
    from scaleray.reports.study_report import write_study_report

    console = Console(stderr=json)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    # Ray prints what its daemons say to stdout, which is the record's
    with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
        record = run(
            resolved, question, local=local, say=say, base_dir=config.resolve().parent if config else None,
            command=command_of(
                config, overrides, sizes=sizes, modes=modes, repeats=repeats, steps=steps, seconds=seconds, to_target=to_target,
                noise=noise, relaunch=relaunch, oversubscribe=oversubscribe, points_of=points_of, seed=seed, local=local,
            ),
            points_of=points_of, write_report=write_study_report,
        )  # fmt: skip
    show_record(console, record)
    if json:
        print(record.to_json())
    return 0


def command_of(
    config: Path | None, overrides: tuple[str, ...], *, sizes: list[int], modes: list[str], repeats: int, steps: int,
    seconds: float, to_target: bool, noise: bool, relaunch: bool, oversubscribe: bool, points_of: tuple[str, ...], seed: int, local: bool,
) -> str:  # fmt: skip
    """The command that repeats a study, without passwords."""
    from scaleray.config.base import without_password

    words = ["scaleray", "study", *(["-c", str(config)] if config else [])]
    words += ["--world-sizes", ",".join(map(str, sizes)), "--mode", ",".join(modes), "--repeats", str(repeats)]
    for option, value, default in (("--steps", steps, 40), ("--seconds", seconds, 3.0), ("--seed", seed, 0)):
        words += [option, f"{value:g}"] if value != default else []
    for option, is_on in (
        ("--to-target", to_target), ("--noise", noise), ("--relaunch", relaunch), ("--oversubscribe", oversubscribe), ("--local", local)
    ):  # fmt: skip
        words += [option] if is_on else []
    for folder in points_of:
        words += ["--points-of", folder]
    return shlex.join([*words, *map(without_password, overrides)])
