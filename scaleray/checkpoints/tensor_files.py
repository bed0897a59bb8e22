"""Files that hold a checkpoint's tensors as raw bytes: written to every store, and checked against their digests
when read."""

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import xxhash

from scaleray.checkpoints.manifest import Chunk, Incomplete, StoredFile, Tensor
from scaleray.checkpoints.staging import Staging
from scaleray.checkpoints.storage import Store

ALIGNMENT = 64  # each tensor starts at a multiple of this many bytes, for readers that map the file


def read_chunk(stores: list[Store], chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
    """Return one part of a tensor from the first store where its digest is right. Raises Incomplete if there is
    none."""
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
    """Return a whole tensor on the CPU."""
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
    """Return the dtype of a saved tensor. Raises Incomplete if this version of torch lacks it."""
    found = getattr(torch, tensor.dtype, None)
    if not isinstance(found, torch.dtype):
        raise Incomplete(f"torch {torch.__version__} has no dtype {tensor.dtype}")
    return found


def write_tensors(
    stores: list[Store], file: str, names: list[str], get: Callable[[str], torch.Tensor]
) -> tuple[dict[str, Tensor], StoredFile]:
    """Write whole tensors to one file in sequence. Each is requested when it is written, once per store."""
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
            yield from aligned([content])
            position += length + -length % ALIGNMENT

    stored, _ = write_all(stores, file, contents)
    return tensors, stored


def write_all(stores: list[Store], file: str, contents: Callable[[], Iterator[Any]]) -> tuple[StoredFile, list[str]]:
    """Write a file to every store, and return the errors of stores that failed. Raises OSError if no store accepts
    it."""
    stored: StoredFile | None = None
    hashes: dict[type[Store], str] = {}
    failed: list[OSError] = []
    for store in stores:
        try:
            stored = StoredFile(*store.write(file, contents(), known=hashes.get(type(store), "")))
            hashes[type(store)] = stored.sha256
        except OSError as exc:
            failed.append(exc)
    if stored is None:
        raise failed[0]
    return stored, [str(exc) for exc in failed]


def new_file(folder: str, stem: str) -> str:
    """File name unique to this attempt at a step, since other checkpoints may refer to existing files."""
    return f"{folder}/{stem}-{secrets.token_hex(4)}.bin"


def aligned(contents: list[np.ndarray]) -> Iterator[Any]:
    """Bytes of tensors in sequence, each padded to a multiple of `ALIGNMENT`."""
    for content in contents:
        yield content
        if padding := -len(content) % ALIGNMENT:
            yield bytes(padding)
