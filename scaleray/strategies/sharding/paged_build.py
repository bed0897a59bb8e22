"""Build a model that is larger than one worker's memory, with the initial values of an ordinary build.

All workers run the same code on the same random numbers. Memory that has not been used for a while is split: each
worker keeps its part and frees the rest, and all workers gather it again when the code or the sharding needs it. So the
code may do anything, such as drawing until a condition holds, which building on the meta device and initialising later
cannot repeat."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SMALLEST_BYTES = 4096
"""Minimum size of tensors that are split. Buffers, biases and scales stay whole: each would cost a message."""
READ_WITHOUT_DISPATCH = {
    torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.data_ptr, torch.Tensor.__dlpack__,
}  # fmt: skip


@dataclass
class _Page:
    """Memory of one or more tensors. kept: this rank's part once the rest has been freed. digest: in that case, the
    digest of the whole memory."""

    storage: StorageWeakRef
    num_bytes: int
    touched_at: int
    device: torch.device
    kept: torch.Tensor | None = None
    digest: int = 0


class PagedBuild(TorchDispatchMode):
    """Context in which a model is built and sharded. Collective over `group`: all ranks must run the same operations.

    bound_bytes: approximate amount of recently used memory that stays whole; tensors in use at the same time always
    stay whole. Between the build and the strategy, call `digests`, after which nothing is split, and `finish`."""

    def __init__(self, group: dist.ProcessGroup, *, bound_bytes: float) -> None:
        super().__init__()
        self.group, self.bound_bytes = group, bound_bytes
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._pages: dict[int, _Page] = {}
        # bytes touched so far: which page is old must not depend on when this rank's Python collects its garbage
        self._clock = 0
        self._is_building = True
        self._is_looking = False  # whether operations are this class's own
        self._readers = _Readers(self)

    def __enter__(self) -> PagedBuild:
        super().__enter__()
        self._readers.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._readers.__exit__(*exc)
        super().__exit__(*exc)
        self._pages.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_looking:
            return func(*args, **kwargs)
        self.bring_back(args, kwargs)
        out = func(*args, **kwargs)
        if self._is_building:
            self._touch((args, kwargs, out))
        return out

    def digests(self, model: nn.Module) -> dict[str, int]:
        """Digest (64 bits, signed) of each parameter and buffer as this rank built it, by name. Building ends here."""
        self._is_building = False
        with self._looking():
            return {name: self._digest(t) for name, t in (*model.named_parameters(), *model.named_buffers())}

    def finish(self, model: nn.Module) -> None:
        """Restore everything except parameters, which are restored when they are sharded. Collective."""
        parameters = {p.untyped_storage()._cdata for p in model.parameters()}
        # whatever else is still in use; a rank whose garbage is collected already takes part for the others
        others = [page for key, page in self._pages.items() if page.kept is not None and key not in parameters]
        if not others:
            return
        with self._looking():
            in_use = torch.tensor(
                [not page.storage.expired() for page in others], dtype=torch.int32, device=others[0].device
            )
            dist.all_reduce(in_use, op=dist.ReduceOp.MAX, group=self.group)
            for page in itertools.compress(others, in_use.tolist()):
                self._restore(page)

    def bring_back(self, *values: Any) -> None:
        """Make the memory of all tensors in `values` whole. Collective unless it is whole already."""
        for storage in _storages(values):
            page = self._pages.get(storage._cdata)
            if page is not None and page.kept is not None:
                with self._looking():
                    self._restore(page)

    @contextlib.contextmanager
    def _looking(self) -> Iterator[None]:
        was_looking, self._is_looking = self._is_looking, True
        try:
            yield
        finally:
            self._is_looking = was_looking

    def _touch(self, values: Any) -> None:
        current = set()
        for storage in _storages(values):
            key = storage._cdata
            page = self._pages.get(key)
            if page is None or page.num_bytes != storage.nbytes():
                if storage.nbytes() < SMALLEST_BYTES or not storage.resizable():
                    continue
                page = _Page(StorageWeakRef(storage), storage.nbytes(), 0, storage.device)
            self._clock += page.num_bytes
            page.touched_at = self._clock
            self._pages.pop(key, None)
            self._pages[key] = page  # in the order of touching
            current.add(key)
        for key, page in list(self._pages.items()):
            if self._clock - page.touched_at <= self.bound_bytes:
                break
            if page.kept is None and key not in current:
                self._cut(page)

    def _cut(self, page: _Page) -> None:
        storage = _alive(page)
        part = -(-page.num_bytes // self.world_size)
        if storage is None or not storage.resizable():  # numpy may look at it
            page.kept = torch.empty(0, dtype=torch.uint8, device=page.device) if storage is None else None
            return
        whole = _bytes(storage)
        page.digest = _hash(whole)
        page.kept = torch.zeros(part, dtype=torch.uint8, device=page.device)
        mine = whole[self.rank * part : (self.rank + 1) * part]
        page.kept[: len(mine)] = mine
        storage.resize_(0)

    def _restore(self, page: _Page) -> None:
        assert page.kept is not None
        storage = _alive(page)
        part = -(-page.num_bytes // self.world_size)
        kept = page.kept if len(page.kept) else torch.zeros(part, dtype=torch.uint8, device=page.device)
        whole = torch.empty(part * self.world_size, dtype=torch.uint8, device=page.device)
        dist.all_gather_into_tensor(whole, kept, group=self.group)
        page.kept = None
        if storage is not None:
            storage.resize_(page.num_bytes)
            _bytes(storage).copy_(whole[: page.num_bytes])

    def _digest(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        page = self._pages.get(storage._cdata)
        return page.digest if page is not None and page.kept is not None else _hash(_bytes(storage))


class _Readers(TorchFunctionMode):
    """Watches functions that read a tensor's memory without an operation of torch, such as `numpy()`."""

    def __init__(self, build: PagedBuild) -> None:
        super().__init__()
        self.build = build

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READ_WITHOUT_DISPATCH:
            self.build.bring_back(args)
        return func(*args, **(kwargs or {}))


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    """Memory of plain tensors. A subclass such as DTensor consists of other tensors, which are visited separately."""
    seen = set()
    for leaf in tree_leaves(values):
        if (
            isinstance(leaf, torch.Tensor)
            and type(leaf) in (torch.Tensor, nn.Parameter, nn.Buffer)
            and not leaf.is_meta
        ):
            storage = leaf.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                yield storage


def _alive(page: _Page) -> torch.UntypedStorage | None:
    return None if page.storage.expired() else torch.UntypedStorage._new_with_weak_ptr(page.storage.cdata)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _hash(whole: torch.Tensor) -> int:
    # a copy, since memory that numpy has seen cannot be freed any more
    return xxhash.xxh3_64_intdigest(whole.to("cpu", copy=True).numpy().data) - 2**63
