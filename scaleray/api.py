"""The commands as functions: `import scaleray` has each of them under its own name, loaded on first use.

A config is a RunConfig, a YAML file, or a mapping of dotted keys or sections; a workload is a class or an object, and
None is the one that the config names. All raise UsageError for what the user can mend.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from scaleray.config import RunConfig, load_config
from scaleray.errors import UsageError
from scaleray.installed import names_what_is_missing
from scaleray.records.run import RunRecord, Say, Show
from scaleray.workload import make_workload, name_of

if TYPE_CHECKING:
    from scaleray.gates.record import GateRecord
    from scaleray.launch.profile.profile import Profiled
    from scaleray.launch.verify.certificate import Certificate
    from scaleray.records.study import StudyRecord
    from scaleray.records.sweep import SweepRecord
    from scaleray.reports.compare.comparison import Comparison

Config = RunConfig | str | Path | Mapping[str, Any]


@names_what_is_missing
def train(
    config: Config | None,
    workload: Any = None,
    *,
    resume: str | None = None,
    allow_change: Sequence[str] = (),
    local: bool = False,
    progress: bool | None = None,
    show: Show | None = None,
    say: Say | None = None,
    expect_steps: Callable[[int], None] | None = None,
    base_dir: Path | None = None,
    started_at: float | None = None,
) -> RunRecord:
    """Train a workload as the config says and return the run's record.

    config: a RunConfig, a YAML file, or a mapping of dotted keys or sections; None, with `resume`, is the config of
    that run. workload: an instance or class, a notebook's own too; None loads the config's. resume: continue an
    interrupted run: its folder, its name, or `auto` for the newest unfinished run of the same training, if there is
    one. allow_change: keys of the config that may differ from that run's although they alter the training. local: in
    this process, without Ray. progress: show a live table, in a notebook or on a terminal; None does so on a terminal
    or in a notebook, false never. show: called with the run's messages as they arrive, say with lines about what
    happens meanwhile, expect_steps with the length of the training once it is known. started_at: wall clock from which
    the time to the first step is counted; None is now.

    Raises UsageError for what the user can mend, RunFailedError for a run that failed, KeyboardInterrupt when stopped;
    the MLflow run is then FAILED or KILLED.
    """
    from scaleray.launch.run.train import train as run
    from scaleray.reports.terminal.notebook import Silent, watching

    is_shown = show is None and say is None and progress is not False
    with watching(always=bool(progress)) if is_shown else contextlib.nullcontext(Silent()) as display:
        return run(
            config,
            workload,
            resume=resume,
            allow_change=allow_change,
            local=local,
            show=show or display.show,
            say=say or display.say,
            expect_steps=expect_steps or display.expect_steps,
            base_dir=base_dir,
            started_at=started_at,
        )


@names_what_is_missing
def verify(
    config: Config,
    workload: Any = None,
    *,
    strategies: Sequence[str] = ("own",),
    world_sizes: Sequence[int] | None = None,
    accumulation: Sequence[int] = (1, 3),
    steps: int = 20,
    bound: float | None = None,
    precision: Literal["fp64", "fp32", "bf16", "fp16"] = "fp64",
    resume: bool = False,
    seed: int | None = None,
    local: bool = False,
    say: Say = lambda text: None,
) -> Certificate:
    """Check that strategies and numbers of workers repeat the training of one process, step by step; `.passed` of the
    certificate says it.

    strategies: names; own: the config's own; all: every one. world_sizes: numbers of workers; None: 1 and 2, or 1 and
    the workers of one model where it is split. accumulation: micro-batches in each worker's step.
    bound: largest relative difference; None is what fits the precision. precision: arithmetic of the check. resume:
    interrupt each at a random step (drawn with `seed`) and resume it instead. local: in gloo processes on this machine,
    without Ray.
    """
    from scaleray.launch.verify.plan import Question, default_world_sizes
    from scaleray.launch.verify.resume import verify_resumes
    from scaleray.launch.verify.verify import verify as run

    whole, base_dir, workload = resolved(config, workload)
    sizes = default_world_sizes(whole) if world_sizes is None else world_sizes
    question = Question(list(strategies), list(sizes), list(accumulation), steps, bound, precision)
    if resume:
        return verify_resumes(whole, question, workload, seed=seed, local=local, say=say, base_dir=base_dir)
    return run(whole, question, workload, local=local, say=say, base_dir=base_dir)


@names_what_is_missing
def study(
    config: Config,
    workload: Any = None,
    *,
    world_sizes: Sequence[int] = (1, 2),
    modes: Sequence[str] = ("strong",),
    repeats: int = 5,
    steps: int = 40,
    seconds: float = 3.0,
    to_target: bool = False,
    noise: bool = False,
    relaunch: bool = False,
    force: bool = False,
    oversubscribe: bool = False,
    points_of: Sequence[str] = (),
    seed: int = 0,
    local: bool = False,
    say: Say = lambda text: None,
) -> StudyRecord:
    """Measure the training on several numbers of workers, and write the report.

    modes: strong (the global batch divided), weak (a batch that grows with the workers), or both. repeats: turns of
    each size, of at least so many steps and seconds. to_target: train each size to stop.at as well. noise: measure the
    gradient noise scale. relaunch: launch each size on its own. force: measure again what is known. oversubscribe:
    although workers share cores. points_of: folders of studies whose points belong to the same curves. local: in gloo
    processes, without Ray.
    """
    from scaleray.launch.study.plan import Question
    from scaleray.launch.study.study import study as run
    from scaleray.reports.records.study import write_study_report

    whole, base_dir, workload = resolved(config, workload)
    question = Question(
        world_sizes=list(world_sizes),
        modes=list(modes),
        repeats=repeats,
        steps=steps,
        seconds=seconds,
        to_target=to_target,
        noise=noise,
        relaunch=relaunch,
        force=force,
        oversubscribe=oversubscribe,
        seed=seed,
    )
    return run(
        whole,
        question,
        workload,
        local=local,
        say=say,
        base_dir=base_dir,
        points_of=points_of,
        write_report=write_study_report,
    )


@names_what_is_missing
def sweep(
    config: Config | None,
    workload: Any = None,
    *,
    batch_sizes: str | None = None,
    rules: str | None = None,
    learning_rates: str | None = None,
    optimizers: str | None = None,
    warmups: str | None = None,
    vary: Sequence[str] = (),
    seeds: int = 1,
    trials: int | None = None,
    workers_per_trial: int | None = None,
    search: Literal["random", "grid", "optuna"] = "random",
    scheduler: Literal["fifo", "asha", "hyperband", "median", "pbt"] = "fifo",
    metric: str | None = None,
    guided_share: float | None = None,
    against_grid: str | Path | None = None,
    continue_folder: str | Path | None = None,
    tracking_uri: str | None = None,
    say: Say = lambda text: None,
) -> SweepRecord:
    """Train at many batch sizes and learning rates under Ray Tune, and write the report.

    batch_sizes: such as "32..2048" or "32,64"; rules: "linear,sqrt"; learning_rates: "1e-4..1e-2"; vary:
    ["optimizer.weight_decay=0,0.01"]; these and the others up to `metric` are the options of `scaleray sweep`.
    guided_share: run only what is worth it, within this share of the grid's samples. against_grid: folder of a sweep of
    the whole grid, to judge that choice by. continue_folder: of an interrupted sweep, which continues with its own
    options, with None as the config; tracking_uri: where MLflow is then.
    """
    from scaleray.launch.sweep.folder import grid_record
    from scaleray.launch.sweep.sweep import sweep as run
    from scaleray.reports.records.sweep import write_sweep_report

    against = grid_record(against_grid) if against_grid is not None else None
    more: dict[str, Any] = {"say": say, "write_report": write_sweep_report, "against": against}
    if continue_folder is not None:
        return run(None, None, workload, continue_folder=str(continue_folder), tracking_uri=tracking_uri, **more)
    from scaleray.scaling.sweeps.question import question_of

    if config is None:
        raise UsageError("the config", None, "a sweep needs one, or continue_folder")
    whole, base_dir, _ = resolved(config, workload)  # its class, as trials may differ in arguments
    question = question_of(
        whole,
        batch_sizes=batch_sizes,
        rules=rules,
        learning_rates=learning_rates,
        optimizers=optimizers,
        warmups=warmups,
        vary=vary,
        seeds=seeds,
        trials=trials,
        workers_per_trial=workers_per_trial,
        search=search,
        scheduler=scheduler,
        metric=metric,
        guided_share=guided_share,
    )
    return run(whole, question, workload, base_dir=base_dir, **more)


@names_what_is_missing
def compare(*runs: str | Path, uri: str | None = None) -> Comparison:
    """Differences between recorded trainings, studies or sweeps, each compared with the first, and whether one became
    slower.

    runs: folders, names in the storage path, or ids or names in MLflow at `uri`.
    """
    from scaleray.reports.compare.comparison import compare as compare_records
    from scaleray.tracking.find_record import find_run

    return compare_records([find_run(str(run), uri=uri) for run in runs])


@names_what_is_missing
def gate(
    *runs: str | Path,
    against: str | Path | Sequence[str | Path] = (),
    policy: str | Path | Mapping[str, Any] | None = None,
    study: str | None = None,
    certificates: Sequence[str | Path] = (),
    gates: Sequence[str] | None = None,
    days: float | None = None,
    uri: str | None = None,
) -> GateRecord:
    """Whether a training may go into production: `.answer` is pass, fail or inconclusive, `.gates` has what was asked.

    runs: the candidate, and runs that repeat it with other seeds: folders, names in the storage path, or ids or names
    in MLflow at `uri`. against: runs of the baseline. policy: a YAML file, or its sections as a mapping. study: a
    scaling study of the candidate's training. certificates: folders of `verify`. gates: names of some; None is all.

    against may be one registered version, `NAME@ALIAS` or `models:/NAME/VERSION`: the gates are then `speed`,
    `convergence` and `data`, by the evidence that its promotion kept and its policy, or `policy`. Without runs, those
    in MLflow of its experiment are judged that train the same, began after its promotion and in the last `days` (8),
    and have finished or failed. Raises UsageError, ConfigError and TrackingError.
    """
    from scaleray.launch.gate.gate import judge

    return judge(
        [str(run) for run in runs],
        against=[str(run) for run in ([against] if isinstance(against, str | Path) else against)],
        policy=policy,
        study=study,
        certificates=[str(one) for one in certificates],
        gates=gates,
        days=days,
        uri=uri,
    )


@names_what_is_missing
def profile(
    what: Config,
    workload: Any = None,
    *,
    steps: int = 50,
    trace: str | None = None,
    local: bool = False,
    uri: str | None = None,
    show: Show = lambda messages: None,
    say: Say = lambda text: None,
) -> Profiled:
    """Where the time of a training goes, what limits it and what to try next: `.verdict` of the result.

    what: a config (a RunConfig, a mapping or a YAML file), of which `steps` steps are trained; or a run that has been
    recorded: its folder, its name in the storage path, or its id or name in MLflow at `uri`. trace: ranks to trace over
    some more steps, such as `0,slowest,one-a-node`: `.traced` of the result. local: in gloo processes, without Ray.
    """
    from scaleray.launch.profile.profile import profile_run, profile_training
    from scaleray.records.trace_request import trace_request

    if isinstance(what, str | Path) and Path(what).suffix not in (".yaml", ".yml"):
        return profile_run(str(what), uri=uri)
    whole, base_dir, workload = resolved(what, workload)
    wanted = trace_request(trace) if trace is not None else None
    return profile_training(
        whole, workload, steps=steps, local=local, trace=wanted, show=show, say=say, base_dir=base_dir
    )


@names_what_is_missing
def report(run: str | Path, *, out: str | Path | None = None, uri: str | None = None) -> list[Path]:
    """Write the report of a recorded training, study or sweep again; its files, report.html first.

    run: its folder, its name in the storage path, or its id or name in MLflow at `uri`. out: a folder; None is the
    run's own.
    """
    from scaleray.reports.records.any import write_report
    from scaleray.tracking.find_record import find_run

    return write_report(find_run(str(run), uri=uri), None if out is None else Path(out))


def resolved(config: Config, workload: Any) -> tuple[RunConfig, Path | None, Any]:
    """A config that is whole, the folder that its paths begin in, and the workload that was given, as an object."""
    named = {"workload.name": name_of(workload)} if workload is not None else {}
    base_dir = None
    if isinstance(config, Mapping):
        config = load_config(flags=config, defaults=named)
    elif not isinstance(config, RunConfig):
        base_dir = Path(config).resolve().parent
        config = load_config(config, defaults=named)
    if isinstance(workload, type):
        workload = make_workload(workload, config.workload.name, config.workload.args)
    return config, base_dir, workload
