"""Writes checkpoints during training: the loop passes references and continues, while a thread copies, writes and
publishes. Copying runs during the next forward and backward pass, which only read saved tensors. `wait_staged` keeps
the optimizer from changing a tensor before it is copied. Tensors that a forward pass may change (buffers) are copied
immediately."""

import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import DTensor

from scaleray.checkpoints import sharded
from scaleray.checkpoints.catalog import Catalog
from scaleray.checkpoints.manifest import Chunk, Incomplete, Manifest, StoredFile, Tensor, folder_name
from scaleray.checkpoints.retention import Retention
from scaleray.checkpoints.staging import Key, Staging
from scaleray.checkpoints.storage import Store
from scaleray.errors import CheckpointError
from scaleray.records.run_record import CheckpointRecord, EventRecord

NICENESS = 10  # Linux priority of a thread that writes during training


Values = Callable[[Callable[[Any], list[Any]]], Mapping[str, Any]]
"""Non-tensor state as JSON, given a collective function that returns the values of all ranks for this rank's value."""


class NotPublished(Exception):
    """Error raised after all files are written, but perhaps not the manifest: it is unknown whether the checkpoint
    exists."""


@dataclass(frozen=True)
class _Held:
    """State for one checkpoint, as passed by the loop."""

    step: int
    tensors: dict[str, torch.Tensor]
    versions: dict[str, int]
    """Version counter of each tensor when it was passed."""
    values: Values
    facts: dict[str, Any]

    def changed(self) -> str | None:
        """Name of the first tensor that has changed since it was passed; None if none has."""
        return next((name for name, tensor in self.tensors.items() if _version(tensor) != self.versions[name]), None)


class Saver:
    """Writes one worker's checkpoints. Every worker of the group has a Saver and calls it for the same steps.

    group: separate process group with a backend for CPU tensors; None for a single process. stores: those of the
    catalog's stores to which this worker writes its file; by default all. repeats: states follow each other quickly, so
    their plan is reused. emit: receives CheckpointRecord from rank 0, and EventRecord from any rank that failed. A
    checkpoint that cannot be written is reported and abandoned, as the training matters more. before_publishing: called
    on rank 0 for further facts once all files are written; an error in it abandons the checkpoint."""

    def __init__(
        self,
        catalog: Catalog,
        group: dist.ProcessGroup | None,
        *,
        world_size: int,
        strategy: str,
        is_asynchronous: bool,
        full_every: int,
        retention: Retention,
        emit: Callable[[CheckpointRecord | EventRecord], None],
        before_publishing: Callable[[], Mapping[str, Any]] = dict,
        stores: Sequence[Store] = (),
        repeats: bool = False,
    ) -> None:
        self.stores, self.repeats = list(stores) or catalog.stores, repeats
        self._plan: sharded.Repeated | None = None
        self.catalog, self.group, self.world_size, self.strategy = catalog, group, world_size, strategy
        self.is_asynchronous, self.full_every, self.retention, self.emit = is_asynchronous, full_every, retention, emit
        self.before_publishing = before_publishing
        self.is_first = group is None or dist.get_rank(group) == 0
        self.stall_s = 0.0
        self.last_saved: int | None = None
        self.failed: set[int] = set()
        """Steps whose checkpoints could not be written, as far as known."""
        self._staging = Staging()
        self._base: dict[Key, Chunk] = {}
        self._base_files: dict[str, StoredFile] = {}
        self._last: Manifest | None = None  # manifest of `last_saved`; on rank 0
        self._since_full = -1  # number of checkpoints after the last full one; the same on every rank
        self._thread: threading.Thread | None = None
        self._is_staged = threading.Event()
        self._is_staged.set()

    def start_from(self, manifest: Manifest) -> None:
        """Build on the checkpoint from which training was resumed, so that its contents need not be written again."""
        self._base = {
            (name, chunk.offsets): chunk for name, tensor in manifest.tensors.items() for chunk in tensor.chunks
        }
        self._base_files, self._since_full = dict(manifest.files), manifest.chain
        self.last_saved, self._last = manifest.step, manifest

    def save(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        *,
        volatile: set[str],
        values: Values,
        facts: Mapping[str, Any],
    ) -> None:
        """Start the checkpoint after `step` steps. Collective, in a thread.

        volatile: names of tensors that a forward pass may change. values: called in that thread."""
        started = time.perf_counter()
        self.wait()
        self.stall_s = 0.0
        kept = {name: tensor.detach().clone() if name in volatile else tensor for name, tensor in tensors.items()}
        self._staging.begin(_local(tensor) for tensor in kept.values())
        versions = {name: _version(tensor) for name, tensor in kept.items()}
        self._is_staged.clear()
        held = _Held(step, kept, versions, values, dict(facts))
        self._thread = threading.Thread(target=self._write, args=(held,), name="scaleray-checkpoint", daemon=True)
        self._thread.start()
        if not self.is_asynchronous:
            self._thread.join()
        self.stall_s += time.perf_counter() - started

    def restate(self, values: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Add values and facts that became known later to the last checkpoint. Its manifest is rewritten, its tensors
        stay. Acts on rank 0 only."""
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
        except Exception as exc:  # as in `_write`: any error of a storage or a recorder
            self._warn(f"metrics could not be added to the checkpoint at step {step}: {_reason(exc)}")
            return
        self._last = manifest
        if problems:
            self._warn(f"the checkpoint at step {step} is not stored in every location: {problems[0]}")
        self._prune(step)

    def wait_staged(self) -> None:
        """Wait until the optimizer may change the tensors."""
        if not self._is_staged.is_set():
            started = time.perf_counter()
            self._is_staged.wait()
            self.stall_s += time.perf_counter() - started

    @property
    def is_busy(self) -> bool:
        """Whether the last checkpoint is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the last checkpoint is written or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, held: _Held) -> None:
        started = time.perf_counter()
        since_full = self._since_full + 1
        is_full = since_full >= self.full_every or since_full == 0
        published: list[Manifest] = []
        problems: list[str] = []

        def publish(saved: dict[str, Tensor], new: dict[str, StoredFile], of_ranks: list[str]) -> None:
            manifest = self._manifest(held, values, saved, new, since_full)
            try:
                problems.extend([*of_ranks, *self.catalog.publish(manifest)])
            except OSError as exc:
                raise NotPublished(str(exc)) from exc
            published.append(manifest)

        writer = sharded.ShardWriter(
            self.stores,
            folder_name(held.step),
            self._staging,
            base={} if is_full else self._base,
            on_staged=lambda: self._let_go(held),
            publish=publish,
        )
        try:
            values = held.values(lambda value: sharded.gathered(value, self.group))
            if self._plan is None or not self._plan.save(held.tensors, writer, self.group):
                sharded.save(held.tensors, writer, self.group)
                self._plan = sharded.Repeated.of(held.tensors, writer) if self.repeats else None
        except BaseException as exc:  # the disk is full, the bucket answers 500, another rank failed
            self._give_up(held.step, writer, exc)
            return
        finally:
            self._is_staged.set()
        self._base = writer.written
        self._since_full = 0 if is_full else since_full
        self.last_saved = held.step
        self.failed.discard(held.step)
        if published:
            self._report(published[0], problems, started)

    def _let_go(self, held: _Held) -> None:
        """Let the optimizer change the tensors, now that they are copied. Raises RuntimeError if one has changed
        before."""
        changed = held.changed()
        self._is_staged.set()
        if self.is_asynchronous:
            _step_back()
        if changed is not None:
            self.is_asynchronous = False  # from now on, training waits for the copy
            raise RuntimeError(f"{changed} was changed by a forward pass while it was copied")

    def _manifest(
        self,
        held: _Held,
        values: Mapping[str, Any],
        saved: dict[str, Tensor],
        new: dict[str, StoredFile],
        since_full: int,
    ) -> Manifest:
        """Return the manifest of a checkpoint whose tensors `saved` are in the files `new` and in older ones."""
        used = {chunk.file for tensor in saved.values() for chunk in tensor.chunks}
        files = {name: stored for name, stored in {**self._base_files, **new}.items() if name in used}
        return Manifest(
            held.step,
            self.world_size,
            self.strategy,
            time.time(),
            saved,
            dict(values),
            files,
            {**held.facts, **self.before_publishing()},
            chain=since_full if used - new.keys() else 0,
            bytes_written=sum(stored.num_bytes for stored in new.values()),
        )

    def _give_up(self, step: int, writer: sharded.ShardWriter, exc: BaseException) -> None:
        """Record and report that a checkpoint could not be written, and remove its files."""
        inner = _inner(exc)
        if any(isinstance(e, Incomplete) for e in inner):  # a file of the base is missing: the next one is full
            self._base, self._since_full = {}, -1
        if isinstance(exc, CheckpointException) and not any(isinstance(e, NotPublished) for e in inner):
            writer.discard()
        self.failed.add(step)
        if self.is_first:
            self._warn(f"the checkpoint at step {step} could not be written: {_reason(inner[0])}")

    def _report(self, manifest: Manifest, problems: list[str], started: float) -> None:
        """Report a checkpoint that is now valid, and remove those that it makes superfluous."""
        self._base_files, self._last = dict(manifest.files), manifest
        self.emit(
            CheckpointRecord(
                step=manifest.step,
                path=self.catalog.stores[0].path(manifest.name),
                bytes_written=manifest.bytes_written,
                total_bytes=manifest.total_bytes,
                duration_s=time.perf_counter() - started,
                stall_s=self.stall_s if self.is_asynchronous else time.perf_counter() - started,
            )
        )
        if problems:
            self._warn(f"the checkpoint at step {manifest.step} is not stored in every location: {problems[0]}")
        self._prune(manifest.step)

    def _prune(self, newest: int) -> None:
        try:
            self.catalog.prune(self.retention, newest=newest)
        except (OSError, CheckpointError) as exc:
            self._warn(f"old checkpoints could not be removed: {exc}")

    def _warn(self, text: str) -> None:
        self.emit(EventRecord(text, kind="warning"))


def _step_back() -> None:
    """Lower the priority of this thread, which hashes and writes while no other thread waits for it. Linux has a
    priority per thread; elsewhere the whole process would be affected, so nothing is done."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _version(tensor: torch.Tensor) -> int:
    return _local(tensor)._version


def _inner(exc: BaseException) -> list[BaseException]:
    failures = getattr(exc, "failures", None)  # DCP's own wrapper: one error per rank
    return [wrapped[0] for wrapped in failures.values()] if failures else [exc]


def _reason(exc: BaseException) -> str:
    lines = str(exc).strip().splitlines() or [""]
    return f"{type(exc).__name__}: {lines[0]}".removesuffix(": ")
