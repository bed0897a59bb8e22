"""The tasks of a path, by its settings: what each runs, and where it writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from scaleray.errors import UsageError
from scaleray.monitoring.rules.files import PATH as ALERTS
from scaleray.records.path import Act, PathRecord, PathTask

JOB, POLICY, STATE, RUNS, PIPELINE = "job.yaml", "policy.yaml", "path.json", "runs", "pipeline"
BASELINE, CANDIDATE = "baseline", "candidate"
VERIFY, STUDY, SWEEP, DECIDE = "distribute/verify", "optimise/study", "optimise/sweep", "optimise/decide"
FIRST, GATE, PROMOTE, CHECK = "distribute/first-0", "validate/gate", "produce/promote", "produce/check"
BATCH = "batch.global_size"
ALERTS_WORD = "{alerts}"
"""Place of the rules of alerts with the limits that the promotion has measured."""
NO_CLUSTER = "the path began without --cluster, for which the planner would give advice"


def tasks_of(path: PathRecord) -> list[PathTask]:
    """The tasks of a path, in their order."""
    return [*_baseline(path), *_distribute(path), *_optimise(path), *_validate(path), *_produce(path)]


def _baseline(path: PathRecord) -> list[PathTask]:
    first = replace(path, settings={})  # the baseline and the first run are what changes are held against
    return [_training(first, "baseline", BASELINE, seed, workers=1) for seed in range(path.runs)]


def _distribute(path: PathRecord) -> list[PathTask]:
    verify = ["verify", *job_words(path), "--strategies", path.strategy, "--world-sizes"]
    first = replace(path, settings={})  # what a trial changes asks for proofs, not for other machines
    advice = _task("distribute/plan", f"what the planner advises for {path.cluster or 'a cluster'}",
                   ["plan", *job_words(first), "--cluster", str(path.cluster)])  # fmt: skip
    if path.cluster is None:
        advice = replace(advice, command=[], status="skipped", words=NO_CLUSTER)
    return [
        _task("distribute/doctor", "the machines are ready", ["doctor", *job_words(first), *_local(path)]),
        _task(VERIFY, "the distributed training equals that of one process",
              [*verify, f"1,{path.workers}", *_local(path)]),
        _task("distribute/resume", "an interrupted training goes on as if it had not been",
              [*verify, str(path.workers), "--resume", *_local(path)]),
        advice,
        _training(first, "distribute", "first", 0, workers=path.workers),
    ]  # fmt: skip


def _optimise(path: PathRecord) -> list[PathTask]:
    half, most = max(path.workers, path.batch_size // 2), 4 * path.batch_size
    sweep = ["sweep", *job_words(replace(path, settings={})), "--guided", "--batch-sizes", f"{half}..{most}",
             "--rules", "linear,sqrt,none"]  # fmt: skip
    sweep += ["--stop.at", path.target, "--workers-per-trial", str(path.workers)]
    return [
        _task(STUDY, "speed and efficiency by the number of workers",
              ["study", *job_words(path), "--world-sizes", f"1,{path.workers}", *_local(path)]),
        _task("optimise/profile", "what limits the first run", ["profile", run_folder(path, "first-0")]),
        _task(SWEEP, "which batch size and rule of the learning rate are worth a trial", sweep),
        PathTask(key=DECIDE, act="decide", what="changes to try, or to go on without one",
                 words="a person decides: `scaleray path try NAME --section.key value ...`, or `scaleray path skip "
                 f"{DECIDE} --reason WORDS`"),
    ]  # fmt: skip


def _validate(path: PathRecord) -> list[PathTask]:
    found = [_training(path, "validate", CANDIDATE, seed, workers=path.workers) for seed in range(path.runs)]
    size = int(path.settings.get(BATCH, path.batch_size))
    sizes = [one for one in (size // 2, 2 * size) if one >= path.workers]
    found += [_training(path, "validate", f"batch-{one}", 0, workers=path.workers, settings={BATCH: one})
              for one in sizes]  # fmt: skip
    found += [_training(path, "validate", f"workers-{one}", 0, workers=one) for one in between(path.workers)]
    faults = _training(path, "validate", "faults", 0, workers=path.workers, settings={"checkpoint.every": "{quarter}"})
    soak = _training(path, "validate", "soak", 0, workers=path.workers, settings={"stop.after": path.soak})
    return [
        *found,
        replace(faults, act="faults", what="killed in the middle, and gone on to the same end"),
        replace(soak, act="soak", what=f"a long training: {path.soak}"),
        _task(GATE, "all five gates", ["gate", *_evidence(path)]),
    ]


def _produce(path: PathRecord) -> list[PathTask]:
    uri = ["--uri", path.tracking_uri] if path.tracking_uri else []
    pipeline = ["--pipeline", f"{path.folder}/{PIPELINE}"]
    return [
        _task(PROMOTE, f"a version that {path.alias} names, with the pipeline that trains it again",
              ["promote", *_evidence(path), "--as", path.alias, "--model", path.model, *pipeline,
               "--cluster", path.kind]),
        _task(CHECK, "the version holds what was promoted, and its pipeline trains it",
              ["promote", "--verify", f"{path.model}@{path.alias}", *pipeline, *uri]),
        _task("produce/dashboards", "dashboards for Grafana, and a configuration of Prometheus",
              ["dashboards", "write", "--folder", f"{path.folder}/dashboards", "--alerts", ALERTS_WORD]),
        PathTask(key="produce/runbook", act="runbook", what="a runbook for whoever is called"),
    ]  # fmt: skip


def between(workers: int) -> list[int]:
    """The numbers of workers between one and `workers` at which convergence is looked at: each doubling."""
    found, size = [], 2
    while size < workers:
        found.append(size)
        size *= 2
    return found


def again(path: PathRecord, settings: Mapping[str, Any]) -> list[PathTask]:
    """The tasks of a path whose trainings have other settings: those whose command that changes are open again."""
    known = {task.key: task for task in path.tasks}
    fresh = tasks_of(replace(path, settings=dict(settings)))
    return [
        known[one.key] if one.key in known and known[one.key].command == one.command else one for one in fresh
    ]  # fmt: skip


def trial_training(path: PathRecord, name: str, seed: int, settings: Mapping[str, Any]) -> PathTask:
    """A training of a trial, or of what is the best beside it."""
    return _training(path, "optimise", name, seed, workers=path.workers, settings=settings)


def filled(path: PathRecord, words: Sequence[str]) -> list[str]:
    """The words of a command with what earlier tasks gave: folders of study and certificate, a quarter of a training's
    steps; trainings that were skipped are left out. Raises UsageError where no baseline is left."""
    places, found = {"{study}": STUDY, "{verify}": VERIFY, ALERTS_WORD: PROMOTE}, list[str]()
    skipped = {run_folder(path, task.key.partition("/")[2]) for task in path.tasks if task.status == "skipped"}
    for word in words:
        if word == "{quarter}":
            found.append(f"{_quarter(path)} steps")
        elif word in skipped and words[0] != "train":
            continue
        elif word not in places:
            found.append(word)
        elif (
            (task := path.task(places[word])) is not None
            and task.status == "done"
            and (task.folder or word == ALERTS_WORD)
        ):
            found.append(f"{path.folder}/{PIPELINE}/{ALERTS}" if word == ALERTS_WORD else task.folder)
        else:
            found.pop()  # the option that names it: the gates say what lacks, and limits are the usual ones
    if "--against" in words:
        _check_sides(path, skipped)
    return found


def _check_sides(path: PathRecord, skipped: set[str]) -> None:
    for name, what in ((BASELINE, "the baseline"), (CANDIDATE, "the candidate")):
        if all(run_folder(path, f"{name}-{seed}") in skipped for seed in range(path.runs)):
            step = BASELINE if name == BASELINE else "validate"
            allowed = "all its trainings were skipped, and there is nothing that gates could look at"
            raise UsageError(what, None, allowed, f"scaleray path redo {step}/{name}-0")


def _quarter(path: PathRecord) -> int:
    for key in (f"validate/{CANDIDATE}-0", FIRST):
        if (task := path.task(key)) is not None and task.figures.get("steps"):
            return max(1, int(task.figures["steps"]) // 4)
    raise UsageError(
        "the length of a training",
        None,
        "a fault is planted after a quarter of one that was seen, and none was",
        f"scaleray path redo {FIRST}",
    )


def _training(
    path: PathRecord, step: str, name: str, seed: int, *, workers: int, settings: Mapping[str, Any] | None = None
) -> PathTask:
    run = f"{name}-{seed}"
    words = ["train", *job_words(path, settings), "--scale.workers", str(workers), "--seed", str(seed)]
    words += ["--tracking.run-name", run]
    words += _local(path) if workers == 1 else []  # several workers of a training are Ray's
    many = f"{workers} worker{'s' * (workers > 1)}"
    of_size = f", batch {settings[BATCH]}" if settings and BATCH in settings else ""
    return _task(f"{step}/{run}", f"a training on {many}{of_size}, seed {seed}", words, act="train")


def _task(key: str, what: str, words: list[str], act: Act = "command") -> PathTask:
    return PathTask(key=key, what=what, command=words, act=act)


def job_words(path: PathRecord, settings: Mapping[str, Any] | None = None) -> list[str]:
    """Options that name the path's job, what was changed in it, and where its runs are kept. A database in the path's
    folder is named too, as the job names where it was before the folder moved."""
    words = ["-c", f"{path.folder}/{JOB}"]
    words += ["--tracking.uri", path.tracking_uri] if f"{path.folder}/" in path.tracking_uri else []
    for key, value in {**path.settings, **(settings or {})}.items():
        words += [f"--{key.replace('_', '-')}", str(value)]
    return [*words, "--checkpoint.storage-path", f"{path.folder}/{RUNS}"]


def _local(path: PathRecord) -> list[str]:
    return ["--local"] if path.local else []


def run_folder(path: PathRecord, run: str) -> str:
    """The folder of a run of the path."""
    return f"{path.folder}/{RUNS}/{run}"


def _evidence(path: PathRecord) -> list[str]:
    candidates, baselines = (
        [run_folder(path, f"{name}-{seed}") for seed in range(path.runs)] for name in (CANDIDATE, BASELINE)
    )
    policy = ["--policy", f"{path.folder}/{POLICY}"]
    return [*candidates, "--against", *baselines, *policy, "--study", "{study}", "--certificates", "{verify}"]
