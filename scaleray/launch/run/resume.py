"""Find the interrupted run that a command continues, and check the new config against that of the run."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import yaml

from scaleray.checkpoints.catalog import Catalog
from scaleray.checkpoints.manifest import Manifest
from scaleray.checkpoints.storage import Store
from scaleray.common.parsing import load_json
from scaleray.config import RunConfig, load_config
from scaleray.config.base import HIDDEN, absolute_path, without_password
from scaleray.config.checkpoint import default_storage_path
from scaleray.config.decides import Decides, decides
from scaleray.config.strategy_traits import TRAITS
from scaleray.errors import CheckpointError, ConfigError, first_line
from scaleray.records.json_record import NewerRecord
from scaleray.records.run_record import RunRecord


@dataclass(frozen=True)
class Change:
    """A key whose value changed."""

    key: str
    before: Any
    after: Any
    follows_evaluations: bool = False
    """Whether evaluations influence the learning rate or the end of the training."""

    @property
    def alters_training(self) -> bool:
        """Whether the run would continue as another training."""
        if self.key == "strategy.name":
            exact = {"auto", *(name for name, traits in TRAITS.items() if not traits.trains_apart)}
            return not {self.before, self.after} <= exact
        is_followed = self.follows_evaluations and self.key == "evaluation.every"
        return is_followed or decides(self.key) is Decides.RESULT

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.after}"


def changes(before: Mapping[str, Any], after: RunConfig) -> list[Change]:
    """Return every key whose value differs. before: a config saved by `RunConfig.to_dict`, possibly by an older
    version."""
    old, new = dict(_flat(before)), dict(_flat(after.to_dict()))
    defaults = dict(_flat(_defaults(after)))
    found = []
    for key in sorted(old.keys() | new.keys()):
        # a key that the older version lacked is equivalent to its present default
        was = old[key] if key in old else defaults.get(key)
        if was != new.get(key):
            found.append(Change(key, was, new.get(key), after.follows_evaluations))
    return found


def training_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flat keys that determine the result: equal for two runs of the same training."""
    return {key: value for key, value in _flat(config) if decides(key) is Decides.RESULT}


def _defaults(config: RunConfig) -> dict[str, Any]:
    """The config without optional keys."""
    required = {
        "workload": {"name": config.workload.name},
        "batch": {"global_size": config.batch.global_size},
        "optimizer": {"learning_rate": config.optimizer.learning_rate},
        "stop": {"after": config.stop.after},
    }
    return RunConfig.model_validate(required).to_dict()


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name.count(".") < 1 and name not in ("workload.args",):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


Say = Callable[[str], None]
Settled = Callable[[RunConfig, Path | None], RunConfig]
AUTO = "auto"
FILE = "run.json"
KINDS: dict[str, tuple[type, ...]] = {
    "config": (dict,),
    "config.checkpoint": (dict,),
    "name": (str, NoneType),
    "key": (str, NoneType),
    "run_id": (str, NoneType),
    "experiment_id": (str, NoneType),
    "tracking_uri": (str, NoneType),
    "base_dir": (str, NoneType),
    "started_at": (float, int, NoneType),
}
"""Types of the values that `RunNote` writes; older versions may lack a key, which then counts as null."""


@dataclass(frozen=True)
class Interrupted:
    """An interrupted run that can continue. about: its run.json. newest: its newest complete checkpoint; None if it
    starts from the first step."""

    path: str
    about: dict[str, Any]
    newest: Manifest | None

    @property
    def config(self) -> dict[str, Any]:
        """Config that the run was started with."""
        config: dict[str, Any] = self.about["config"]
        return config

    def valid_config(self) -> RunConfig:
        """Validated config that the run was started with. Raises CheckpointError."""
        try:
            return RunConfig.model_validate(self.config)
        except ValueError as exc:
            raise _damaged(self.path, exc) from exc

    def finished_record(self, say: Say = lambda text: None) -> RunRecord | None:
        """Record of this run if it has finished. say: logs a damaged record."""
        try:
            record = RunRecord.from_json(Store(self.path).read("record.json"))
        except OSError:
            return None
        except NewerRecord as exc:
            raise CheckpointError.problem(
                f"the run {self.path}", f"cannot be read: {exc}", "resume it with the version of scaleray that wrote it"
            ) from exc
        except (ValueError, TypeError) as exc:
            say(
                f"warning: record.json of {without_password(self.path)} is damaged ({first_line(exc)}); "
                "the newest checkpoint shows whether the run had ended, and its end rewrites the record"
            )
            return None
        return record if record.status == "FINISHED" else None


@dataclass(frozen=True)
class Request:
    """Start of a training, at its first step or after an interrupted run. before: the interrupted run. changed:
    differences from its config."""

    base_dir: Path | None
    before: Interrupted | None
    changed: Sequence[Change]

    def finished_record(self, say: Say) -> RunRecord | None:
        """Record of the run to continue, if that run has already finished."""
        if self.before is None or any(change.alters_training for change in self.changed):
            return None
        return self.before.finished_record(say)


def make_request(
    config: RunConfig | None,
    base_dir: Path | None,
    *,
    resume: str | None,
    allow_change: Sequence[str],
    say: Say,
    settled: Settled = lambda config, base_dir: config,
) -> tuple[RunConfig, Request]:
    """Return a training's config and its start, which is an interrupted run with `resume`. settled: adds the workload's
    own settings to the config, as they are in the interrupted run's config. Raises UsageError."""
    if config is not None and resume == AUTO:
        config = settled(config, base_dir)
    before = find(resume, config, base_dir, say=say) if resume is not None else None
    if config is None:
        if before is None:
            raise ConfigError("config", None, "", "give a file with -c")
        config = before.valid_config()
    if before is None:
        return config, Request(base_dir, None, [])
    if base_dir is None and before.about.get("base_dir"):
        base_dir = Path(before.about["base_dir"])
    if resume != AUTO and changes(before.config, config):  # else its workload need not be loaded
        config = settled(config, base_dir)
    if config.scale.gpus_per_worker == "auto":  # as it was decided
        known = float(before.config.get("scale", {}).get("gpus_per_worker", 0.0))
        config = config.changed({"scale.gpus_per_worker": known})
    return config, Request(base_dir, before, check_changes(before, config, allow_change))


def find(
    where: str, config: RunConfig | None, base_dir: Path | None = None, *, say: Say = lambda text: None
) -> Interrupted | None:
    """Find the run to continue, given its folder, its name in the storage path, or `auto`.

    auto: the newest unfinished run of the same training there, with a workload from the same `base_dir`; None if there
    is none, so that the training starts from scratch. say: logs folders that are skipped because their run.json is
    damaged. Raises CheckpointError for a folder that is not a run."""
    if where != AUTO:
        path = absolute_path(where)
        if "/" not in where and not _exists(path):
            storage = config.checkpoint.storage_path if config is not None else default_storage_path()
            path = absolute_path(f"{storage}/{where}")
        return _open(path, config)
    if config is None:
        raise ConfigError(
            "--resume", AUTO, "it resumes a run with the same config", "give the config with -c, or name the run folder"
        )
    root = Store(absolute_path(config.checkpoint.storage_path))
    if config.tracking.run_name is not None:
        folder = root.child(config.tracking.run_name)
        return _open(folder.root, config) if _exists(folder.root) else None
    wanted = training_values(config.to_dict())
    found: list[tuple[float, str]] = []
    for name in root.names():
        folder = root.child(name)
        try:
            about = load_json(folder.read(FILE))
            _check(about)
            same_place = about.get("base_dir") == (str(base_dir) if base_dir else None)
            if training_values(about["config"]) == wanted and same_place and not is_finished(folder):
                found.append((about.get("started_at") or 0.0, folder.root))
        except OSError:
            continue
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            say(f"warning: {without_password(folder.root)} is skipped: its {FILE} is damaged ({first_line(exc)})")
    return _open(max(found)[1], config) if found else None


def config_of(where: str, flags: Sequence[str]) -> RunConfig:
    """The config of the run in a folder, overridden by flags."""
    before = find(where, None)
    assert before is not None  # only `auto` finds none
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config of the run.yaml")
        path.write_text(yaml.safe_dump(before.config, sort_keys=False))
        return load_config(path, flags=flags)


def is_finished(folder: Store) -> bool:
    """Whether the run in this folder has finished."""
    try:
        return bool(load_json(folder.read("record.json"))["status"] == "FINISHED")
    except (OSError, ValueError, KeyError):
        return False


def check_changes(before: Interrupted, config: RunConfig, allowed: Sequence[str]) -> list[Change]:
    """Return the differences from the interrupted run's config. Raises ConfigError if one would make it another
    training."""
    for key in ("storage_path", "copy_path"):
        if HIDDEN in (value := getattr(config.checkpoint, key) or ""):
            raise ConfigError(
                f"checkpoint.{key}",
                value,
                "the saved value lacks its password",
                f"give it again, with the password: --checkpoint.{key.replace('_', '-')}",
            )
    found = changes(before.config, config)
    refused = [change for change in found if change.alters_training and change.key not in allowed]
    if refused:
        raise ConfigError.problem(
            "the config",
            f"would change the interrupted training: {'; '.join(map(str, refused))}",
            f"use the old values, start a new run, or allow it: {' '.join(f'--allow-change {c.key}' for c in refused)}",
        )
    unknown = set(allowed) - {change.key for change in found}
    if unknown:
        raise ConfigError("--allow-change", ", ".join(sorted(unknown)), "the config has no such change", "leave it out")
    return found


def _damaged(path: str, exc: Exception) -> CheckpointError:
    return CheckpointError(
        f"{FILE} of the run",
        without_password(path),
        f"it is damaged: {first_line(exc)}",
        f"restore an intact copy, or start a run from its weights: --workload.weights {without_password(path)}",
    )


def _exists(path: str) -> bool:
    return Store(path).size(FILE) is not None


def _check(about: Any) -> None:
    """Raise TypeError with the key if a value of run.json has an unexpected type."""
    if not isinstance(about, dict):
        raise TypeError(f"it holds a {type(about).__name__}")
    known = {**about, "config.checkpoint": None}
    if isinstance(about.get("config"), dict):
        known["config.checkpoint"] = about["config"].get("checkpoint")
    for key, kinds in KINDS.items():
        if not isinstance(known.get(key), kinds):
            raise TypeError(f"{key} is {known[key]!r:.80}" if known.get(key) is not None else f"it has no {key}")
    if about.get("run_id") is not None and about.get("experiment_id") is None:
        raise TypeError("it has no experiment_id")


def _open(path: str, config: RunConfig | None) -> Interrupted:
    folder = Store(path)
    try:
        about = load_json(folder.read(FILE))
        _check(about)
    except OSError as exc:
        raise CheckpointError(
            "--resume",
            path,
            "it is not a run folder: it has no readable run.json",
            "run folders are in checkpoint.storage_path",
        ) from exc
    except (ValueError, KeyError, TypeError) as exc:
        raise _damaged(path, exc) from exc
    copy_path = config.checkpoint.copy_path if config else about["config"]["checkpoint"].get("copy_path")
    return Interrupted(path, about, Catalog.of_run(path, copy_path).newest())
