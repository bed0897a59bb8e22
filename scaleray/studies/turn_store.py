"""Turns that were measured before, kept next to the runs: a study reuses those of the same conditions, so that the
turns of an interrupted one are not lost, and those of a finished one are not measured again.

What was measured stays as it is: a file's name holds the hash of its content, and a file that says something else is
refused. What turns out to be invalid stays too, with the reason, and is not taken over.
"""

from __future__ import annotations

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
from scaleray.records.study_record import Conditions, NoiseCourse, ToTarget, Turn

Kept = TypeVar("Kept", Turn, ToTarget, NoiseCourse)
FOLDER = "study_turns"
TARGET, NOISE = "target-", "noise-"
INVALID = f"{FOLDER}/invalid"
"""Folder with a file for each study whose turns must not be used."""
SEALED = re.compile(r"-(?P<time>\d+\.\d{3})-(?P<hash>[0-9a-f]{16})\.json$")
"""End of a file's name: when it was measured, in seconds since 1970, and the beginning of its content's SHA-256."""


@dataclasses.dataclass(frozen=True)
class InvalidTurns:
    """Turns of one study, or those of one number of workers, that must not be used. Times in seconds since 1970."""

    study: str
    reason: str
    from_s: float
    to_s: float
    workers: int | None = None

    def holds(self, rung: str, *, study: str | None, at: float) -> bool:
        """Whether a result of this rung is one of them. study: the one that measured it, None where that is not kept
        with it."""
        if self.workers is not None and not rung.startswith(f"w{self.workers:03d}-"):
            return False
        return study == self.study if study is not None else self.from_s <= at <= self.to_s


def mark_invalid(storage_path: str, turns: InvalidTurns) -> None:
    """Keep these turns from being taken over by later studies. Raises OSError."""
    name = f"{turns.study}{'' if turns.workers is None else f'-w{turns.workers:03d}'}.json"
    Store(storage_path).child(INVALID).write_text(name, json.dumps(dataclasses.asdict(turns)))


class KnownTurns:
    """Files `FOLDER/CONDITIONS/RUNG/turn-....json` under the storage path, one for each turn.

    A rung's name says all that the conditions do not: workers, batch, micro-batch, strategy, and whether it was
    relaunched.
    """

    def __init__(self, storage_path: str, conditions: Conditions) -> None:
        self.conditions = conditions
        self.store = Store(storage_path).child(f"{FOLDER}/{key_of(conditions)}")
        self.invalid = _read_invalid(Store(storage_path).child(INVALID))

    def turns(self, rung: str) -> list[Turn]:
        """Turns of a rung, oldest first. A file that cannot be read counts as not there."""
        found = [self._read(name, Turn) for name in self.store.names(rung) if "/turn-" in f"/{name}"]
        return sorted((turn for turn in found if turn is not None and self._is_valid(rung, turn)), key=_measured_at)

    def to_target(self, rung: str) -> ToTarget | None:
        """Duration of the newest training of a rung to the target."""
        return self._newest(f"{rung}/{TARGET}", ToTarget)

    def noise(self, rung: str, settings: NoiseScaleSettings, *, is_to_target: bool) -> NoiseCourse | None:
        """The newest noise of a rung that was measured with these settings, over the training to the target or its
        first steps."""
        return self._newest(f"{rung}/{_noise_name(settings, is_to_target)}", NoiseCourse)

    def keep(self, rung: str, turn: Turn) -> None:
        """Write a turn, whole or not at all."""
        self._write(f"{rung}/turn-", turn, at=turn.measured_at)

    def keep_target(self, rung: str, result: ToTarget, *, at: float) -> None:
        """Write what a training to the target took. at: seconds since 1970."""
        self._write(f"{rung}/{TARGET}", result, at=at)

    def keep_noise(
        self, rung: str, result: NoiseCourse, settings: NoiseScaleSettings, *, is_to_target: bool, at: float
    ) -> None:
        """Write a rung's noise. at: seconds since 1970."""
        self._write(f"{rung}/{_noise_name(settings, is_to_target)}", result, at=at)

    def _newest(self, start: str, kind: type[Kept]) -> Kept | None:
        rung, _, stem = start.rpartition("/")
        names = sorted(name for name in self.store.names(rung) if f"/{stem}" in f"/{name}" and self._is_of_valid(name))
        return self._read(names[-1], kind) if names else None

    def _is_valid(self, rung: str, turn: Turn) -> bool:
        return not any(one.holds(rung, study=turn.study, at=turn.measured_at) for one in self.invalid)

    def _is_of_valid(self, name: str) -> bool:
        """Whether a result that does not say which study it is of was measured by none that is invalid."""
        sealed = SEALED.search(name)
        rung = name.rpartition("/")[0].rpartition("/")[2]
        return sealed is None or not any(one.holds(rung, study=None, at=float(sealed["time"])) for one in self.invalid)

    def _write(self, start: str, value: Turn | ToTarget | NoiseCourse, *, at: float) -> None:
        text = json.dumps(jsonable(dataclasses.asdict(value)))
        self.store.write_text(f"{start}{at:.3f}-{_hash(text.encode())}.json", text)

    def _read(self, name: str, kind: type[Kept]) -> Kept | None:
        """Raises StorageError for a file whose content is not what was measured."""
        try:
            content = self.store.read(name)
        except OSError:
            return None
        sealed = SEALED.search(name)
        if sealed is not None and sealed["hash"] != _hash(content):
            problem, hint = "it was changed: its hash differs", "remove it, or measure again with --force"
            raise StorageError("a measured turn", self.store.path(name), problem, hint)
        try:
            return TypeAdapter(kind).validate_json(content)
        except ValidationError:
            return None


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _measured_at(turn: Turn) -> float:
    return turn.measured_at


def _read_invalid(store: Store) -> list[InvalidTurns]:
    found = []
    with contextlib.suppress(OSError):
        for name in store.names():
            with contextlib.suppress(OSError, ValidationError):
                found.append(TypeAdapter(InvalidTurns).validate_json(store.read(name)))
    return found


def _noise_name(settings: NoiseScaleSettings, is_to_target: bool) -> str:
    return f"{NOISE}{'target' if is_to_target else 'start'}-{digest(settings.model_dump())[:8]}-"


def studies_of(turns: Iterable[Turn], *, own: str) -> str | None:
    """The studies that measured turns which this one did not, in words; None where it measured all."""
    turns = list(turns)
    others = [turn.study for turn in turns if turn.study != own]
    if not others:
        return None
    names = ", ".join(dict.fromkeys(others))
    return names if len(others) == len(turns) else f"{names} ({len(others)} of {len(turns)} measurements)"
