"""A byte-level language model on real text: by default the source code of Python's own standard library.

Nothing is downloaded and there is no tokenizer: bytes are tokens, so any folder of text or Parquet files can take the
library's place. The metric is bits per byte, which needs no reference to a vocabulary and compares with compressors:
on the whole standard library zlib needs 1.83, on the part held out 1.96.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import llama_folder
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle
from transformer import SIZES, Transformer, TransformerConfig, tensor_plan

from scaleray import Workload
from scaleray.data import TokenSource
from scaleray.errors import ConfigError, DataError
from scaleray.parallel import balance_loss, expert_metrics, part

END_OF_DOCUMENT = b"\0"  # a byte that text does not hold
NUM_BYTE_VALUES = 256
PARQUET_SUFFIXES = (".parquet", ".pq")
# tests, and code that is generated or absent from many installations
LIBRARY_FOLDERS_LEFT_OUT = frozenset({"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__"})


class LanguageModel(Workload):
    """Predict each byte from the bytes before it.

    size: a name in transformer.SIZES; width, num_blocks, num_heads, num_kv_heads, ffn_width and rope_base replace
    single values of it. The vocabulary is always the 256 bytes.
    num_experts: a mixture of so many experts in place of each feed-forward layer, of which a token uses
    experts_per_token; balance_weight: of their balance loss.
    text: None for Python's standard library; else a folder (or one file), searched with its subfolders. A .parquet or
    .pq file holds one document a row in the column `text_column`; every other file is one document. Hidden files and
    folders are left out. suffix: only files whose name ends so.
    validation_share: share of the documents held out, chosen by a hash of their content.
    """

    def __init__(
        self,
        size: str = "1m",
        sequence_length: int = 256,
        tie_head: bool = True,
        text: str | None = None,
        suffix: str | None = None,
        text_column: str = "text",
        validation_share: float = 0.1,
        width: int | None = None,
        num_blocks: int | None = None,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        ffn_width: int | None = None,
        rope_base: float | None = None,
        num_experts: int | None = None,
        experts_per_token: int = 2,
        expert_capacity: float | None = None,
        balance_weight: float = 0.01,
    ) -> None:
        if size not in SIZES:
            raise ConfigError("workload.args.size", size, f"it must be one of {', '.join(SIZES)}")
        if sequence_length < 1:
            raise ConfigError("workload.args.sequence_length", sequence_length, "it must be at least 1")
        if not 0 < validation_share < 1:
            raise ConfigError("workload.args.validation_share", validation_share, "it must lie between 0 and 1")
        shape = {
            "width": width,
            "num_blocks": num_blocks,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "ffn_width": ffn_width,
            "rope_base": rope_base,
        }
        self.balance_weight = 0.0 if num_experts is None else balance_weight
        self.config: TransformerConfig = dataclasses.replace(
            SIZES[size],
            vocab_size=NUM_BYTE_VALUES,
            max_sequence_length=sequence_length,
            tie_head=tie_head,
            num_experts=num_experts,
            experts_per_token=experts_per_token,
            expert_capacity=expert_capacity,
            **{name: value for name, value in shape.items() if value is not None},
        )
        # absolute at once, since workers run in other directories
        self.text = None if text is None else Path(text).expanduser().absolute()
        self.suffix, self.text_column = suffix, text_column
        self.validation_share = validation_share

    def build_model(self) -> nn.Module:
        device = torch.get_default_device()
        with torch.device("meta"):  # otherwise torch's own initialisation takes time, and numbers from the generator
            model = Transformer(self.config)
        model.to_empty(device=device)
        model.init_weights()
        return model

    def datasets(self) -> dict[str, TokenSource]:
        splits: dict[str, list[bytes]] = {"train": [], "val": []}
        for document in self._documents():
            splits[split_of(document, validation_share=self.validation_share)].append(document)
        return {name: self._source(name, documents) for name, documents in splits.items()}

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        """Cross entropy in nats summed over the predicted bytes, and their number; with experts, and their balance."""
        nats, count = self._nats(model, batch)
        return nats + self.balance_weight * balance_loss(model) if self.balance_weight else nats, count

    def _nats(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        tokens = batch["tokens"].long()
        targets = part(tokens[:, 1:], dim=1).flatten()  # all of them, but for parallel.context
        logits = model(part(tokens[:, :-1], dim=1))
        return F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum"), targets.numel()

    def metrics(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, int]]:
        nats, count = self._nats(model, batch)
        of_experts = {} if self.config.num_experts is None else expert_metrics(model, count)
        return {"loss": (nats, count), "bits_per_byte": (nats / math.log(2), count), **of_experts}

    def blocks(self, model: nn.Module) -> nn.ModuleList:
        return model.blocks

    def weight_names(self, model: nn.Module, config: Mapping[str, Any]) -> dict[str, str]:
        """Llama's names of the tensors, for a folder in Hugging Face's layout; its vocabulary must be the 256 bytes."""
        return llama_folder.weight_names(self.config, config)

    def tensor_plan(self, model: nn.Module, *, size: int, sequence_parallel: bool) -> dict[str, ParallelStyle]:
        return tensor_plan(self.config, size=size, sequence_parallel=sequence_parallel)

    def _documents(self) -> Iterator[bytes]:
        if self.text is None:
            yield from standard_library()
        else:
            yield from read_folder(self.text, suffix=self.suffix, text_column=self.text_column)

    def _source(self, split: str, documents: list[bytes]) -> TokenSource:
        text = b"".join(document + END_OF_DOCUMENT for document in documents)
        source = TokenSource(np.frombuffer(text, dtype=np.uint8), sequence_length=self.config.max_sequence_length)
        if source.num_rows == 0:
            raise DataError(
                f"the {split} text in {self.text or 'the standard library'}",
                f"{len(text)} bytes of {len(documents)} documents",
                f"one sequence needs {self.config.max_sequence_length + 1} bytes",
                "give more text, a shorter sequence_length, or another validation_share",
            )
        return source


def split_of(document: bytes, *, validation_share: float) -> str:
    """`val` for about `validation_share` of all documents, by SHA-256, so that equal ones are never in both splits.

    The answer does not depend on the other documents: adding or removing some moves none of the rest.
    """
    number = int.from_bytes(hashlib.sha256(document).digest()[:8], "big")
    return "val" if number < validation_share * 2**64 else "train"


def standard_library() -> Iterator[bytes]:
    """The .py files of the running Python's standard library, sorted by name: about 600 files and 11 MB for 3.11."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = _files(folder, suffix=".py", left_out=LIBRARY_FOLDERS_LEFT_OUT)
    if not paths:
        raise DataError(
            "the source of the standard library",
            "missing",
            f"{folder} holds no .py files",
            "give a folder of text with --workload.args.text",
        )
    yield from map(_read, paths)


def read_folder(folder: Path, *, suffix: str | None = None, text_column: str = "text") -> Iterator[bytes]:
    """The documents of a folder, or of one file: files sorted by relative name, Parquet rows in their order."""
    if not folder.exists():
        raise DataError("workload.args.text", str(folder), "it does not exist", "give a folder that this machine sees")
    paths = [folder] if folder.is_file() else _files(folder, suffix=suffix or "")
    if not paths:
        wanted = f"files ending in {suffix}" if suffix else "files"
        raise DataError(
            "workload.args.text", str(folder), f"it holds no {wanted}", "hidden files and folders are not read"
        )
    for path in paths:
        if path.suffix in PARQUET_SUFFIXES:
            yield from _read_parquet(path, text_column=text_column)
        else:
            yield _read(path)


def _files(folder: Path, *, suffix: str = "", left_out: frozenset[str] = frozenset()) -> list[Path]:
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        found += [Path(parent, name) for name in names if name.endswith(suffix) and not name.startswith(".")]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise DataError("text file", str(path), f"it cannot be read: {exc}", "take it out of the folder") from exc


def _read_parquet(path: Path, *, text_column: str) -> Iterator[bytes]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        schema = file.schema_arrow
        if text_column not in schema.names:
            raise DataError(
                "workload.args.text_column",
                text_column,
                f"{path} has the columns {', '.join(schema.names)}",
                "name one that holds strings",
            )
        kind = schema.field(text_column).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise DataError(
                f"column {text_column} of {path}", str(kind), "it must hold strings", "name another with text_column"
            )
        for rows in file.iter_batches(columns=[text_column]):
            if rows.column(0).null_count:
                raise DataError(
                    f"column {text_column} of {path}",
                    f"{rows.column(0).null_count} nulls",
                    "every row needs a text",
                    "drop or fill them when the file is written",
                )
            yield from (value.as_py().encode() for value in rows.column(0))
    except (OSError, pa.ArrowException) as exc:
        raise DataError(
            "Parquet file", str(path), f"it cannot be read: {exc}", "write it again, or take it out of the folder"
        ) from exc
