"""Tensors of a training to files and back, through torch.distributed.checkpoint's planners and our own file format.

DCP decides who writes what (replicated tensors once, spread over the ranks; shards where they are) and what each rank
must read when the world size or the strategy has changed. Its own file format is not used: its metadata is a pickle,
and it cannot leave out what has not changed. Here a rank writes one file of plain bytes, and the manifest says the rest.
"""

from __future__ import annotations

import contextlib
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping
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
from scaleray.checkpoints.storage import Store

# DCP says so for every checkpoint of a single process, where it is meant; catching it would not be safe in a thread
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

SMALLEST_SHARE = 0.05
"""Of a rank's bytes: less than this that is unchanged in an older file is written again, so that the file can go. A few
random states must not hold a whole older checkpoint on the disk; a mask of one byte a parameter, beside Adam, is 8 %."""
ALIGNMENT = 64  # of each tensor in its file, for readers that map it

Key = tuple[str, tuple[int, ...]]
"""A tensor's name and the offsets of a part of it."""


class Staging:
    """Host memory for the parts of the state that this rank writes; kept from one checkpoint to the next."""

    def __init__(self) -> None:
        self._buffers: dict[Key, torch.Tensor] = {}

    def copy(self, key: Key, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's bytes, uint8 (n,), in memory that training does not touch. A CUDA device fills it in the order of
        its stream, which must be waited for."""
        source = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() != source.numel():
            buffer = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=source.is_cuda)
            self._buffers[key] = buffer
        buffer.copy_(source, non_blocking=True)
        return buffer


class ShardWriter(StorageWriter):
    """Writes this rank's part of one checkpoint to one file; on rank 0 `finish` puts the manifest together.

    base: parts of the last checkpoint by key; what has the same digest there is named, not written. on_staged: called
    when training may go on changing the tensors. publish: takes tensors, new files and what some store did not take.
    Give `save` below the state that goes with it.
    """

    def __init__(
        self, stores: list[Store], folder: str, staging: Staging, *, base: Mapping[Key, Chunk], on_staged: Callable[[], None],
        publish: Callable[[dict[str, Tensor], dict[str, StoredFile], list[str]], None],
    ) -> None:  # fmt: skip
        self.stores, self.folder, self.staging, self.base = stores, folder, staging, base
        self.on_staged, self.publish = on_staged, publish
        self.rank = 0
        self.file: str | None = None
        self.written: dict[Key, Chunk] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        """Part of DCP's interface; a writer serves one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn the rank, which names the file."""
        self.rank = kwargs.get("rank", 0)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Nothing to add."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy, compare, write."""
        staged: list[tuple[WriteItem, Key, np.ndarray]] = []
        devices: set[torch.device] = set()
        for item in plan.items:
            offsets = item.index.offset if item.index.offset is not None else ()
            key = (item.index.fqn, tuple(offsets))
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor)  # small values are in the manifest
            staged.append((item, key, self.staging.copy(key, tensor).numpy()))
            if tensor.is_cuda:
                devices.add(tensor.device)
        for device in devices:  # a thread's current device need not be the one that training uses
            torch.cuda.current_stream(device).synchronize()
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
            stored, problems = write_all(self.stores, name, lambda: _aligned(changed))
        files = {name: stored} if stored else {}
        results = [
            WriteResult(item.index, len(content), (self.written[key], files, problems)) for item, key, content in staged
        ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _unchanged(self, staged: list[tuple[WriteItem, Key, np.ndarray]], digests: list[str]) -> dict[Key, Chunk]:
        """Parts that need not be written, with where they are. A file of which hardly anything is left is not worth keeping."""
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
        """Remove this rank's file of a checkpoint that did not come about: it may be what fills the disk."""
        for store in self.stores if self.file else ():
            with contextlib.suppress(OSError):
                store.delete(self.file or "")

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, when every rank has written: the manifest's tensors and files."""
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
        self.publish(tensors, new, list(problems))
        metadata.storage_data = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Part of DCP's interface."""
        return True


class ShardReader(StorageReader):
    """Gives DCP the parts of a checkpoint that it asks for; each is compared with its digest first."""

    def __init__(self, stores: list[Store], manifest: Manifest) -> None:
        self.stores, self.manifest = stores, manifest

    def reset(self, checkpoint_id: Any = None) -> None:
        """Part of DCP's interface; a reader serves one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The manifest in DCP's words."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=dtype_of(tensor)),
                    torch.Size(tensor.shape),
                    [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks],
                )
                for name, tensor in self.manifest.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read chunk by chunk. Raises Incomplete for bytes that are missing or changed."""
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
        """Part of DCP's interface."""
        return True


def save(tensors: dict[str, torch.Tensor], writer: ShardWriter, group: dist.ProcessGroup | None) -> None:
    """Write a flat state dict. Collective over `group`, whose tensors must be on the CPU; None is a single process."""
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(tensors, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)


def load(
    tensors: dict[str, torch.Tensor], stores: list[Store], manifest: Manifest, group: dist.ProcessGroup | None
) -> None:
    """Fill the tensors of a flat state dict in place, resharding as needed; values are cast to their dtype.

    stores: where the files may be, the first that has good bytes wins. Collective over `group`, where all ranks raise
    Incomplete when one finds its bytes nowhere. None: this rank reads what it needs, sharded or not, without a word to others.
    """
    reader, planner = ShardReader(stores, manifest), DefaultLoadPlanner(flatten_state_dict=False)
    try:
        dcp.load(tensors, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)
    except dcp.CheckpointException as exc:
        found = next((e for e in (wrapped[0] for wrapped in exc.failures.values()) if isinstance(e, Incomplete)), None)
        raise found or exc from exc


def read_chunk(stores: list[Store], chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
    """One part of a tensor from the first store whose bytes have the right digest. Raises Incomplete."""
    content = torch.empty(chunk.length, dtype=torch.uint8)
    view = content.numpy().data
    for store in stores:
        try:
            store.read_into(chunk.file, chunk.start, view)
        except OSError:
            continue
        if xxhash.xxh3_128_hexdigest(view) == chunk.digest:
            return content.view(dtype).reshape(chunk.sizes)
    raise Incomplete(f"{stores[0].path(chunk.file)} is missing or damaged at byte {chunk.start}")


def read_tensor(stores: list[Store], tensor: Tensor) -> torch.Tensor:
    """A whole tensor on the CPU."""
    dtype = dtype_of(tensor)
    if len(tensor.chunks) == 1 and tensor.chunks[0].sizes == tensor.shape:
        return read_chunk(stores, tensor.chunks[0], dtype)
    whole = torch.empty(tensor.shape, dtype=dtype)
    for chunk in tensor.chunks:
        part = whole
        for dim, (start, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            part = part.narrow(dim, start, length)
        part.copy_(read_chunk(stores, chunk, dtype))
    return whole


def dtype_of(tensor: Tensor) -> torch.dtype:
    """The dtype of a saved tensor. Raises Incomplete for one that this torch does not have."""
    found = getattr(torch, tensor.dtype, None)
    if not isinstance(found, torch.dtype):
        raise Incomplete(f"torch {torch.__version__} has no dtype {tensor.dtype}")
    return found


def write_tensors(stores: list[Store], file: str, names: list[str], get: Callable[[str], torch.Tensor]) -> tuple[dict[str, Tensor], StoredFile]:  # fmt: skip
    """Write whole tensors to one file, one after another; each is asked for when its turn comes, once a store."""
    tensors: dict[str, Tensor] = {}

    def contents() -> Iterator[Any]:
        position = 0
        for name in names:
            tensor = get(name)
            content = Staging().copy((name, ()), tensor).numpy()
            shape, length = tuple(tensor.shape), len(content)
            digest = xxhash.xxh3_128_hexdigest(content.data)
            chunk = Chunk((0,) * len(shape), shape, file, position, length, digest)
            tensors[name] = Tensor(str(tensor.dtype).removeprefix("torch."), shape, (chunk,))
            yield from _aligned([content])
            position += length + -length % ALIGNMENT

    stored, _ = write_all(stores, file, contents)
    return tensors, stored


def write_all(stores: list[Store], file: str, contents: Callable[[], Iterator[Any]]) -> tuple[StoredFile, list[str]]:
    """Write a file to every store; gives also what went wrong in some. Raises OSError where it is in none."""
    stored: StoredFile | None = None
    failed: list[OSError] = []
    for store in stores:
        try:
            stored = StoredFile(*store.write(file, contents()))
        except OSError as exc:
            failed.append(exc)
    if stored is None:
        raise failed[0]
    return stored, [str(exc) for exc in failed]


def new_file(folder: str, stem: str) -> str:
    """A name that no other attempt at the same step has: files that exist may be named by other checkpoints."""
    return f"{folder}/{stem}-{secrets.token_hex(4)}.bin"


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


def _aligned(contents: list[np.ndarray]) -> Iterator[Any]:
    for content in contents:
        yield content
        if padding := -len(content) % ALIGNMENT:
            yield bytes(padding)
