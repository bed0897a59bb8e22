"""Data of a LightningDataModule, or of a module's own hooks: the Dataset of each DataLoader. scaleray chooses the rows
of each step, and uses the loaders' collate_fn. Other settings are reported if they have no effect, and refused if they
would change the training."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)

from scaleray.data import ArraySource, IterableSource, hugging_face_data
from scaleray.data.source_interface import TRAIN
from scaleray.data.sources import DatasetSource
from scaleray.errors import DataError
from scaleray.lightning.lightning_batches import columns_of

VAL, TEST = "val", "test"
MODES = {"max_size_cycle": max, "min_size": min}
"""Mode of combining several train loaders, and the function that gives their common length."""


class Rows(Dataset[dict[str, Any]]):
    """Items of a Dataset as columns, whose names encode their structure. is_exact: for a loader's own collate_fn."""

    def __init__(self, split: str, items: Any, *, is_exact: bool) -> None:
        self.split, self.items, self.is_exact = split, items, is_exact

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return columns_of(self.split, self.items[index], is_exact=self.is_exact)


class IteratedRows(IterableDataset[dict[str, Any]]):
    """Items of an IterableDataset as columns, like `Rows`."""

    def __init__(self, split: str, items: Any, *, is_exact: bool) -> None:
        self.split, self.items, self.is_exact = split, items, is_exact

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for item in self.items:
            yield columns_of(self.split, item, is_exact=self.is_exact)

    def set_epoch(self, epoch: int) -> None:
        """Call the IterableDataset's own `set_epoch`, if it has one."""
        if callable(begin := getattr(self.items, "set_epoch", None)):
            begin(epoch)


class SideBySide(Dataset[Any]):
    """Items of several Datasets combined into one; shorter Datasets repeat. items: Datasets in a list or a dict."""

    def __init__(self, items: Any, length: int) -> None:
        self.items, self.length = items, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.items, Mapping):
            return {name: items[index % len(items)] for name, items in self.items.items()}
        return [items[index % len(items)] for items in self.items]


def train_source(given: Any) -> Any:
    """The source for the result of `train_dataloader()`. Raises DataError."""
    loaders = dict(_loaders(TRAIN, given))
    notes = [note for name, loader in loaders.items() for note in _check(name, loader)]
    if not loaders:
        raise DataError.problem("train_dataloader()", f"returned {given!r}: it must return a DataLoader")
    if list(loaders) == [TRAIN]:
        return _source(TRAIN, loaders[TRAIN], notes)
    sizes = {loader.batch_size for loader in loaders.values()}
    if len(sizes) > 1:
        raise DataError.problem(
            "train_dataloader()",
            f"returned several loaders with batches of {', '.join(map(str, sorted(sizes)))} rows: each row of a step "
            "combines one item of each loader",
            "give them one batch size",
        )
    if any(map(collation_of, loaders.values())):
        allowed = "items of several loaders are combined by torch's default collation"
        text = f"returned several loaders, one of them with a collate_fn: {allowed}"
        raise DataError.problem("train_dataloader()", text, "use one Dataset of pairs")
    items = {name: _items(loader) for name, loader in loaders.items()}
    if streams := [type(each).__name__ for each in items.values() if isinstance(each, IterableDataset)]:
        allowed = "rows of several loaders are paired by position, so they must be read by index"
        text = f"returned several loaders, one of them over an IterableDataset ({streams[0]}): {allowed}"
        raise DataError.problem("train_dataloader()", text, "use one IterableDataset of pairs, or map-style Datasets")
    mode = getattr(given, "_mode", None) or "max_size_cycle"
    if mode not in MODES:
        allowed = f"training supports these modes: {', '.join(MODES)}"
        raise DataError.problem("train_dataloader()", f"returned a CombinedLoader of mode {mode}: {allowed}")
    inner = getattr(given, "iterables", given)
    together: Any = dict(zip(inner, items.values(), strict=True)) if isinstance(inner, Mapping) else [*items.values()]
    rows = SideBySide(together, MODES[mode](map(len, items.values())))
    notes.append("items of its loaders are paired by position, in the same way in every epoch")
    return _source(TRAIN, rows, notes)


def evaluation_sources(split: str, given: Any) -> dict[str, Any]:
    """The sources for the result of `val_dataloader()` or `test_dataloader()`, by split; several loaders become
    separate splits. Raises DataError."""
    loaders = dict(_loaders(split, given))
    return {name: _source(name, loader, _check(name, loader)) for name, loader in loaders.items()}


def collations(split: str, given: Any) -> dict[str, Any]:
    """The loaders' own collate_fn, by split."""
    return {name: collation_of(loader) for name, loader in _loaders(split, given)}


def collation_of(loader: Any) -> Any:
    """A loader's own collate_fn, if any."""
    collate = getattr(loader, "collate_fn", default_collate)
    return None if collate is default_collate else collate


def loader_number(split: str) -> int | None:
    """Index of an evaluation split's loader among several; None if it is the only one."""
    _, _, number = split.partition("_")
    return int(number) if number else None


def _loaders(name: str, given: Any) -> Iterator[tuple[str, Any]]:
    """Each loader by the name of its split, numbered if there are several."""
    given = getattr(given, "iterables", given)  # Lightning's CombinedLoader
    if given is None:
        return
    if not isinstance(given, (list, tuple, Mapping)):
        yield name, given
        return
    inner = list(given.values()) if isinstance(given, Mapping) else list(given)
    if len(inner) == 1 and not isinstance(given, Mapping):
        yield name, inner[0]
        return
    yield from ((f"{name}_{number}", loader) for number, loader in enumerate(inner))


def _check(split: str, loader: Any) -> list[str]:
    """Settings of a loader that have no effect, as text. Raises DataError for one that would change the training."""
    what = f"the {split} loader"
    if isinstance(loader, Dataset):
        return []
    if not isinstance(loader, DataLoader):
        allowed = "it must be a torch DataLoader, whose Dataset is used, or a Dataset"
        raise DataError(what, type(loader).__name__, allowed)
    if loader.batch_sampler is None or type(loader.batch_sampler) is not BatchSampler:
        found = "without batches" if loader.batch_sampler is None else f"with {type(loader.batch_sampler).__name__}"
        allowed = "scaleray makes batches from single rows"
        raise DataError(what, found, allowed, "omit batch_sampler and give batch_size; see docs/lightning.md")
    if isinstance(loader.dataset, IterableDataset):
        return _without_effect(split, loader)
    return [*_check_sampler(what, split, loader), *_without_effect(split, loader)]


def _check_sampler(what: str, split: str, loader: DataLoader[Any]) -> list[str]:
    sampler = loader.sampler
    known = (RandomSampler, SequentialSampler, DistributedSampler, SubsetRandomSampler)
    if type(sampler) not in known:
        text = "it would choose the rows, whose order scaleray determines"
        hint = "omit it, and weight rows in the loss or repeat them in the Dataset"
        raise DataError.problem(what, f"uses the sampler {type(sampler).__name__}: {text}", hint)
    if isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != len(loader.dataset)):  # type: ignore[arg-type]
        text = "uses a RandomSampler that repeats or drops rows: in scaleray, an epoch has each row exactly once"
        raise DataError.problem(what, text, "use shuffle=True")
    if split.startswith(TRAIN) and isinstance(sampler, SequentialSampler):
        return ["its DataLoader does not shuffle; data.shuffle determines this (true unless set to false)"]
    return []


def _without_effect(split: str, loader: DataLoader[Any]) -> list[str]:
    notes = []
    if split.startswith(TRAIN):
        notes.append(f"its DataLoader has batches of {loader.batch_size}; batch.global_size determines this")
    if loader.drop_last:
        key = "batch.drop_last decides here" if split.startswith(TRAIN) else "scaleray evaluates every row"
        notes.append(f"its DataLoader drops the last batch; {key}")
    if loader.worker_init_fn is not None:
        notes.append("its DataLoader's worker_init_fn is not called; scaleray seeds random numbers for each row")
    return notes


def _items(loader: Any) -> Any:
    """The Dataset of a loader, or the part of it from which its sampler draws."""
    if isinstance(loader, Dataset):
        return loader
    sampler = loader.sampler
    if isinstance(sampler, SubsetRandomSampler):
        return Subset(loader.dataset, list(sampler.indices))
    return loader.dataset


def _source(split: str, loader: Any, notes: list[str]) -> ArraySource | DatasetSource:
    items, is_exact = _items(loader), collation_of(loader) is not None
    hugging_face_data.check(items, split=split)
    if isinstance(items, IterableDataset):
        streamed = IterableSource(IteratedRows(split, items, is_exact=is_exact))
        streamed.notes = tuple(notes)
        return streamed
    tensors = None if is_exact else _tensors(items)
    if tensors is not None:
        source: ArraySource | DatasetSource = ArraySource(columns_of(split, tensors))
    else:
        source = DatasetSource(Rows(split, items, is_exact=is_exact))
    source.notes = tuple(notes)
    return source


def _tensors(items: Any, chosen: Callable[[Any], Any] = lambda tensor: tensor) -> tuple[Any, ...] | None:
    """Rows of a TensorDataset or a part of one, which can be read together; None for other Datasets."""
    if type(items) is Subset:
        index = np.asarray(items.indices)
        return _tensors(items.dataset, lambda tensor: chosen(tensor[index]))
    return tuple(chosen(tensor) for tensor in items.tensors) if type(items) is TensorDataset else None
