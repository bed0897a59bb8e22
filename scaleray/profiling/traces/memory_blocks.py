"""Snapshot of a device's memory: purpose of its blocks, and memory that is reserved but unused.

Two formats are read: scaleray's own JSON, and the pickles of `torch.cuda.memory._dump_snapshot`. Only containers,
numbers and text are loaded from these, so that opening one runs no code.
"""

import io
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NoReturn

from scaleray.errors import TraceError

FORMAT = "scaleray memory snapshot 1"
CATEGORIES = ("parameters", "gradients", "optimizer state", "activations and others")
PICKLE_START = b"\x80"
IN_USE = ("active_allocated", "active_awaiting_free", "active_pending_free")
_ADVICE = "take it again: scaleray profile -c FILE --memory"
_BY_FRAMES = {  # for pickles, which lack the addresses of parameters: by running code, innermost first
    "/optim/": CATEGORIES[2],
    "_engine_run_backward": CATEGORIES[1],
}


@dataclass(frozen=True)
class Block:
    """A block of the allocator. category: empty if it is not in use."""

    size: int
    requested: int
    is_used: bool
    category: str
    where: str
    """Innermost Python frame that allocated it, if recorded."""


@dataclass(frozen=True)
class MemorySnapshot:
    """All blocks of a device at one moment, by segment, and their totals in bytes."""

    file: str
    rank: int | None
    segments: list[list[Block]] = field(repr=False)
    grows: list[bool] = field(repr=False)
    """Whether each segment grows and shrinks (expandable_segments); such a segment has no stranded memory."""

    @property
    def is_expandable(self) -> bool:
        """Whether any segment can grow."""
        return any(self.grows)

    @property
    def blocks(self) -> list[Block]:
        return [block for segment in self.segments for block in segment]

    @property
    def reserved_bytes(self) -> int:
        return sum(block.size for block in self.blocks)

    @property
    def active_bytes(self) -> int:
        return sum(block.size for block in self.blocks if block.is_used)

    @property
    def rounding_bytes(self) -> int:
        """Bytes of blocks in use beyond the requested ones."""
        return sum(block.size - block.requested for block in self.blocks if block.is_used)

    @property
    def cached_bytes(self) -> int:
        """Unused bytes that the allocator keeps for later requests."""
        return self.reserved_bytes - self.active_bytes

    @property
    def stranded_bytes(self) -> int:
        """Unused bytes in partly used segments, which cannot be returned. Segments that grow return whole pages, and
        torch's own count also excludes them."""
        whole = (segment for segment, grows in zip(self.segments, self.grows, strict=True) if not grows)
        partly_used = (segment for segment in whole if any(block.is_used for block in segment))
        return sum(block.size for segment in partly_used for block in segment if not block.is_used)

    @property
    def largest_hole_bytes(self) -> int:
        """Size of the largest unused block."""
        return max((block.size for block in self.blocks if not block.is_used), default=0)

    @property
    def fragmentation(self) -> float | None:
        """1 minus the largest hole's share of all unused bytes: 0 if they are contiguous; None if there are none."""
        return 1 - self.largest_hole_bytes / self.cached_bytes if self.cached_bytes else None

    def by_category(self) -> dict[str, int]:
        """Bytes of the blocks in use by purpose, largest first."""
        sums = dict.fromkeys(CATEGORIES, 0)
        for block in self.blocks:
            if block.is_used:
                sums[block.category] += block.size
        return dict(sorted(((name, size) for name, size in sums.items() if size), key=lambda item: -item[1]))


def read_snapshot(file: BinaryIO, name: str) -> MemorySnapshot:
    """Read the snapshot in an open, uncompressed file. Raises TraceError if it is not a snapshot."""
    content = file.read()
    try:
        values = _unpickled(content, name) if content.startswith(PICKLE_START) else json.loads(content)
        segments = values["segments"]
        blocks = [[_block(block) for block in segment["blocks"]] for segment in segments]
    except TraceError:
        raise
    except Exception as exc:
        raise TraceError(
            name,
            f"not a complete memory snapshot ({type(exc).__name__}: {exc})",
            "it must have segments with blocks, as written by torch.cuda.memory._dump_snapshot or scaleray",
            _ADVICE,
        ) from exc
    if not any(blocks):
        raise TraceError.problem(name, "has no memory blocks: a device in use has some", _ADVICE)
    grows = [bool(segment.get("is_expandable")) for segment in segments]
    return MemorySnapshot(name, values.get("rank"), blocks, grows)


class _Containers(pickle.Unpickler):
    """Unpickler for containers, numbers and text; rejects anything that would import a module, as that can run code."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        super().__init__(file)
        self.name = name

    def find_class(self, module: str, name: str) -> NoReturn:
        raise TraceError(
            self.name,
            f"a pickle that imports {module}.{name}",
            "a memory snapshot contains only containers, numbers and text; this file could run any code",
            "do not open it with any other program either, unless you trust its source",
        )

    def persistent_load(self, pid: object) -> NoReturn:
        raise TraceError(
            self.name, "a pickle that refers to other pickles", "a memory snapshot has no such references", _ADVICE
        )


def _unpickled(content: bytes, name: str) -> Mapping[str, Any]:
    found = _Containers(io.BytesIO(content), name).load()
    if not isinstance(found, dict):
        raise TypeError(f"{type(found).__name__} instead of dict")
    return found


def _block(block: Mapping[str, Any]) -> Block:
    is_used = block["state"] in IN_USE
    frames = [frame if isinstance(frame, str) else _to_text(frame) for frame in block.get("frames") or ()]
    category = block.get("category") or next(
        (name for part, name in _BY_FRAMES.items() if any(part in frame for frame in frames)), CATEGORIES[3]
    )
    requested = int(block.get("requested_size", block["size"]))
    return Block(int(block["size"]), requested, is_used, category if is_used else "", frames[0] if frames else "")


def _to_text(frame: Mapping[str, Any]) -> str:
    return f"{frame.get('filename', '')}:{frame.get('line', '')} {frame.get('name', '')}"
