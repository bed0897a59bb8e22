"""Turns that were measured before, kept beside the runs: a study takes those of the same conditions over, so that what
an interrupted one has measured is not lost, and what a finished one has is not measured again."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Iterable
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from scaleray.checkpoints.storage import Store
from scaleray.config.noise_scale import NoiseScaleSettings
from scaleray.launch.session.conditions import digest, key_of
from scaleray.records.json_record import jsonable
from scaleray.records.study import Conditions, NoiseCourse, ToTarget, Turn

Kept = TypeVar("Kept", Turn, ToTarget, NoiseCourse)
FOLDER = "study_turns"
TARGET, NOISE = "target-", "noise-"


class KnownTurns:
    """Files `FOLDER/CONDITIONS/RUNG/turn-....json` under the storage path, one for each turn.

    A rung's name says all that the conditions do not: workers, batch, micro-batch, strategy, and whether it was
    relaunched.
    """

    def __init__(self, storage_path: str, conditions: Conditions) -> None:
        self.conditions = conditions
        self.store = Store(storage_path).child(f"{FOLDER}/{key_of(conditions)}")

    def turns(self, rung: str) -> list[Turn]:
        """Turns of a rung, oldest first. A file that cannot be read counts as not there."""
        found = [self._read(name, Turn) for name in self.store.names(rung) if "/turn-" in f"/{name}"]
        return sorted((turn for turn in found if turn is not None), key=lambda turn: turn.measured_at)

    def to_target(self, rung: str) -> ToTarget | None:
        """What the newest training of a rung to the target took."""
        return self._newest(f"{rung}/{TARGET}", ToTarget)

    def noise(self, rung: str, settings: NoiseScaleSettings, *, is_to_target: bool) -> NoiseCourse | None:
        """The newest noise of a rung that was measured with these settings, over the training to the target or its
        first steps."""
        return self._newest(f"{rung}/{_noise_name(settings, is_to_target)}", NoiseCourse)

    def keep(self, rung: str, turn: Turn) -> None:
        """Write a turn, whole or not at all."""
        self._write(f"{rung}/turn-{turn.measured_at:.3f}-{secrets.token_hex(2)}.json", turn)

    def keep_target(self, rung: str, result: ToTarget, *, at: float) -> None:
        """Write what a training to the target took. at: seconds since 1970."""
        self._write(f"{rung}/{TARGET}{at:.3f}.json", result)

    def keep_noise(
        self, rung: str, result: NoiseCourse, settings: NoiseScaleSettings, *, is_to_target: bool, at: float
    ) -> None:
        """Write a rung's noise. at: seconds since 1970."""
        self._write(f"{rung}/{_noise_name(settings, is_to_target)}{at:.3f}.json", result)

    def _newest(self, start: str, kind: type[Kept]) -> Kept | None:
        rung, _, stem = start.rpartition("/")
        names = sorted(name for name in self.store.names(rung) if f"/{stem}" in f"/{name}")
        return self._read(names[-1], kind) if names else None

    def _write(self, name: str, value: Turn | ToTarget | NoiseCourse) -> None:
        self.store.write_text(name, json.dumps(jsonable(dataclasses.asdict(value))))

    def _read(self, name: str, kind: type[Kept]) -> Kept | None:
        try:
            return TypeAdapter(kind).validate_json(self.store.read(name))
        except (OSError, ValidationError):
            return None


def _noise_name(settings: NoiseScaleSettings, is_to_target: bool) -> str:
    return f"{NOISE}{'target' if is_to_target else 'start'}-{digest(settings.model_dump())[:8]}-"


def studies_of(turns: Iterable[Turn], *, own: str) -> str | None:
    """The studies that measured turns which this one did not, in words; None where it measured all."""
    turns = list(turns)
    others = [turn.study for turn in turns if turn.study != own]
    if not others:
        return None
    names = ", ".join(dict.fromkeys(others))
    return names if len(others) == len(turns) else f"{names} ({len(others)} of {len(turns)} turns)"
