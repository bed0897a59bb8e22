"""Saving and loading of a training's tensors, with the planners of torch.distributed.checkpoint (DCP) and our own file
format.

DCP decides which rank writes which parts (replicated tensors once, spread over the ranks; shards where they are) and
which parts each rank must read if the world size or the strategy has changed. Its file format is not used, since its
metadata is a pickle and it cannot omit unchanged parts. Here each rank writes one file of plain bytes, and the manifest
contains the metadata."""

import contextlib
import warnings
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from scaleray.checkpoints.manifest import Chunk, Incomplete, Manifest, StoredFile, Tensor
from scaleray.checkpoints.staging import Key, Staging
from scaleray.checkpoints.storage import Store
from scaleray.checkpoints.tensor_files import ALIGNMENT, aligned, dtype_of, new_file, read_chunk, write_all

# DCP warns for every checkpoint of a single process, which is intended here; catching it is not safe in a thread
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

SMALLEST_SHARE = 0.05
"""Smallest share of a rank's bytes for which an older file is kept. If less of it is unchanged, that part is rewritten
so that the file can be removed. A few random states must not keep a whole older checkpoint on the disk; a mask of one
byte per parameter is 8 % of it with Adam."""


class ShardWriter(StorageWriter):
    """Writes this rank's part of one checkpoint to one file; on rank 0, `finish` assembles the manifest.

    base: parts of the last checkpoint by key; a part with the same digest there is referenced instead of written.
    on_staged: called when training may change the tensors again. publish: receives the tensors, the new files, and the
    errors of stores that did not accept a file. Pass the writer to `save` below, with the state."""

    def __init__(
        self,
        stores: list[Store],
        folder: str,
        staging: Staging,
        *,
        base: Mapping[Key, Chunk],
        on_staged: Callable[[], None],
        publish: Callable[[dict[str, Tensor], dict[str, StoredFile], list[str]], None],
    ) -> None:
        self.stores, self.folder, self.staging, self.base = stores, folder, staging, base
        self.on_staged, self.publish = on_staged, publish
        self.rank = 0
        self.plan: SavePlan | None = None
        self.metadata: Metadata | None = None
        self.file: str | None = None
        self.written: dict[Key, Chunk] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing, since a writer is used for one checkpoint; part of DCP's interface."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Store the rank, which determines the name of the file."""
        self.rank = kwargs.get("rank", 0)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans unchanged."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy the tensors, compare them with the last checkpoint, and write the changed ones."""
        self.plan = plan
        staged: list[tuple[WriteItem, Key, np.ndarray]] = []
        for item in plan.items:
            offsets = item.index.offset if item.index.offset is not None else ()
            key = (item.index.fqn, tuple(offsets))
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor)  # small values are in the manifest
            staged.append((item, key, self.staging.copy(key, tensor).numpy()))
        self.staging.wait()
        self.on_staged()
        name = new_file(self.folder, f"rank-{self.rank:05d}")
        digests = [xxhash.xxh3_128_hexdigest(content.data) for _, _, content in staged]
        kept = self._unchanged(staged, digests)
        changed: list[np.ndarray] = []
        position = 0
        for (item, key, content), digest in zip(staged, digests, strict=True):
            if key in kept:
                self.written[key] = kept[key]
                continue
            sizes = _sizes(item)
            self.written[key] = Chunk(_offsets(key, sizes), sizes, name, position, len(content), digest)
            changed.append(content)
            position += len(content) + -len(content) % ALIGNMENT
        stored: StoredFile | None = None
        problems: list[str] = []
        if changed:
            self.file = name
            stored, problems = write_all(self.stores, name, lambda: aligned(changed))
        files = {name: stored} if stored else {}
        results = [
            WriteResult(item.index, len(content), (self.written[key], files, problems)) for item, key, content in staged
        ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _unchanged(self, staged: list[tuple[WriteItem, Key, np.ndarray]], digests: list[str]) -> dict[Key, Chunk]:
        """Parts that are already stored, with their locations. Files of which little is reused are left out."""
        found: dict[Key, Chunk] = {}
        of_file: dict[str, int] = {}
        for (item, key, content), digest in zip(staged, digests, strict=True):
            known = self.base.get(key)
            if known is not None and (known.digest, known.sizes, known.length) == (digest, _sizes(item), len(content)):
                found[key] = known
                of_file[known.file] = of_file.get(known.file, 0) + known.length
        least = SMALLEST_SHARE * sum(len(content) for _, _, content in staged)
        return {key: chunk for key, chunk in found.items() if of_file[chunk.file] >= least}

    def discard(self) -> None:
        """Remove this rank's file of a failed checkpoint, since it may be filling the disk."""
        for store in self.stores if self.file else ():
            with contextlib.suppress(OSError):
                store.delete(self.file or "")

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the manifest's tensors and files; DCP calls it on rank 0 after all ranks have written."""
        self.metadata = metadata
        chunks: dict[str, list[Chunk]] = {}
        new: dict[str, StoredFile] = {}
        problems: dict[str, None] = {}
        for result in (result for of_rank in results for result in of_rank):
            chunk, files, found = result.storage_data
            chunks.setdefault(result.index.fqn, []).append(chunk)
            new.update(files)
            problems.update(dict.fromkeys(found))
        tensors = {}
        for name, parts in sorted(chunks.items()):
            about = metadata.state_dict_metadata[name]
            assert isinstance(about, TensorStorageMetadata)
            ordered = tuple(sorted(parts, key=lambda part: part.offsets))
            tensors[name] = Tensor(str(about.properties.dtype).removeprefix("torch."), tuple(about.size), ordered)
        metadata.storage_data = None
        self.publish(tensors, new, list(problems))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Accept any id; part of DCP's interface."""
        return True


class ShardReader(StorageReader):
    """Reads the parts of a checkpoint's tensors `names` that DCP requests, comparing each with its digest."""

    def __init__(self, stores: list[Store], manifest: Manifest, names: Container[str]) -> None:
        self.stores, self.manifest, self.names = stores, manifest, names

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing, since a reader is used for one checkpoint; part of DCP's interface."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what the manifest says about the tensors as DCP's metadata."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=dtype_of(tensor)),
                    torch.Size(tensor.shape),
                    [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks],
                )
                for name, tensor in self.manifest.tensors.items()
                if name in self.names
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing; part of DCP's interface."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read chunk by chunk. Raises Incomplete if bytes are missing or changed."""
        wanted = [(_chunk(self.manifest, item.storage_index), item) for item in plan.items]
        wanted.sort(key=lambda pair: (pair[0].file, pair[0].start))
        last: Chunk | None = None
        for chunk, item in wanted:
            if chunk != last:
                whole, last = (
                    read_chunk(self.stores, chunk, dtype_of(self.manifest.tensors[item.storage_index.fqn])),
                    chunk,
                )
            part = whole
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Accept any id; part of DCP's interface."""
        return True


def save(tensors: dict[str, torch.Tensor], writer: ShardWriter, group: dist.ProcessGroup | None) -> None:
    """Save a flat state dict. Collective over `group`, with tensors on the CPU; None for a single process."""
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(tensors, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)


@dataclass(frozen=True)
class Repeated:
    """Plan of an earlier checkpoint, reused for states with the same tensors, since DCP's planning takes longer than
    small copies.

    layout: name, type and shape of each tensor. metadata: DCP's, on rank 0."""

    layout: tuple[Any, ...]
    plan: SavePlan
    metadata: Metadata | None

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], writer: ShardWriter) -> "Repeated | None":
        """The plan that a writer has carried out."""
        return cls(_layout(tensors), writer.plan, writer.metadata) if writer.plan is not None else None

    def save(self, tensors: dict[str, torch.Tensor], writer: ShardWriter, group: dist.ProcessGroup | None) -> bool:
        """Save as `save` does. Returns False, without writing anything, if a rank has other tensors than before.
        Collective. Raises the error of a rank on this rank and on rank 0."""
        writer.rank = 0 if group is None else dist.get_rank(group)
        is_same, error, results = self.layout == _layout(tensors), None, []
        if is_same:
            planner = DefaultSavePlanner(flatten_state_dict=False)
            planner.set_up_planner(tensors, is_coordinator=writer.rank == 0)
            try:
                results = writer.write_data(self.plan, planner).value()
            except Exception as exc:
                error = exc
        everyone = gathered((is_same, error), group)
        if not all(same for same, _ in everyone):
            writer.discard()
            return False
        failed = [each for _, each in everyone if each is not None]
        if failed:
            raise error or failed[0]
        of_ranks: list[Any] = [results]
        if group is not None:  # to rank 0 alone, as many ranks have many results
            of_ranks *= dist.get_world_size(group)
            dist.gather_object(results, of_ranks if writer.rank == 0 else None, group=group, group_dst=0)
        if writer.rank == 0:
            assert self.metadata is not None
            writer.finish(self.metadata, of_ranks)
        return True


def gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Values of all ranks of a group; of this process without one. Collective."""
    if group is None:
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def _layout(tensors: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
    return tuple((name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items())


def load(
    tensors: dict[str, torch.Tensor], stores: list[Store], manifest: Manifest, group: dist.ProcessGroup | None
) -> None:
    """Load the tensors of a flat state dict in place, resharding as needed; values are cast to their dtype.

    stores: possible locations of the files, of which the first with intact bytes is used. Each rank reads what it
    needs, sharded or not, without DCP's communication, since each has the manifest. Collective over `group`, if it is
    given: all ranks raise the error of the first one that cannot find its bytes, such as Incomplete."""
    reader, planner = ShardReader(stores, manifest, tensors.keys()), DefaultLoadPlanner(flatten_state_dict=False)
    error: BaseException | None = None
    try:
        dcp.load(tensors, storage_reader=reader, planner=planner, no_dist=True)
    except dcp.CheckpointException as exc:
        found = next((e for e in (wrapped[0] for wrapped in exc.failures.values()) if isinstance(e, Incomplete)), None)
        error = found or exc
    if (first := next(filter(None, gathered(error, group)), None)) is not None:
        raise first


def _chunk(manifest: Manifest, index: MetadataIndex) -> Chunk:
    chunks = manifest.tensors[index.fqn].chunks
    if index.offset is None:
        return chunks[0]
    return next(chunk for chunk in chunks if chunk.offsets == tuple(index.offset))


def _sizes(item: WriteItem) -> tuple[int, ...]:
    assert item.tensor_data is not None
    return tuple(item.tensor_data.chunk.sizes)


def _offsets(key: Key, sizes: tuple[int, ...]) -> tuple[int, ...]:
    return key[1] or (0,) * len(sizes)
