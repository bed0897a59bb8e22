"""Snapshot of a device's memory, in scaleray's own JSON: every block of the allocator, and what it is used for.

Only on CUDA, whose allocator can report blocks. Parameters, gradients and optimizer state are recognised by their
addresses; the other blocks are activations and temporary memory of kernels. Written and reviewed without a GPU."""

import json
from collections.abc import Iterator
from typing import Any

import torch

from scaleray.profiling.traces.memory_blocks import CATEGORIES, FORMAT
from scaleray.records.worker_requests import TraceRequest
from scaleray.training.setup.model_setup import Setup
from scaleray.training.setup.rank_context import RankContext

MOST_EVENTS = 200_000
"""Maximum number of allocations stored in the device's history; the newest come last."""
MOST_FRAMES = 4
"""Maximum number of Python frames stored for a block; the innermost come first."""


class MemoryHistory:
    """History of one device's memory over the traced steps, and the snapshot at their end."""

    def __init__(self, request: TraceRequest, place: RankContext) -> None:
        self.request, self.place = request, place
        self.is_on = False

    def start(self) -> None:
        """Record from now on where each block is allocated. Does nothing on the CPU, whose allocator does not report
        it."""
        if self.place.device.type == "cuda":
            # python alone: frames of C++ take minutes
            torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS, stacks="python")
            self.is_on = True

    def taken(self, setup: Setup) -> bytes | None:
        """Take the snapshot, as JSON, and end the history; None on the CPU."""
        if not self.is_on:
            return None
        snapshot = torch.cuda.memory._snapshot(self.place.device)
        self.stop()
        return as_json(snapshot, addresses_of(setup), rank=self.place.rank)

    def stop(self) -> None:
        """End the history."""
        if self.is_on:
            torch.cuda.memory._record_memory_history(enabled=None)
            self.is_on = False


def as_json(snapshot: dict[str, Any], addresses: dict[int, str], *, rank: int) -> bytes:
    """Convert a snapshot of torch's allocator to JSON. addresses: known contents by address."""
    segments = [
        {
            "total_size": segment["total_size"],
            "segment_type": segment.get("segment_type", ""),
            "is_expandable": bool(segment.get("is_expandable", False)),
            "blocks": [_block(block, addresses) for block in segment["blocks"]],
        }
        for segment in snapshot["segments"]
    ]
    return json.dumps({"format": FORMAT, "rank": rank, "segments": segments}).encode()


def addresses_of(setup: Setup) -> dict[int, str]:
    """Address of the storage of each parameter, gradient and part of the optimizer's state, with its category."""
    parameters, gradients, states = CATEGORIES[:3]
    found: dict[int, str] = {}
    for parameter in setup.parallel.module.parameters():
        for tensor, category in ((parameter, parameters), (parameter.grad, gradients)):
            for local in _local(tensor):
                found[local.untyped_storage().data_ptr()] = category
    for state in setup.optimizer.state.values():
        for value in state.values() if isinstance(state, dict) else ():
            for local in _local(value):
                found.setdefault(local.untyped_storage().data_ptr(), states)
    return found


def _local(value: Any) -> Iterator[torch.Tensor]:
    """This process's part of a tensor, which may be sharded."""
    if isinstance(value, torch.Tensor):
        yield value.to_local() if hasattr(value, "to_local") else value.detach()


def _block(block: dict[str, Any], addresses: dict[int, str]) -> dict[str, Any]:
    frames = [f"{frame['filename']}:{frame['line']} {frame['name']}" for frame in block.get("frames", ())]
    return {
        "size": block["size"],
        "requested_size": block.get("requested_size", block["size"]),
        "state": block["state"],
        "category": addresses.get(block.get("address", -1), ""),
        "frames": frames[:MOST_FRAMES],
    }
