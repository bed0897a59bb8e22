"""Checkpoints beside the training: the loop hands over references and goes on; a thread copies, writes and publishes.

The copy runs beside the next forward and backward pass, which only read what is saved. `wait_staged` keeps the optimizer
from changing a tensor that is not copied yet; what a forward pass may change (buffers) is copied at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import DTensor

from scaleray.checkpoints import sharded
from scaleray.checkpoints.catalog import Catalog, Retention
from scaleray.checkpoints.manifest import Chunk, Incomplete, Manifest, StoredFile, Tensor, folder_name
from scaleray.errors import CheckpointError
from scaleray.records import CheckpointRecord, EventRecord

NICENESS = 10  # of a thread that writes beside training


class NotPublished(Exception):
    """All files are written, but the manifest is perhaps not: nobody can say whether the checkpoint exists."""


class Saver:
    """Writes the checkpoints of one worker. Every worker of the group has one and calls it for the same steps.

    group: for this alone, with a backend for CPU tensors; None is a single process. emit: takes CheckpointRecord from rank
    0, and EventRecord from whichever rank failed. A checkpoint that cannot be written is reported and given up: training
    is worth more than one checkpoint.
    before_publishing: called on rank 0 when all files are written, for more facts; what it raises gives the checkpoint up.
    """

    def __init__(
        self, catalog: Catalog, group: dist.ProcessGroup | None, *, world_size: int, strategy: str, is_asynchronous: bool,
        full_every: int, retention: Retention, emit: Callable[[CheckpointRecord | EventRecord], None],
        before_publishing: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:  # fmt: skip
        self.catalog, self.group, self.world_size, self.strategy = catalog, group, world_size, strategy
        self.is_asynchronous, self.full_every, self.retention, self.emit = is_asynchronous, full_every, retention, emit
        self.before_publishing = before_publishing
        self.is_first = group is None or dist.get_rank(group) == 0
        self.stall_s = 0.0
        self.last_saved: int | None = None
        self.failed: set[int] = set()
        """Steps whose checkpoints could not be written, as far as it is known."""
        self._staging = sharded.Staging()
        self._base: dict[sharded.Key, Chunk] = {}
        self._base_files: dict[str, StoredFile] = {}
        self._last: Manifest | None = None  # of `last_saved`; on rank 0
        self._since_full = -1  # checkpoints after the last full one; the same on every rank
        self._thread: threading.Thread | None = None
        self._is_staged = threading.Event()
        self._is_staged.set()

    def start_from(self, manifest: Manifest) -> None:
        """What the checkpoint that training was resumed from holds need not be written again."""
        self._base = {
            (name, chunk.offsets): chunk for name, tensor in manifest.tensors.items() for chunk in tensor.chunks
        }
        self._base_files, self._since_full = dict(manifest.files), manifest.chain
        self.last_saved, self._last = manifest.step, manifest

    def save(
        self, step: int, tensors: Mapping[str, torch.Tensor], *, volatile: set[str], values: Mapping[str, Any], facts: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Begin the checkpoint after `step` steps. Collective, in a thread.

        volatile: names of tensors that a forward pass may change. values: state that is no tensor, as JSON, already copied.
        """
        started = time.perf_counter()
        self.wait()
        self.stall_s = 0.0
        held = {name: tensor.detach().clone() if name in volatile else tensor for name, tensor in tensors.items()}
        versions = {name: _version(tensor) for name, tensor in held.items()}
        self._is_staged.clear()
        arguments = (step, held, versions, dict(values), dict(facts))
        self._thread = threading.Thread(target=self._write, args=arguments, name="scaleray-checkpoint", daemon=True)
        self._thread.start()
        if not self.is_asynchronous:
            self._thread.join()
        self.stall_s += time.perf_counter() - started

    def restate(self, values: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Let the last checkpoint say these values and facts too, which became known after it: its manifest is written anew,
        its tensors stay. On rank 0; elsewhere nothing happens."""
        self.wait()
        if not self.is_first or self._last is None:
            return
        manifest, step = self._last, self._last.step
        if all(manifest.facts.get(name) == value for name, value in facts.items()):
            return
        try:
            facts = {**manifest.facts, **facts, **self.before_publishing()}
            manifest = dataclasses.replace(manifest, values={**manifest.values, **values}, facts=facts)
            problems = self.catalog.publish(manifest)
        except Exception as exc:  # as in `_write`: whatever a storage or a recorder raises
            self._warn(f"the checkpoint at step {step} could not be told its metrics: {_reason(exc)}")
            return
        self._last = manifest
        if problems:
            self._warn(f"the checkpoint at step {step} is not in every place: {problems[0]}")
        self._prune(step)

    def wait_staged(self) -> None:
        """Return when the optimizer may change the tensors."""
        if not self._is_staged.is_set():
            started = time.perf_counter()
            self._is_staged.wait()
            self.stall_s += time.perf_counter() - started

    def wait(self) -> None:
        """Return when the last checkpoint is written, or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(
        self, step: int, tensors: dict[str, torch.Tensor], versions: dict[str, int], values: dict[str, Any], facts: dict[str, Any]
    ) -> None:  # fmt: skip
        started = time.perf_counter()
        since_full = self._since_full + 1
        is_full = since_full >= self.full_every or since_full == 0
        published: list[Manifest] = []
        problems: list[str] = []

        def on_staged() -> None:
            changed = next((name for name, tensor in tensors.items() if _version(tensor) != versions[name]), None)
            self._is_staged.set()
            if self.is_asynchronous:
                _step_back()
            if changed is not None:
                self.is_asynchronous = False  # from here on nothing runs beside the copy
                raise RuntimeError(f"{changed} was changed by a forward pass while it was copied")

        def publish(saved: dict[str, Tensor], new: dict[str, StoredFile], of_ranks: list[str]) -> None:
            used = {chunk.file for tensor in saved.values() for chunk in tensor.chunks}
            files = {name: stored for name, stored in {**self._base_files, **new}.items() if name in used}
            manifest = Manifest(
                step, self.world_size, self.strategy, time.time(), saved, values, files, {**facts, **self.before_publishing()},
                chain=since_full if used - new.keys() else 0, bytes_written=sum(stored.num_bytes for stored in new.values()),
            )  # fmt: skip
            try:
                problems.extend([*of_ranks, *self.catalog.publish(manifest)])
            except OSError as exc:
                raise NotPublished(str(exc)) from exc
            published.append(manifest)

        writer = sharded.ShardWriter(
            self.catalog.stores, folder_name(step), self._staging, base={} if is_full else self._base,
            on_staged=on_staged, publish=publish,
        )  # fmt: skip
        try:
            sharded.save(tensors, writer, self.group)
        except BaseException as exc:  # the disk is full, the bucket answers 500, another rank failed
            inner = _inner(exc)
            if any(isinstance(e, Incomplete) for e in inner):  # a file of the base is gone: hold every byte oneself
                self._base, self._since_full = {}, -1
            if isinstance(exc, CheckpointException) and not any(isinstance(e, NotPublished) for e in inner):
                writer.discard()
            self.failed.add(step)
            if self.is_first:
                self._warn(f"the checkpoint at step {step} could not be written: {_reason(inner[0])}")
            return
        finally:
            self._is_staged.set()
        self._base = writer.written
        self._since_full = 0 if is_full else since_full
        self.last_saved = step
        self.failed.discard(step)
        if published:
            manifest = published[0]
            self._base_files, self._last = dict(manifest.files), manifest
            self.emit(
                CheckpointRecord(
                    step=step, path=self.catalog.stores[0].path(manifest.name), bytes_written=manifest.bytes_written,
                    total_bytes=manifest.total_bytes, duration_s=time.perf_counter() - started, stall_s=self.stall_s if self.is_asynchronous else time.perf_counter() - started,
                )
            )  # fmt: skip
            if problems:
                self._warn(f"the checkpoint at step {step} is not in every place: {problems[0]}")
            self._prune(step)

    def _prune(self, newest: int) -> None:
        try:
            self.catalog.prune(self.retention, newest=newest)
        except (OSError, CheckpointError) as exc:
            self._warn(f"old checkpoints could not be removed: {exc}")

    def _warn(self, text: str) -> None:
        self.emit(EventRecord(text, kind="warning"))


def _step_back() -> None:
    """Let training have the cores first: from here on this thread hashes and writes, and nobody waits for it. Linux gives
    each thread a priority of its own; elsewhere it would be the process's."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _version(tensor: torch.Tensor) -> int:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local._version


def _inner(exc: BaseException) -> list[BaseException]:
    failures = getattr(exc, "failures", None)  # DCP's own wrapper: one error a rank
    return [wrapped[0] for wrapped in failures.values()] if failures else [exc]


def _reason(exc: BaseException) -> str:
    lines = str(exc).strip().splitlines() or [""]
    return f"{type(exc).__name__}: {lines[0]}".removesuffix(": ")
