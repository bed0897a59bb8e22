"""Manifest of a checkpoint: the location of tensors, small values, and the SHA-256 of every file. The manifest is
written last. A folder without a complete one is not a checkpoint."""

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
"""Beginning of the text in every format: the SHA-256 of all that follows, which no format may change."""


@dataclass(frozen=True)
class Chunk:
    """Rectangular part of a tensor and the bytes that hold it, row by row, in a file of `Manifest.files`.

    digest: xxh3-128 of these bytes, to detect changes since the last checkpoint. It does not protect against forgery;
    the SHA-256 of every file does."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int
    digest: str


@dataclass(frozen=True)
class Tensor:
    """One saved tensor. dtype: torch's name of it, such as float32."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class StoredFile:
    """Hash and size of a file, which is named relative to the run's checkpoints folder;
    an incremental checkpoint names files of older ones."""

    sha256: str
    num_bytes: int


@dataclass(frozen=True)
class Manifest:
    """One checkpoint. step: optimizer steps taken. facts: config, hashes, MLflow run, and `metrics` with the step that
    they were measured at, `evaluated_at`, which may be before this one."""

    step: int
    world_size: int
    strategy: str
    created_at: float
    tensors: dict[str, Tensor]
    values: dict[str, Any]
    """State other than tensors, by item: schedule, scaler, progress and so on. JSON."""
    files: dict[str, StoredFile]
    facts: dict[str, Any] = field(default_factory=dict)
    chain: int = 0
    """Number of checkpoints since the last full one; 0 is full, holding every byte itself."""
    bytes_written: int = 0
    format: int = FORMAT
    sha256: str | None = field(default=None, init=False, compare=False)
    """Hash at the beginning of the file that it was read from."""

    @property
    def name(self) -> str:
        """Name of the checkpoint's folder."""
        return folder_name(self.step)

    @property
    def evaluated_at(self) -> int | None:
        """Number of steps after which the metrics were measured; None without metrics, or if it is not known."""
        # manifests of older versions say it in the state alone
        step = self.facts.get("evaluated_at", self.values.get("progress", {}).get("evaluated_at"))
        return step if isinstance(step, int) and step >= 0 and self.metrics else None

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last evaluation before this checkpoint, in this step or an older one."""
        found = self.facts.get("metrics")
        return {k: v for k, v in found.items() if isinstance(v, (int, float))} if isinstance(found, dict) else {}

    @property
    def own_metrics(self) -> dict[str, float]:
        """Metrics measured on exactly this state: only these show its quality."""
        return self.metrics if self.evaluated_at == self.step else {}

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors together, in all files."""
        return sum(chunk.length for tensor in self.tensors.values() for chunk in tensor.chunks)

    def to_json(self) -> str:
        """The text of the file, which begins with a hash of its rest."""
        values = {name: value for name, value in dataclasses.asdict(self).items() if name != "sha256"}
        rest = json.dumps(values, indent=0).removeprefix("{")
        return HASH % _digest(rest.encode()) + rest

    @classmethod
    def from_json(cls, text: bytes, *, where: str) -> Manifest:
        """Read and check a manifest.
        Raises Damaged if it is truncated or changed, CheckpointError for a newer format."""
        head = len(HASH % ("0" * 64))
        rest = bytes(text[head:])
        if bytes(text[:head]) != (HASH % _digest(rest)).encode():
            raise Damaged(f"{where} is cut short or changed: its content does not match its hash")
        try:
            body = load_json(inert_json(b"{" + rest))
            number = body["format"]
            if not isinstance(number, int) or number > FORMAT:
                raise CheckpointError(
                    "the format of checkpoint " + where,
                    number,
                    f"this version reads formats up to {FORMAT}",
                    "it was written by a newer scaleray: upgrade, or name another checkpoint",
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
            raise Damaged(f"{where} is no manifest of this format: {exc!r}") from None
        strange = [name for name in manifest.files if not IN_FOLDER.fullmatch(name)]
        if strange:
            raise Damaged(f"{where} names a file outside of the checkpoints folder: {strange[0]}")
        return manifest


class Incomplete(Exception):
    """Error for an invalid checkpoint: half written, truncated or damaged."""


class Damaged(Incomplete):
    """Error for a checkpoint that was complete and whose manifest is cut or changed."""


def folder_name(step: int) -> str:
    """Folder name of the checkpoint after this many steps; names sort by step."""
    return f"step-{step:09d}"


def step_of(folder: str) -> int | None:
    """The step of a folder's name; None for other folders."""
    match = re.fullmatch(r"step-([0-9]{9,})", folder)
    return int(match[1]) if match and folder_name(int(match[1])) == folder else None


IN_FOLDER = re.compile(r"step-[0-9]{9,}/[A-Za-z0-9_-][A-Za-z0-9._-]*")


def _digest(rest: bytes) -> str:
    return hashlib.sha256(rest).hexdigest()
