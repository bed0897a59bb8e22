"""Earlier measurements, stored next to the runs. A study reuses those taken under the same conditions, either its own
from before an interruption or another study's. They are immutable: a file's name has the hash of its content, and a
changed file is refused. Invalid ones are retained with the reason and not reused."""

import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from scaleray.checkpoints.storage import Store
from scaleray.config.batch_noise_scale import NoiseScaleSettings
from scaleray.errors import StorageError
from scaleray.launch.session.conditions import digest, key_of
from scaleray.records.json_record import jsonable
from scaleray.records.study_record import Conditions, NoiseHistory, Repeat, ToTarget

Kept = TypeVar("Kept", Repeat, ToTarget, NoiseHistory)
FOLDER = "study_turns"
TURN, TARGET = "turn-", "target-"
INVALID = f"{FOLDER}/invalid"
"""Folder with a file for each study whose measurements must not be used."""
SEALED = re.compile(r"-(?P<time>\d+\.\d{3})-(?P<hash>[0-9a-f]{16})\.json$")
"""End of a file name: time of the measurement, in seconds since 1970, and the beginning of its content's SHA-256."""


@dataclasses.dataclass(frozen=True)
class InvalidRepeats:
    """Measurements of one study, or of one number of workers, that must not be used. Times in seconds since 1970."""

    study: str
    reason: str
    from_s: float
    to_s: float
    workers: int | None = None

    def holds(self, size: str, *, study: str | None, at: float) -> bool:
        """Whether a result of this size is among them. study: study that took it; None if not recorded."""
        if self.workers is not None and not size.startswith(f"w{self.workers:03d}-"):
            return False
        return study == self.study if study is not None else self.from_s <= at <= self.to_s


def mark_invalid(storage_path: str, turns: InvalidRepeats) -> None:
    """Exclude these measurements from reuse by later studies. Raises OSError."""
    name = f"{turns.study}{'' if turns.workers is None else f'-w{turns.workers:03d}'}.json"
    Store(storage_path).child(INVALID).write_text(name, json.dumps(dataclasses.asdict(turns)))


class StoredRepeats:
    """Files `FOLDER/CONDITIONS/SIZE/turn-....json` under the storage path, one for each measurement.

    The name of a size has all facts that are not in the conditions: workers, batch, micro-batch, strategy, and whether
    it was relaunched."""

    def __init__(self, storage_path: str, conditions: Conditions) -> None:
        self.conditions = conditions
        self.store = Store(storage_path).child(f"{FOLDER}/{key_of(conditions)}")
        self.invalid = _read_invalid(Store(storage_path).child(INVALID))

    def turns(self, size: str) -> list[Repeat]:
        """Measurements of a size, oldest first. Unreadable files are ignored."""
        found = [self._read(name, Repeat) for name in self.store.names(size) if f"/{TURN}" in f"/{name}"]
        is_valid = lambda turn: not any(o.holds(size, study=turn.study, at=turn.measured_at) for o in self.invalid)
        valid = (turn for turn in found if turn is not None and is_valid(turn))
        return sorted(valid, key=lambda turn: turn.measured_at)

    def to_target(self, size: str) -> ToTarget | None:
        """The newest result of training a size to the target."""
        return self._newest(f"{size}/{TARGET}", ToTarget)

    def noise(self, size: str, kind: str) -> NoiseHistory | None:
        """The newest noise measurement of a size. kind: see `noise_kind`."""
        return self._newest(f"{size}/{kind}", NoiseHistory)

    def keep(self, size: str, kind: str, result: Repeat | ToTarget | NoiseHistory, *, at: float) -> None:
        """Write a result atomically. kind: `TURN`, `TARGET` or a `noise_kind`. at: seconds since 1970."""
        text = json.dumps(jsonable(dataclasses.asdict(result)))
        self.store.write_text(f"{size}/{kind}{at:.3f}-{_hash(text.encode())}.json", text)

    def _newest(self, start: str, kind: type[Kept]) -> Kept | None:
        size, _, stem = start.rpartition("/")
        names = sorted(name for name in self.store.names(size) if f"/{stem}" in f"/{name}" and self._is_of_valid(name))
        return self._read(names[-1], kind) if names else None

    def _is_of_valid(self, name: str) -> bool:
        """Whether a stored result does not belong to an invalid study."""
        sealed = SEALED.search(name)
        size = name.rpartition("/")[0].rpartition("/")[2]
        return sealed is None or not any(one.holds(size, study=None, at=float(sealed["time"])) for one in self.invalid)

    def _read(self, name: str, kind: type[Kept]) -> Kept | None:
        """Read a result. Raises StorageError for a file whose content was changed."""
        try:
            content = self.store.read(name)
        except OSError:
            return None
        sealed = SEALED.search(name)
        if sealed is not None and sealed["hash"] != _hash(content):
            raise StorageError.problem(
                "The measurement",
                f"{self.store.path(name)} was changed: its hash differs",
                "remove it, or measure again with --force",
            )
        try:
            return TypeAdapter(kind).validate_json(content)
        except ValidationError:
            return None


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _read_invalid(store: Store) -> list[InvalidRepeats]:
    found = []
    with contextlib.suppress(OSError):
        for name in store.names():
            with contextlib.suppress(OSError, ValidationError):
                found.append(TypeAdapter(InvalidRepeats).validate_json(store.read(name)))
    return found


def noise_kind(settings: NoiseScaleSettings, is_to_target: bool) -> str:
    """Kind of noise measured with these settings, over the training to the target or its first steps."""
    return f"noise-{'target' if is_to_target else 'start'}-{digest(settings.model_dump())[:8]}-"


def studies_of(turns: Iterable[Repeat], *, own: str) -> str | None:
    """Other studies whose measurements this one reuses, as text; None if there are none."""
    turns = list(turns)
    others = [turn.study for turn in turns if turn.study != own]
    if not others:
        return None
    names = ", ".join(dict.fromkeys(others))
    return names if len(others) == len(turns) else f"{names} ({len(others)} of {len(turns)} measurements)"
