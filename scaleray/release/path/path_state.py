"""State of a path, in a folder with which a colleague can continue."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import yaml

from scaleray.common.filesystems import is_locked, lock, write_whole
from scaleray.common.git_state import git_state
from scaleray.common.own_folder import user_or_somebody
from scaleray.config import RunConfig, Target, load_config
from scaleray.config.base import Duration, absolute_path, without_password
from scaleray.config.checkpoint import default_storage_path
from scaleray.errors import ConfigError, UsageError, first_line
from scaleray.launch.session.opened import with_absolute_paths
from scaleray.recording.store import check_reachable, resolve_uri
from scaleray.records.json_record import jsonable
from scaleray.records.path_record import PathRecord
from scaleray.release.gate.policy_file import read_policy
from scaleray.release.gates.policy import Policy
from scaleray.release.path.tasks import JOB, POLICY, STATE, log_of, tasks_of
from scaleray.release.promote.pipeline import KINDS

LOCK, SQLITE = ".lock", "sqlite:///"
SOAK = 3
"""Length of the long training, as a multiple of the job's length."""


def start_path(
    config: str | Path,
    target: str,
    *,
    workers: int,
    runs: int = 5,
    name: str | None = None,
    model: str | None = None,
    policy: str | Path | Mapping[str, Any] | None = None,
    cluster: str | None = None,
    kind: str = "local",
    soak: str | None = None,
    local: bool = False,
    overrides: Sequence[str] | Mapping[str, Any] = (),
) -> PathRecord:
    """Begin a path: a folder with the job, the policy and the tasks.

    config: YAML file of the training. target: metric, >= or <=, and a value. workers: number for the distributed
    training. runs: trainings of each side; with fewer than the policy requires, the gates answer `inconclusive`. name:
    of the path, by default the experiment's. model: name in MLflow's registry, by default the path's. policy: of the
    gates; its target becomes `target`. cluster: for the planner's advice, as for `plan`. kind: kind of cluster for the
    promoted model's pipeline, as for `promote`. soak: length of the long training, by default three times the job's.
    Raises ConfigError, or UsageError for a name that is taken, and then leaves no files behind."""
    wanted = _target(target, workers, runs)
    if kind not in KINDS:
        raise UsageError("--kind", kind, f"it must be one of {', '.join(KINDS)}")
    whole = with_absolute_paths(load_config(config, flags=overrides))
    held = read_policy(policy)
    held = held.model_copy(update={"convergence": held.convergence.model_copy(update={"target": wanted})})
    called = name or whole.tracking.experiment
    folder = Path(whole.checkpoint.storage_path) / f"path-{called}"
    if "://" in whole.checkpoint.storage_path:
        raise UsageError(
            "checkpoint.storage_path", whole.checkpoint.storage_path, "`scaleray path` needs a local folder"
        )
    job = _job(whole, Path(config))
    path = PathRecord(
        name=called,
        folder=str(folder),
        target=str(wanted),
        workers=workers,
        strategy="ddp" if whole.strategy.name == "auto" else whole.strategy.name,
        batch_size=whole.batch.global_size,
        runs=runs,
        local=local,
        by=user_or_somebody(),
        started_at=time.time(),
        model=model or called,
        cluster=cluster,
        kind=kind,
        soak=_soak(soak, whole),
        notes=[*_notes(runs, held), *_of_code(held)],
        tracking_uri=without_password(resolve_uri(whole.tracking.uri)),
    )
    _refuse_taken(path)
    check_reachable(resolve_uri(path.tracking_uri))
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / JOB, yaml.safe_dump(job, sort_keys=False))
    write_whole(folder / POLICY, yaml.safe_dump(jsonable(held.model_dump(mode="json")), sort_keys=False))
    return write(replace(path, tasks=tasks_of(path)))


def _target(target: str, workers: int, runs: int) -> Target:
    if workers < 2:
        raise UsageError("--workers", workers, "a path needs at least 2")
    if runs < 1:
        raise UsageError("--runs", runs, "it must be at least 1")
    try:
        return Target.parse(target)
    except ValueError as exc:
        raise ConfigError("--target", target, str(exc), "such as: test/accuracy >= 0.97") from exc


def _soak(given: str | None, config: RunConfig) -> str:
    if given is None:
        return str(replace(config.stop.after, value=SOAK * config.stop.after.value))
    try:
        return str(Duration.parse(given))
    except ValueError as exc:
        raise ConfigError("--soak", given, str(exc)) from exc


def _notes(runs: int, policy: Policy) -> list[str]:
    least = policy.convergence.min_runs
    if runs >= least:
        return []
    return [f"{runs} trainings of each side are fewer than the policy's {least}: its gate will be inconclusive"]


def _of_code(policy: Policy) -> list[str]:
    """Notes on facts about the code that the gate `fingerprint` will miss, reported before any training."""
    state = git_state(Path.cwd())
    if not state:
        return ["this folder has no commit: the gate fingerprint will be inconclusive; start in a checkout"]
    if state["is_dirty"] and not policy.fingerprint.allow_uncommitted:
        return ["there are uncommitted changes: the gate fingerprint will fail; commit them first"]
    return []


def _refuse_taken(path: PathRecord) -> None:
    """Raise UsageError if a path has this name."""
    if (Path(path.folder) / STATE).exists():
        raise UsageError.problem(
            "The path",
            f"{path.name} already exists in {path.folder}",
            "scaleray path next continues it; or choose another --name",
        )


def _job(config: RunConfig, file: Path) -> dict[str, Any]:
    """The config as written in a file, with the absolute path of the workload's file."""
    values: dict[str, Any] = jsonable(config.to_dict())
    target, colon, attribute = config.workload.name.partition(":")
    if target.endswith(".py"):
        candidates = [Path(target), file.resolve().parent / target]
        found = next((candidate.resolve() for candidate in candidates if candidate.is_file()), None)
        if found is None:
            raise ConfigError.problem("workload.name", f"{config.workload.name} names a file that does not exist")
        values["workload"]["name"] = f"{found}{colon}{attribute}"
    return values


def find_path(name: str | None) -> PathRecord:
    """Find the path in a folder, by name in the default storage path, or the only one. Raises UsageError."""
    root = Path(default_storage_path())
    if name is not None:
        for folder in (Path(name).expanduser(), root / f"path-{name}", root / name):
            if os.path.isfile(folder / STATE) or (folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK)):
                return read(folder)
        raise UsageError.problem(
            "The path",
            f"{name} was not found: it is neither a folder with a path nor in {root}",
            "scaleray path start begins one",
        )
    found = sorted(root.glob(f"path-*/{STATE}"))
    if len(found) != 1:
        names = ", ".join(one.parent.name.removeprefix("path-") for one in found) or "none"
        if not found:
            raise UsageError.problem("--name", f"is required: {root} has no path", "scaleray path start begins one")
        raise UsageError("--name", None, f"{root} has {len(found)} paths: {names}", "name one, or its folder")
    return read(found[0].parent)


def read(folder: Path) -> PathRecord:
    """Read the path in a folder. Raises UsageError if it is damaged."""
    try:
        found = PathRecord.read(folder / STATE)
    except (OSError, ValueError) as exc:
        raise UsageError.problem(
            "The path", f"{folder} is damaged: its {STATE} cannot be read: {first_line(exc)}"
        ) from exc
    here = absolute_path(str(folder))
    if found.folder != here:  # it was moved, or is mounted
        found = PathRecord.from_json(json.dumps(_moved(found.to_dict(), found.folder, here)))
    return found if is_locked(folder / LOCK) else _interrupted(found)


def _moved(value: Any, before: str, here: str) -> Any:
    """A value of the record in which paths at or below the folder `before` are moved to `here`, including SQLite
    URIs."""
    if isinstance(value, dict):
        return {key: _moved(one, before, here) for key, one in value.items()}
    if isinstance(value, list):
        return [_moved(one, before, here) for one in value]
    if isinstance(value, str):
        scheme = SQLITE if value.startswith(SQLITE) else ""
        path = value.removeprefix(scheme)
        if path == before or path.startswith(f"{before}/"):
            return f"{scheme}{here}{path.removeprefix(before)}"
    return value


def _interrupted(path: PathRecord) -> PathRecord:
    """State of a path after an interrupted call, in which a task whose command has ended is no longer running."""
    cut = [
        replace(task, status="interrupted") if task.status == "running" and not is_locked(log_of(path, task)) else task
        for task in path.tasks
    ]
    return replace(path, tasks=cut)


def write(path: PathRecord) -> PathRecord:
    """Write the state atomically."""
    write_whole(Path(path.folder) / STATE, path.to_json())  # with the mode of the umask, as all files of the folder
    return path


@contextlib.contextmanager
def locked(path: PathRecord) -> Iterator[PathRecord]:
    """Lock a path and yield its current state.

    Raises UsageError if another process holds it, or if a file of the folder cannot be read or written.
    """
    try:
        with _lock_file(Path(path.folder)) as file:
            if not lock(file):
                raise UsageError.problem("The path", f"{path.name} is in use by another process", "wait until it ends")
            yield _interrupted(read(Path(path.folder)))
    except BrokenPipeError:
        raise
    except OSError as exc:
        hint = f"give the people who share the path access: chmod -R g+rwX {path.folder}, and set umask 002"
        raise UsageError.problem(
            "The path", f"cannot be used: {exc.filename or path.folder} cannot be written: {exc.strerror or exc}", hint
        ) from exc


def _lock_file(folder: Path) -> IO[str]:
    """Open the lock file, which may belong to another user: everyone with write access to the folder may lock it."""
    if not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    lock_file = folder / LOCK
    try:
        return lock_file.open("a")
    except PermissionError:
        return lock_file.open()
