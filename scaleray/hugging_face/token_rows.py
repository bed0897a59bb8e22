"""Rows of equal length from documents of various lengths: tokenising, cutting, packing and padding.

A row has the inputs of a model of transformers: `input_ids`, with `labels` (-100 where nothing is predicted),
`attention_mask` or `position_ids` if they differ from their defaults.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from scaleray.data import ArraySource, Ragged
from scaleray.data import padded as filled_up
from scaleray.data.collation import Batch, Columnwise, columns_of
from scaleray.errors import DataError

IGNORED = -100
"""Label of a position without a loss, as everywhere in transformers."""
MASK = "attention_mask"
AT_ONCE = 1000  # documents passed to the tokenizer together: it uses all cores for them


@dataclass(frozen=True)
class Tokens:
    """One document: token ids, and labels (both int32, of one length) if they differ from the ids."""

    ids: np.ndarray
    labels: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def piece(self, start: int, stop: int) -> Tokens:
        """Part of the document from one position to another."""
        return Tokens(self.ids[start:stop], None if self.labels is None else self.labels[start:stop])

    @property
    def as_labels(self) -> np.ndarray:
        """Labels of a single document, whose first token is not predicted."""
        labels = (self.ids if self.labels is None else self.labels).copy()
        labels[:1] = IGNORED
        return labels


def tokenize(texts: Sequence[str], tokenizer: Any, *, end: int | None) -> list[Tokens]:
    """Tokenise documents without special tokens, appending the token `end` if given."""
    documents: list[Tokens] = []
    tail = [] if end is None else [end]
    for start in range(0, len(texts), AT_ONCE):
        found = tokenizer(
            list(texts[start : start + AT_ONCE]), add_special_tokens=False, verbose=False, return_attention_mask=False
        )
        documents += [Tokens(np.array([*ids, *tail], np.int32)) for ids in found["input_ids"]]
    return documents


def concatenated(documents: Sequence[Tokens], length: int, *, what: str) -> ArraySource:
    """Rows cut from all documents joined together. Attention crosses the ends of documents, and the remainder is
    dropped. Raises DataError if there are too few tokens for one row."""
    ids = np.concatenate([np.zeros(0, np.int32), *(document.ids for document in documents)])
    rows = len(ids) // length
    if not rows:
        raise DataError.problem(
            f"the {what} text",
            f"has {len(ids)} tokens, too few for a row of {length}",
            "give more text, or use a shorter length",
        )
    columns = {"input_ids": ids[: rows * length].reshape(rows, length)}
    if any(document.labels is not None for document in documents):
        labels = np.concatenate([document.as_labels for document in documents])
        columns["labels"] = labels[: rows * length].reshape(rows, length)
    return ArraySource(columns, tokens_per_row=length)


def packed(documents: Sequence[Tokens], length: int, *, pad: int) -> ArraySource:
    """Rows with several separate documents. Each has positions from 0, by which transformers finds its start, and
    attention does not cross its end. Longer documents are cut into pieces of `length` tokens."""
    pieces = [d.piece(s, s + length) for d in documents for s in range(0, len(d), length)]
    rows = _fill([len(piece) for piece in pieces], length)
    shape = (len(rows), length)
    ids, labels = np.full(shape, pad, np.int32), np.full(shape, IGNORED, np.int32)
    positions = np.zeros(shape, np.int32)  # each padding token is a separate document
    for row, members in enumerate(rows):
        start = 0
        for member in members:
            piece = pieces[member]
            place = slice(start, start + len(piece))
            ids[row, place], labels[row, place] = piece.ids, piece.as_labels
            positions[row, place] = np.arange(len(piece))
            start += len(piece)
    return ArraySource({"input_ids": ids, "labels": labels, "position_ids": positions}, tokens_per_row=length)


def padded(documents: Sequence[Tokens], length: int, *, pad: int) -> ArraySource:
    """One row per document: truncated to `length`, or padded with tokens without attention or loss."""
    shape = (len(documents), length)
    ids, labels = np.full(shape, pad, np.int32), np.full(shape, IGNORED, np.int32)
    mask = np.zeros(shape, np.int8)
    for row, document in enumerate(documents):
        piece = document.piece(0, length)
        place = slice(0, len(piece))
        ids[row, place], labels[row, place], mask[row, place] = piece.ids, piece.as_labels, 1
    return ArraySource({"input_ids": ids, "labels": labels, MASK: mask}, tokens_per_row=length)


class TokenPadding(Columnwise):
    """Collate rows of unequal length: pad at the end, and add a mask of the real tokens if the data has none.

    pad: token for padding `input_ids`; labels are padded with -100, other columns with 0. A column `label` is renamed
    to `labels`, as by the collators of transformers.
    """

    def __init__(self, pad: int) -> None:
        self.pad = pad

    def __call__(self, rows: Any) -> Batch:
        columns = columns_of(rows)
        batch = filled_up(columns, value={"input_ids": self.pad, "labels": IGNORED}, mask=None)
        ids = columns.get("input_ids")
        if isinstance(ids, Ragged) and MASK not in columns:
            is_real = np.arange(batch["input_ids"].shape[1]) < ids.lengths[:, None]
            batch[MASK] = torch.from_numpy(is_real.astype(np.int8))
        if "label" in batch and "labels" not in batch:
            batch["labels"] = batch.pop("label")
        return batch


def _fill(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Assign pieces to rows: each piece, longest first, goes to the row with the least sufficient space."""
    rows: list[list[int]] = []
    spaces: list[int] = []  # sorted
    with_space: dict[int, list[int]] = {}
    for number in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        size = sizes[number]
        place = bisect.bisect_left(spaces, size)
        if place == len(spaces):
            row, space = len(rows), length
            rows.append([])
        else:
            space = spaces[place]
            row = with_space[space].pop()
            if not with_space[space]:
                del with_space[space], spaces[place]
        rows[row].append(number)
        left = space - size
        if left:
            if left not in with_space:
                bisect.insort(spaces, left)
            with_space.setdefault(left, []).append(row)
    return rows
