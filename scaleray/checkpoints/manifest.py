"""Manifest of a checkpoint: the locations of tensors, small values, and the SHA-256 of every file. It is written last;
a folder without a complete manifest is not a checkpoint."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any

from scaleray.common.parsing import inert_json, load_json
from scaleray.errors import CheckpointError

FORMAT = 1
FILE_NAME = "manifest.json"
HASH = '{"manifest_sha256": "%s",'
"""Beginning of the text in every format, which no version may change: the SHA-256 of the rest."""


@dataclass(frozen=True)
class Chunk:
    """Rectangular part of a tensor, and the location of its bytes, row by row, in a file of `Manifest.files`.

    digest: xxh3-128 of these bytes, for detecting changes since the last checkpoint. Unlike the SHA-256 of every file,
    it does not protect against forgery."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int
    digest: str


@dataclass(frozen=True)
class Tensor:
    """A saved tensor. dtype: torch's name for it, such as float32."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class StoredFile:
    """Hash and size of a file, named relative to the run's checkpoints folder. An incremental checkpoint also names
    files of older ones."""

    sha256: str
    num_bytes: int


@dataclass(frozen=True)
class Manifest:
    """One checkpoint. step: optimizer steps taken. facts: config, hashes, MLflow run, and `metrics` with the step at
    which they were measured, `evaluated_at`, which may be an earlier one."""

    step: int
    world_size: int
    strategy: str
    created_at: float
    tensors: dict[str, Tensor]
    values: dict[str, Any]
    """Non-tensor state as JSON, by item: schedule, scaler, progress and so on."""
    files: dict[str, StoredFile]
    facts: dict[str, Any] = field(default_factory=dict)
    chain: int = 0
    """Number of checkpoints since the last full one. 0 for a full checkpoint, whose bytes are all in its own files."""
    bytes_written: int = 0
    format: int = FORMAT
    sha256: str | None = field(default=None, init=False, compare=False)
    """Hash at the beginning of the file from which the manifest was read."""

    @property
    def name(self) -> str:
        """Name of the checkpoint's folder."""
        return folder_name(self.step)

    @property
    def evaluated_at(self) -> int | None:
        """Number of steps after which the metrics were measured; None without metrics, or if unknown."""
        # manifests of older versions have it only in the state
        step = self.facts.get("evaluated_at", self.values.get("progress", {}).get("evaluated_at"))
        return step if isinstance(step, int) and step >= 0 and self.metrics else None

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last evaluation before this checkpoint, at this step or an earlier one."""
        found = self.facts.get("metrics")
        return {k: v for k, v in found.items() if isinstance(v, (int, float))} if isinstance(found, dict) else {}

    @property
    def own_metrics(self) -> dict[str, float]:
        """Metrics measured on exactly this state; only these describe its quality."""
        return self.metrics if self.evaluated_at == self.step else {}

    @property
    def total_bytes(self) -> int:
        """Total bytes of all tensors, in all files."""
        return sum(chunk.length for tensor in self.tensors.values() for chunk in tensor.chunks)

    def to_json(self) -> str:
        """Return the text of the file, which begins with a hash of the rest."""
        values = {name: value for name, value in dataclasses.asdict(self).items() if name != "sha256"}
        rest = json.dumps(values, indent=0).removeprefix("{")
        return HASH % _digest(rest.encode()) + rest

    @classmethod
    def from_json(cls, text: bytes, *, where: str) -> Manifest:
        """Parse and check a manifest. Raises Damaged if it is truncated or changed, CheckpointError for a newer
        format."""
        head = len(HASH % ("0" * 64))
        rest = bytes(text[head:])
        if bytes(text[:head]) != (HASH % _digest(rest)).encode():
            raise Damaged(f"{where} is truncated or changed: its content does not match its hash")
        try:
            body = load_json(inert_json(b"{" + rest))
            number = body["format"]
            if not isinstance(number, int) or number > FORMAT:
                raise CheckpointError(
                    "the format of checkpoint " + where,
                    number,
                    f"this version reads formats up to {FORMAT}",
                    "it was written by a newer scaleray: upgrade, or use another checkpoint",
                )
            tensors = {
                name: Tensor(
                    t["dtype"],
                    tuple(t["shape"]),
                    tuple(
                        Chunk(tuple(c["offsets"]), tuple(c["sizes"]), c["file"], c["start"], c["length"], c["digest"])
                        for c in t["chunks"]
                    ),
                )
                for name, t in body.pop("tensors").items()
            }
            files = {name: StoredFile(**stored) for name, stored in body.pop("files").items()}
            manifest = cls(tensors=tensors, files=files, **body)
            object.__setattr__(manifest, "sha256", _digest(rest))
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise Damaged(f"{where} is not a manifest of this format: {exc!r}") from None
        strange = [name for name in manifest.files if not IN_FOLDER.fullmatch(name)]
        if strange:
            raise Damaged(f"{where} names a file outside of the checkpoints folder: {strange[0]}")
        return manifest


class Incomplete(Exception):
    """Error for an invalid checkpoint: incomplete, truncated or damaged."""


class Damaged(Incomplete):
    """Error for a checkpoint that was complete but whose manifest is truncated or changed."""


def folder_name(step: int) -> str:
    """Folder name of the checkpoint after this many steps; names sort by step."""
    return f"step-{step:09d}"


def step_of(folder: str) -> int | None:
    """Return the step in a folder's name; None for other folders."""
    match = re.fullmatch(r"step-([0-9]{9,})", folder)
    return int(match[1]) if match and folder_name(int(match[1])) == folder else None


IN_FOLDER = re.compile(r"step-[0-9]{9,}/[A-Za-z0-9_-][A-Za-z0-9._-]*")


def _digest(rest: bytes) -> str:
    return hashlib.sha256(rest).hexdigest()
