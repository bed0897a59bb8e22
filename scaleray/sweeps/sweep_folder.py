"""Files of a sweep: its question, a small file for each trial that has ended, and the final record.

A trial's file is written atomically, so that an interrupted sweep continues with exactly the trials that have none.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from scaleray.checkpoints.storage import Store
from scaleray.common.parsing import load_json
from scaleray.config.base import absolute_path
from scaleray.errors import ConfigError, first_line
from scaleray.launch.session.run_folder import RunFolder
from scaleray.records.json_record import jsonable
from scaleray.records.read import FILE
from scaleray.records.sweep_record import SweepRecord, Trial
from scaleray.sweeps.search_space import LogUniform, Settings, Space
from scaleray.sweeps.sweep_question import SweepQuestion

ASKED_FILE, TRIALS = "sweep.json", "trials"
FORMAT = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedSweep:
    """Everything needed to repeat a sweep, or to run its remaining trials.

    candidates: ordered by number. run_id: id of the MLflow run.
    """

    config: dict[str, Any]
    question: SweepQuestion
    candidates: list[Settings]
    refused: list[tuple[Settings, str]]
    command: str
    base_dir: str | None
    data: dict[str, str | None]
    """SHA-256 of the training data, by the workload's arguments."""
    started_at: float
    run_id: str


class SweepFolder:
    """A sweep's files, local or in a bucket."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.store = Store(folder.path)

    def write_asked(self, asked: AskedSweep) -> None:
        """Write the question, before the first trial."""
        self.store.write_text(
            ASKED_FILE, json.dumps({"format": FORMAT, **jsonable(dataclasses.asdict(asked))}, indent=1)
        )

    def write_trial(self, trial: Trial) -> None:
        """Write the record of a trial that has ended."""
        self.store.write_text(f"{TRIALS}/{trial.number:05d}.json", json.dumps(jsonable(dataclasses.asdict(trial))))

    def read_trials(self) -> list[Trial]:
        """Return the trials that have ended, by number. Raises ConfigError for a damaged file."""
        adapter = TypeAdapter(Trial)
        found = []
        for name in self.store.names(TRIALS):
            name = name if name.startswith(TRIALS) else f"{TRIALS}/{name}"
            if not name.endswith(".json"):
                continue
            try:
                found.append(adapter.validate_json(self.store.read(name)))
            except (OSError, ValidationError) as exc:
                raise ConfigError.problem(
                    "--continue",
                    f"{self.store.path(name)} cannot be read: {first_line(exc)}",
                    "remove the file to run this trial again",
                ) from exc
        return sorted(found, key=lambda trial: trial.number)


def finished_record(path: str, *, option: str = "--continue") -> SweepRecord | None:
    """Return the record of a finished sweep; None if the sweep is not finished.

    Raises ConfigError, with the name of `option`, for a damaged record.
    """
    try:
        return TypeAdapter(SweepRecord).validate_json(Store(path).read(FILE))
    except ValidationError as exc:
        file = Store(path).path(FILE)
        raise ConfigError.problem(option, f"{file} is not the record of a sweep: {first_line(exc)}") from exc
    except (OSError, ValueError):  # a URI of an unknown kind: `read_asked` reports it
        return None


def grid_record(folder: str | Path) -> SweepRecord:
    """Return the record of a finished sweep of a whole grid. Raises ConfigError if the folder has none."""
    found = finished_record(absolute_path(str(folder)), option="--against-grid")
    if found is None:
        raise ConfigError.problem(
            "--against-grid", f"{folder} has no record of a sweep", "give the folder of a finished sweep"
        )
    return found


def read_asked(path: str) -> AskedSweep:
    """Return the question of an interrupted sweep. Raises ConfigError if the folder has none."""
    store = Store(path)
    file = store.path(ASKED_FILE)
    try:
        values = load_json(store.read(ASKED_FILE))
    except FileNotFoundError:
        raise ConfigError.problem(
            "--continue", f"{path} is not the folder of a sweep: it has no {ASKED_FILE}"
        ) from None
    except (OSError, ValueError) as exc:
        raise ConfigError.problem("--continue", f"{file} cannot be read: {exc}") from exc
    if values.pop("format", None) != FORMAT:
        raise ConfigError.problem(
            "--continue", f"{file} was written by another version of scaleray", "continue with that version"
        )
    try:
        rates = values["question"]["space"]["learning_rates"]
        space = {
            **values["question"]["space"],
            "choices": {k: tuple(v) for k, v in values["question"]["space"]["choices"].items()},
        }
        space["learning_rates"] = LogUniform(**rates) if isinstance(rates, dict) else tuple(rates)
        question = SweepQuestion(**{**values["question"], "space": Space(**space)})
        refused = [(settings, reason) for settings, reason in values["refused"]]
        return AskedSweep(**{**values, "question": question, "refused": refused})
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise ConfigError.problem("--continue", f"{file} was not written by a sweep: {exc}") from exc
