"""Tasks of a path: name, command, inputs and purpose."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scaleray.common.printed import quantity
from scaleray.errors import UsageError
from scaleray.live.rules.rule_files import PATH as ALERTS
from scaleray.records.path_record import PathRecord, PathTask

JOB, POLICY, STATE = "job.yaml", "policy.yaml", "path.json"
RUNS, PIPELINE, LOGS = "runs", "pipeline", "logs"
BASELINE, CANDIDATE = "baseline", "candidate"
VERIFY, STUDY, SWEEP, DECIDE = "distribute/verify", "optimise/study", "optimise/sweep", "optimise/decide"
FIRST, GATE, PROMOTE, CHECK = "distribute/first-0", "validate/gate", "produce/promote", "produce/check"
BATCH = "batch.global_size"
NEEDS = {
    "{study}": (STUDY,),
    "{verify}": (VERIFY,),
    "{alerts}": (PROMOTE,),
    "{quarter}": (f"validate/{CANDIDATE}-0", FIRST),
}
"""Placeholders in commands, and the tasks whose results replace them: folders of the study and the certificate, alert
rules with the limits measured by the promotion, a quarter of the steps of the first known training."""
A_PERSON = (
    f"a person decides: `scaleray path skip {DECIDE} --reason WORDS` continues with this job; "
    "`scaleray path start --name NAME --section.key value ...` starts a path with another"
)
NO_CLUSTER = "the path was started without --cluster, so the planner has no cluster to plan for"


def tasks_of(path: PathRecord) -> list[PathTask]:
    """Table of a path's tasks, in order: name, what the task proves, and its command, in which words in braces are
    results of other tasks (`NEEDS`)."""
    job, local = job_words(path), ["--local"] if path.local else []
    verify = ["verify", *job, "--strategies", path.strategy, "--world-sizes"]
    halved, doubled = max(path.workers, path.batch_size // 2), 2 * path.batch_size
    pipeline = ["--pipeline", f"{path.folder}/{PIPELINE}"]
    seeds = range(path.runs)
    plan = PathTask(
        key="distribute/plan",
        what=f"the planner's advice for {path.cluster or 'a cluster'}",
        command=["plan", *job, "--cluster", str(path.cluster)],
    )
    return [
        *(_training(path, f"{BASELINE}/{BASELINE}-{seed}", workers=1, seed=seed) for seed in seeds),
        PathTask(key="distribute/doctor", what="the machines are ready", command=["doctor", *job, *local]),
        PathTask(
            key=VERIFY,
            what="the distributed training equals that of one process",
            command=[*verify, f"1,{path.workers}", *local],
        ),
        PathTask(
            key="distribute/resume",
            what="an interrupted training continues as if uninterrupted",
            command=[*verify, str(path.workers), "--resume", *local],
        ),
        plan if path.cluster is not None else replace(plan, command=[], status="skipped", words=NO_CLUSTER),
        _training(path, FIRST),
        PathTask(
            key=STUDY,
            what="speed and efficiency by the number of workers",
            command=["study", *job, "--world-sizes", f"1,{path.workers}", *local],
        ),
        PathTask(
            key="optimise/profile",
            what="the bottleneck of the first run",
            command=["profile", run_folder(path, FIRST.partition("/")[2])],
        ),
        PathTask(
            key=SWEEP,
            what="the batch size and learning-rate rule that reach the target fastest",
            command=[
                "sweep", *job, "--guided", "--batch-sizes", f"{halved}..{2 * doubled}", "--rules", "linear,sqrt,none",
                "--stop.at", path.target, "--workers-per-trial", str(path.workers),
            ],
        ),
        PathTask(key=DECIDE, act="decide", what="continue with this job, or with a changed one", words=A_PERSON),
        *(_training(path, f"validate/{CANDIDATE}-{seed}", seed=seed) for seed in seeds),
        *(
            _training(path, f"validate/batch-{size}-0", {BATCH: size})
            for size in (path.batch_size // 2, doubled)
            if size >= path.workers
        ),
        *(_training(path, f"validate/workers-{number}-0", workers=number) for number in between(path.workers)),
        replace(
            _training(path, "validate/faults-0", {"checkpoint.every": "{quarter}"}),
            act="faults",
            what="killed in the middle and resumed to the same result",
        ),
        replace(
            _training(path, "validate/soak-0", {"stop.after": path.soak}),
            act="soak",
            what=f"a long training: {path.soak}",
        ),
        PathTask(key=GATE, what="all five gates", command=["gate", *_evidence(path)]),
        PathTask(
            key=PROMOTE,
            what=f"a version with the alias {path.alias}, and the pipeline that retrains it",
            command=[
                "promote", *_evidence(path), "--as", path.alias, "--model", path.model, *pipeline, "--cluster",
                path.kind,
            ],
        ),
        PathTask(
            key=CHECK,
            what="the version is unchanged since its promotion, and its pipeline retrains it",
            command=[
                "promote", "--verify", f"{path.model}@{path.alias}", *pipeline,
                *(["--uri", path.tracking_uri] if path.tracking_uri else []),
            ],
        ),
        PathTask(
            key="produce/dashboards",
            what="dashboards for Grafana, and a configuration of Prometheus",
            command=["dashboards", "write", "--folder", f"{path.folder}/dashboards", "--alerts", "{alerts}"],
        ),
        PathTask(key="produce/runbook", act="runbook", what="a runbook for people on call"),
    ]  # fmt: skip


def between(workers: int) -> list[int]:
    """Numbers of workers between one and `workers` at which convergence is checked, by doubling."""
    found, size = [], 2
    while size < workers:
        found.append(size)
        size *= 2
    return found


def filled(path: PathRecord, words: Sequence[str]) -> list[str]:
    """Words of a command, with the results of the tasks that it needs and without skipped trainings. Raises UsageError
    if no baseline is left."""
    found = list[str]()
    skipped = {run_folder(path, task.key.partition("/")[2]) for task in path.tasks if task.status == "skipped"}
    for word in words:
        if word in skipped and words[0] != "train":
            continue
        if word not in NEEDS:
            found.append(word)
        elif word == "{quarter}":
            found.append(f"{_quarter(path)} steps")
        elif result := _result(path, word):
            found.append(result)
        else:
            found.pop()  # the option that names it: the gates say what lacks, and limits are the usual ones
    if "--against" in words:
        _check_sides(path, skipped)
    return found


def _result(path: PathRecord, word: str) -> str:
    task = path.task(NEEDS[word][0])
    if task is None or task.status != "done":
        return ""
    return f"{path.folder}/{PIPELINE}/{ALERTS}" if word == "{alerts}" else task.folder


def _check_sides(path: PathRecord, skipped: set[str]) -> None:
    for name, what in ((BASELINE, "The baseline"), (CANDIDATE, "The candidate")):
        if all(run_folder(path, f"{name}-{seed}") in skipped for seed in range(path.runs)):
            step = BASELINE if name == BASELINE else "validate"
            raise UsageError.problem(
                what,
                "has nothing for the gates to check: all its trainings were skipped",
                f"scaleray path redo {step}/{name}-0",
            )


def _quarter(path: PathRecord) -> int:
    for key in NEEDS["{quarter}"]:
        if (task := path.task(key)) is not None and task.figures.get("steps"):
            return max(1, int(task.figures["steps"]) // 4)
    raise UsageError.problem(
        "The length of a training",
        "is unknown, because none finished: faults are injected after a quarter of it",
        f"scaleray path redo {FIRST}",
    )


def _training(
    path: PathRecord, key: str, keys: Mapping[str, Any] | None = None, *, workers: int | None = None, seed: int = 0
) -> PathTask:
    """Command for a training of the path's job with changed config keys. workers: None: all."""
    number = path.workers if workers is None else workers
    command = ["train", *job_words(path, keys), "--scale.workers", str(number), "--seed", str(seed)]
    command += ["--tracking.run-name", key.partition("/")[2]]
    command += ["--local"] if path.local and number == 1 else []  # several workers of a training are Ray's
    of_size = f", batch {keys[BATCH]}" if keys and BATCH in keys else ""
    what = f"a training on {quantity(number, 'worker')}{of_size}, seed {seed}"
    return PathTask(key=key, what=what, command=command, act="train")


def job_words(path: PathRecord, keys: Mapping[str, Any] | None = None) -> list[str]:
    """Options that name the path's job, changed keys, and the location of its runs. A database in the path's folder is
    also named, since the job has its location before the folder was moved."""
    words = ["-c", f"{path.folder}/{JOB}"]
    words += ["--tracking.uri", path.tracking_uri] if f"{path.folder}/" in path.tracking_uri else []
    for key, value in (keys or {}).items():
        words += [f"--{key.replace('_', '-')}", str(value)]
    return [*words, "--checkpoint.storage-path", f"{path.folder}/{RUNS}"]


def run_folder(path: PathRecord, run: str) -> str:
    """The folder of a run of the path."""
    return f"{path.folder}/{RUNS}/{run}"


def _evidence(path: PathRecord) -> list[str]:
    candidates, baselines = (
        [run_folder(path, f"{name}-{seed}") for seed in range(path.runs)] for name in (CANDIDATE, BASELINE)
    )
    policy = ["--policy", f"{path.folder}/{POLICY}"]
    return [*candidates, "--against", *baselines, *policy, "--study", "{study}", "--certificates", "{verify}"]


def log_of(path: PathRecord, task: PathTask) -> Path:
    """The log file of the task's command."""
    return Path(path.folder) / LOGS / f"{task.key.replace('/', '-')}.log"
