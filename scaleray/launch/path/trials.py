"""Changes that are tried along a path: each is an experiment beside what is the best, kept only if it is better beyond
the noise and no worse in quality."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from scaleray.config import load_config
from scaleray.errors import UsageError
from scaleray.gates.answer import GateResult
from scaleray.gates.convergence import convergence_gate
from scaleray.gates.noisy_means import ALPHA
from scaleray.launch.gate.evidence import collect, learning
from scaleray.launch.gate.policy_file import read_policy
from scaleray.launch.path.commands import folder_of, going_on, is_finished, log_of, of_training, run_command
from scaleray.launch.path.figures import figures_of
from scaleray.launch.path.state import find_path, locked, write
from scaleray.launch.path.tasks import DECIDE, JOB, POLICY, again, trial_training
from scaleray.parsing import load_json
from scaleray.records.path import PathDecision, PathRecord, PathTask, Trial
from scaleray.records.read import FILE
from scaleray.records.run import Say
from scaleray.records.start import steady_time
from scaleray.user_name import user_or_somebody

TO_TARGET = "seconds to target"


def try_on_path(
    trial: str, settings: Mapping[str, Any], *, name: str | None = None, say: Say = lambda text: None
) -> PathRecord:
    """Train with a change as often as the baseline, beside as many runs of what is the best now.

    Kept if it is faster beyond the noise and learns not worse; then the trainings to come have it. What was interrupted
    goes on; what has its verdict keeps it. Raises UsageError for a name that is taken, or where the path is not at its
    trials; ConfigError for keys or values that the config does not allow.
    """
    path = find_path(name)
    with locked(path) as path:
        if any(one.name == trial and one.verdict and one.settings == dict(settings) for one in path.trials):
            return path
        own = Trial(name=trial, settings=dict(settings), by=user_or_somebody(), at=time.time())
        path = write(_begun(path, own))
        best = f"best-{sum(one.is_kept for one in path.trials)}"
        trainings = _trained(path, {best: {}, trial: settings}, by=own.by, say=say)
        judged = replace(_judged(path, own, trainings[1::2], trainings[::2]), trainings=trainings)
        path = replace(path, trials=[judged if one.name == trial else one for one in path.trials])
        if judged.is_kept:
            path = replace(path, settings={**path.settings, **settings})
            path = replace(path, tasks=again(path, path.settings))
        return write(path)


def _begun(path: PathRecord, own: Trial) -> PathRecord:
    """The path with this trial among its trials, which may have been interrupted before."""
    waiting = path.next_task()
    if waiting is None or waiting.key != DECIDE:
        found = "at its end" if waiting is None else waiting.key
        raise UsageError("the path", found, f"changes are tried at {DECIDE}", "scaleray path next")
    known = next((one for one in path.trials if one.name == own.name), None)
    if known is not None and (known.verdict or known.settings != own.settings):
        raise UsageError("the trial", own.name, f"it was tried with {known.settings}", "name it otherwise")
    folder = folder_of(trial_training(path, own.name, 0, own.settings).command)
    if known is None and folder is not None and folder.is_dir():
        raise UsageError("the trial", own.name, f"{folder} is there already", "name it otherwise")
    # a key or a value that is none is found before anything is trained
    load_config(f"{path.folder}/{JOB}", flags=[f"--{key}={value}" for key, value in own.settings.items()])
    if known is not None:
        return path
    what = ", ".join(f"{key} {value}" for key, value in own.settings.items())
    decision = PathDecision(at=own.at, by=own.by, what=f"try {own.name}: {what}")
    return replace(path, trials=[*path.trials, own], decisions=[*path.decisions, decision])


def _trained(path: PathRecord, sides: Mapping[str, Mapping[str, Any]], *, by: str, say: Say) -> list[PathTask]:
    """The trainings of the sides, in turns so that a machine's moods meet both; those that are there already are not
    trained again."""
    known = {task.key: task for trial in path.trials for task in trial.trainings}
    found = []
    for seed in range(path.runs):
        for name, settings in sides.items():
            task = trial_training(path, name, seed, settings)
            task, folder = known.get(task.key, task), folder_of(task.command)
            assert folder is not None
            if not is_finished(folder):
                say(f"{name}: {task.shell}")
                started = steady_time()
                code, printed, said = run_command(going_on(task.command), log=log_of(path, task.key))
                if code:
                    raise UsageError("the trial", name, f"its training ended with exit code {code}: {said}")
                took, figures = steady_time() - started, figures_of(printed)
                task = replace(task, started_at=started, duration_s=took, by=by, figures=figures)
            figures = {**of_training(folder, path.target), **task.figures}
            found.append(replace(task, status="done", folder=str(folder), figures=figures))
    return found


def _judged(path: PathRecord, trial: Trial, changed: Sequence[PathTask], best: Sequence[PathTask]) -> Trial:
    """The trial with its verdict: kept if faster beyond the noise, and not worse."""
    folders = [[one.folder for one in side] for side in (changed, best)]
    quality = _quality(path, *folders)
    is_faster, speed, figures = _speeds(*folders)
    why = [check.words for check in quality.checks if check.answer != "pass"]
    for side, label in ((best, "before"), (changed, "with it")):
        times = [one.figures[TO_TARGET] for one in side if TO_TARGET in one.figures]
        if times:
            figures[f"{TO_TARGET}, {label}"] = mean(times)
    return replace(
        trial,
        is_kept=is_faster and quality.answer == "pass",
        verdict=f"{speed}; learning {quality.answer}" + (f": {'; '.join(why)}" if why else ""),
        figures=figures,
        at=time.time(),
    )


def _speeds(changed: Sequence[str], best: Sequence[str]) -> tuple[bool, str, dict[str, float]]:
    """Whether a change is faster beyond the noise, that in words, and its figures."""
    from scipy.stats import ttest_ind

    known = [[_speed(folder) for folder in side] for side in (changed, best)]
    speeds = [[speed for speed in side if speed is not None] for side in known]
    if speeds != known:
        return False, "too short to have a speed: train for more steps, stop.after", {}
    faster = mean(speeds[0]) / mean(speeds[1])
    # of one run nobody knows how much the next would differ
    chance = ttest_ind(*speeds, equal_var=False, alternative="greater").pvalue if len(best) > 1 else 1.0
    is_faster = bool(chance < ALPHA)
    words = f"{faster:.2f} x the speed ({'beyond' if is_faster else 'within'} the noise, p {chance:.2g})"
    return is_faster, words, {"speed ratio": float(faster), "p": float(chance)}


def _quality(path: PathRecord, changed: list[str], best: list[str]) -> GateResult:
    """The gate of convergence between two sides, less MLPerf's test: that a change learns from fewer samples is what
    it may be tried for, and the promotion asks for all of it."""
    policy = read_policy(Path(path.folder) / POLICY).convergence
    policy = policy.model_copy(update={"not_faster_than_chance": False})
    evidence = collect(changed, against=best)
    sides = (evidence.candidates, evidence.baselines)
    learned = [[learning(one, policy.target, policy.metric_name) for one in side] for side in sides]
    return convergence_gate(learned[0], learned[1], target=policy.target, policy=policy)


def _speed(folder: str) -> float | None:
    """Samples per second of a training; None of one that was over before its steps were steady."""
    speed = load_json((Path(folder) / FILE).read_bytes()).get("samples_per_s")
    return None if speed is None else float(speed)
