"""`scaleray study`: how does the training scale, and is the next doubling worth it?"""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter

from scaleray.cli.options import ConfigFile, Flag, Json, Overrides, Several, whole_numbers
from scaleray.cli.output import Output, print_json, written_in
from scaleray.progress import stage


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """Measurements, and how they are taken."""

    world_sizes: str = "1,2"
    """Numbers of workers, with commas."""
    mode: str = "strong"
    """strong: the config's global batch divided among the workers. weak: a batch that grows with them. Or both."""
    repeats: int = 5
    """Turns of each size."""
    steps: int = 40
    """Optimizer steps of a turn, at least; those of its warm-up are left out."""
    seconds: float = 3.0
    """Length of a turn, at least."""
    to_target: Flag = False
    """Train each size to the config's stop.at as well, and report time and samples to it."""
    noise: Flag = False
    """Measure the gradient noise scale of each size, as noise_scale.measure auto does, in steps that are not timed."""
    relaunch: Flag = False
    """Launch each size on its own instead of as a part of the largest group."""
    oversubscribe: Flag = False
    """Measure although workers must share cores; every figure is marked."""
    force: Flag = False
    """Measure again what is known already."""
    points_of: Several = ()
    """Folder of another study whose points belong to the same curves; refused if its conditions were others."""
    seed: int = 0
    """Seed of the order of turns."""
    local: Flag = False
    """Run in plain gloo processes on this machine, without Ray."""

    @property
    def sizes(self) -> list[int]:
        """The numbers of workers. Raises ConfigError for anything else."""
        return whole_numbers("--world-sizes", self.world_sizes)

    @property
    def modes(self) -> list[str]:
        """The modes that were named."""
        return [word.strip() for word in self.mode.split(",") if word.strip()]


def study(
    *overrides: Overrides, config: ConfigFile = None, options: StudyOptions = StudyOptions(), json: Json = False
) -> int:
    """Measure the training on several numbers of workers: curves with intervals, where the time goes, the next
    doubling.

    All sizes are measured inside one group of workers, in turns and in random order. What was measured before under the
    same conditions is reused, so that the same command continues a study that was interrupted. Keys of the config can
    be given as options, as for train; study.price_per_worker_hour adds costs.
    """
    from scaleray.config import load_config

    sizes = options.sizes
    resolved = load_config(config, flags=overrides)
    output = Output(json=json)
    with output.running():
        with stage("importing"):
            from scaleray.launch.study.plan import Question
            from scaleray.launch.study.study import study as run
            from scaleray.reports.records.study import write_study_report
            from scaleray.reports.terminal.record import show_record
        question = Question(
            world_sizes=sizes,
            modes=options.modes,
            repeats=options.repeats,
            steps=options.steps,
            seconds=options.seconds,
            to_target=options.to_target,
            noise=options.noise,
            relaunch=options.relaunch,
            oversubscribe=options.oversubscribe,
            force=options.force,
            seed=options.seed,
        )
        record = run(
            resolved,
            question,
            local=options.local,
            say=output.say,
            base_dir=config.resolve().parent if config else None,
            command=command_of(config, overrides, options),
            points_of=options.points_of,
            write_report=write_study_report,
        )
    show_record(output.console, record)
    if json:
        print_json(record.to_dict(), written=written_in(record.folder), summary=record.summary)
    return 0


def command_of(config: Path | None, overrides: tuple[str, ...], options: StudyOptions) -> str:
    """The command that repeats a study, without passwords: what is measured, and every other option that was given."""
    from scaleray.config.alerts import without_secrets

    words = ["scaleray", "study", *(["-c", str(config)] if config else [])]
    words += ["--world-sizes", ",".join(map(str, options.sizes)), "--mode", ",".join(options.modes)]
    words += ["--repeats", str(options.repeats)]
    for field in dataclasses.fields(options):
        value, option = getattr(options, field.name), f"--{field.name.replace('_', '-')}"
        if value == field.default or field.name in ("world_sizes", "mode", "repeats", "force"):
            continue  # what was reused then is not measured again
        each = value if isinstance(value, tuple) else (value,)
        for one in each:
            words += [option] if one is True else [option, one if isinstance(one, str) else f"{one:g}"]
    return shlex.join([*words, *without_secrets(overrides)])
