"""Rows of each case of the input benchmark, as a user's ordinary Dataset and as what a workload gives to scaleray."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

NUM_FEATURES = 64
IMAGE_SIDE, CROP_SIDE = 256, 224
TOKENS_PER_ID = 2048
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One kind of rows: what each side reads, and how a consumer finds a row's number in a batch.

    datasets: map-style Datasets by kind of DataLoader, of which `batched` takes the indices of a whole batch at once.
    source: what scaleray reads, by the name that its sides begin with.
    """

    name: str
    num_rows: int
    batch_size: int
    epochs: int
    datasets: dict[str, Any]
    sources: dict[str, Any]
    row_numbers: Callable[[Batch], torch.Tensor]
    """Numbers of a batch's rows, checked against their content; int64 (n,)."""


class Rows(torch.utils.data.Dataset):
    """Tensors as an ordinary map-style Dataset: an index gives a row, a list of indices a batch."""

    def __init__(self, columns: dict[str, np.ndarray]) -> None:
        self.columns = {name: torch.from_numpy(values) for name, values in columns.items()}

    def __len__(self) -> int:
        return len(self.columns["label"])

    def __getitem__(self, index: Any) -> Batch:
        if isinstance(index, list):
            rows = torch.tensor(index)
            return {name: values.index_select(0, rows) for name, values in self.columns.items()}
        return {name: values[index] for name, values in self.columns.items()}


class Tokens(torch.utils.data.Dataset):
    """Rows of a mapped file of uint16 tokens, copied whole."""

    def __init__(self, path: Path, length: int) -> None:
        self.tokens, self.length = np.memmap(path, np.uint16, mode="r"), length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> Batch:
        start = index * self.length
        return {"tokens": torch.from_numpy(np.array(self.tokens[start : start + self.length + 1]))}


class TokenBatches(Tokens):
    """The same, a whole batch for a list of indices."""

    def __getitem__(self, index: Any) -> Batch:
        rows = np.empty((len(index), self.length + 1), np.uint16)
        for row, number in zip(rows, index, strict=True):
            row[:] = self.tokens[number * self.length : (number + 1) * self.length + 1]
        return {"tokens": torch.from_numpy(rows)}


class Images(torch.utils.data.Dataset):
    """JPEG files in a column of a Parquet file, decoded, cropped and flipped at random: uint8 (3, 224, 224)."""

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet as pq

        table = pq.read_table(path).combine_chunks()
        self.jpegs, self.labels = table["jpeg"], table["label"].to_numpy()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        from PIL import Image

        pixels = np.asarray(Image.open(io.BytesIO(self.jpegs[index].as_buffer())).convert("RGB"))
        top, left = torch.randint(0, IMAGE_SIDE - CROP_SIDE + 1, (2,)).tolist()
        pixels = pixels[top : top + CROP_SIDE, left : left + CROP_SIDE]
        if torch.rand(()).item() < 0.5:
            pixels = pixels[:, ::-1]
        return {"image": np.ascontiguousarray(pixels.transpose(2, 0, 1)), "label": self.labels[index]}


def dataloader_batches(
    dataset: Any, *, batch_size: int, num_workers: int, is_batched: bool, epochs: Sequence[int]
) -> Iterator[Batch]:
    """Epochs of a DataLoader as its documentation shows it; its workers live as long as it does."""
    order = torch.Generator().manual_seed(epochs[0])
    options: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    if is_batched:
        rows = torch.utils.data.RandomSampler(dataset, generator=order)
        options |= {"sampler": torch.utils.data.BatchSampler(rows, batch_size, drop_last=False), "batch_size": None}
    else:
        options |= {"batch_size": batch_size, "shuffle": True, "generator": order}
    loader = torch.utils.data.DataLoader(dataset, **options)
    return itertools.chain.from_iterable(loader for _ in epochs)


# the cases


def small_rows(folder: Path, num_rows: int) -> Case:
    """Rows of 64 float32 and an int64 label: in memory, and for scaleray from a Parquet file as well."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from scaleray.data import ParquetSource

    x = np.random.default_rng(0).standard_normal((num_rows, NUM_FEATURES), dtype=np.float32)
    x[:, 0] = np.arange(num_rows)
    columns = {"x": x, "label": np.arange(num_rows)}
    lists = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), NUM_FEATURES)
    pq.write_table(pa.table({"x": lists, "label": columns["label"]}), folder / "rows.parquet", row_group_size=10_000)

    def row_numbers(batch: Batch) -> torch.Tensor:
        if not torch.equal(batch["x"][:, 0], batch["label"].float()):
            raise RuntimeError("features and labels of different rows were mixed")
        return batch["label"]

    rows = Rows(columns)
    return Case(
        "small rows",
        num_rows,
        256,
        2,
        {"plain": rows, "batched": rows},
        {"scaleray": columns, "scaleray_parquet": ParquetSource(folder / "rows.parquet")},
        row_numbers,
    )


def tokens(folder: Path, num_tokens: int, length: int) -> Case:
    """Rows of `length` uint16 tokens and one more from a mapped file; 64 Ki tokens a batch."""
    from scaleray.data import TokenSource

    path = folder / "tokens.bin"
    if not path.exists():
        (np.arange(num_tokens) // TOKENS_PER_ID).astype(np.uint16).tofile(path)

    def row_numbers(batch: Batch) -> torch.Tensor:
        ids = batch["tokens"][:, ::length].to(torch.int64) * TOKENS_PER_ID  # the first token and the last
        if not torch.equal(ids[:, 1], ids[:, 0] + length):
            raise RuntimeError("a row does not end where it should")
        return ids[:, 0] // length

    plain, batched = Tokens(path, length), TokenBatches(path, length)
    source = TokenSource(path, sequence_length=length, dtype="uint16")
    return Case(
        f"tokens {length:,}",
        len(plain),
        2**16 // length,
        4,
        {"plain": plain, "batched": batched},
        {"scaleray": source},
        row_numbers,
    )


def images(folder: Path, num_rows: int) -> Case:
    """JPEG files of 256 x 256 pixels, 14 KB each, of smooth random colours."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    rng, files = np.random.default_rng(0), []
    for _ in range(num_rows):
        coarse = Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8))
        file = io.BytesIO()
        coarse.resize((IMAGE_SIDE, IMAGE_SIDE), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    pq.write_table(pa.table({"jpeg": files, "label": np.arange(num_rows)}), folder / "images.parquet")

    def row_numbers(batch: Batch) -> torch.Tensor:
        if batch["image"].shape[1:] != (3, CROP_SIDE, CROP_SIDE) or batch["image"].dtype != torch.uint8:
            raise RuntimeError(f"images of {batch['image'].shape[1:]} {batch['image'].dtype}")
        return batch["label"]

    dataset = Images(folder / "images.parquet")
    return Case("images", num_rows, 64, 2, {"plain": dataset}, {"scaleray": dataset}, row_numbers)
