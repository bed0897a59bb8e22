"""What makes a checkpoint: which tensors lie where, the small values, and the SHA-256 of every file.

The manifest is written last. A folder without a whole one is not a checkpoint.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from scaleray.errors import CheckpointError

FORMAT = 1
FILE_NAME = "manifest.json"


@dataclass(frozen=True)
class Chunk:
    """A rectangular part of a tensor and the bytes that hold it, row by row, in a file of `Manifest.files`.

    digest: xxh3-128 of these bytes, which tells whether they changed since the last checkpoint. Not meant against
    forgery: for that, every file has its SHA-256.
    """

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
    """A file, named relative to the run's checkpoints folder; an incremental checkpoint names files of older ones."""

    sha256: str
    num_bytes: int


@dataclass(frozen=True)
class Manifest:
    """One checkpoint. step: optimizer steps taken. facts: config, hashes, MLflow run and metrics at that step."""

    step: int
    world_size: int
    strategy: str
    created_at: float
    tensors: dict[str, Tensor]
    values: dict[str, Any]
    """The state that is no tensor, by item: schedule, scaler, progress and so on. JSON."""
    files: dict[str, StoredFile]
    facts: dict[str, Any] = field(default_factory=dict)
    chain: int = 0
    """Checkpoints since the last full one; 0 is full, holding every byte itself."""
    bytes_written: int = 0
    format: int = FORMAT

    @property
    def name(self) -> str:
        """The folder's name."""
        return folder_name(self.step)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors together, wherever they lie."""
        return sum(chunk.length for tensor in self.tensors.values() for chunk in tensor.chunks)

    def to_json(self) -> str:
        """The text of the file, with a hash of itself in the last field."""
        body = dataclasses.asdict(self)
        return json.dumps({**body, "manifest_sha256": _digest(body)}, indent=0)

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str) -> Manifest:
        """Read and check a manifest. Raises Incomplete where it is cut or changed, CheckpointError for a newer format."""
        try:
            body = json.loads(text)
            claimed = body.pop("manifest_sha256")
            number = body["format"]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise Incomplete(f"{where} is cut short or no manifest") from None
        if not isinstance(number, int) or number > FORMAT:
            raise CheckpointError(
                "the format of checkpoint " + where, number, f"this version reads formats up to {FORMAT}",
                "it was written by a newer scaleray: upgrade, or resume from another checkpoint",
            )  # fmt: skip
        if claimed != _digest(body):
            raise Incomplete(f"{where} does not have the hash it states")
        try:
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
            return cls(tensors=tensors, files=files, **body)
        except (KeyError, TypeError) as exc:
            raise Incomplete(f"{where} lacks a field: {exc}") from None


class Incomplete(Exception):
    """What should be a checkpoint is not one: half written, cut or damaged."""


def folder_name(step: int) -> str:
    """Folder of the checkpoint after this many steps; names sort by step."""
    return f"step-{step:09d}"


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
