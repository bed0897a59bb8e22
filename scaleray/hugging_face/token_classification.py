"""Ready-made workload for models that tag each word of a text, measured by entities."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from scaleray.data import TRAIN, ArraySource, Ragged
from scaleray.errors import DataError, WorkloadError
from scaleray.hugging_face import text_files
from scaleray.hugging_face.base_workload import LABELS, label_metrics
from scaleray.hugging_face.classifier_losses import class_names, named_classes
from scaleray.hugging_face.language_models import LabelledTexts
from scaleray.hugging_face.token_rows import IGNORED

STARTS = "starts"
"""Column that is 1 at the first token of each word."""
OUTSIDE = "O"
"""Tag of words outside entities."""
BEGIN, END = ("B", "S", "U"), ("E", "S", "L", "U")
"""Prefixes of tags that begin an entity, and of tags that end one."""
WITH_PREFIX = tuple(f"{prefix}-" for prefix in (*BEGIN, *END, "I"))


class TokenClassification(LabelledTexts):
    """Tag each word of a text. The first token of a word gets its tag; others are ignored.

    words, tags: columns with a list of words and a list of as many tags, as names or numbers. labels: tag names in the
    order of the model's logits, to which numeric tags refer; None for the names in the training data, in the order of
    the model's id2label, of their ClassLabel, or else sorted.
    """

    auto_class = "AutoModelForTokenClassification"
    text_type = list

    def __init__(
        self, model: Any, *, words: str = "words", tags: str = "tags", labels: Sequence[Any] | None = None, **more: Any
    ) -> None:
        super().__init__(model, text=words, **more)
        self.tags = tags
        self._names = None if labels is None else [str(name) for name in labels]

    @property
    def names(self) -> list[str]:
        """Names of the tags in the order of the model's logits."""
        if self._names is None:
            found = _lists(text_files.column(self.records()[TRAIN], self.tags, what=TRAIN), self.tags, TRAIN)
            self._names = self.in_order(
                class_names((row, tag) for row, tags in enumerate(found) for tag in tags), column=self.tags
            )
        return self._names

    def config_changes(self) -> dict[str, Any]:
        return {**super().config_changes(), **named_classes(self.names)}

    def inputs(self, batch: Any) -> dict[str, torch.Tensor]:
        return {name: column for name, column in super().inputs(batch).items() if name != STARTS}

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """Loss and accuracy of the tags, and precision, recall and F1 of entities, or F1 by tag if no tag has an entity
        prefix."""
        logits, labels = self.predictions(model, batch)
        counts = labels != IGNORED
        found, right, rows = logits.argmax(dim=-1)[counts], labels[counts], counts.nonzero()[:, 0]
        measure = entity_metrics if has_entities(self.names) else tag_metrics
        return {**label_metrics(logits, labels), **measure(found, right, rows, self.names)}

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        """Most likely tag of each word, separated by spaces."""
        tags = model(**self.inputs(batch)).logits.argmax(dim=-1)
        rows = [row[starts > 0].tolist() for row, starts in zip(tags, batch[STARTS], strict=True)]
        return {"tags": [" ".join(self.names[tag] for tag in row) for row in rows]}

    def _rows(self, what: str, records: list[text_files.Record]) -> ArraySource:
        tokenizer = self.tokenizer
        if not tokenizer.is_fast:
            raise WorkloadError(
                "the tokenizer", type(tokenizer).__name__, "tags of words need a fast tokenizer (tokenizer.json)"
            )
        words = _lists(text_files.column(records, self.text, what=what), self.text, what)
        for row, values in enumerate(words):
            if not all(isinstance(word, str) for word in values):
                raise DataError(f"column {self.text} of record {row} of the {what} data", values, "words must be text")
        columns, found = self.tokenized(words, is_split_into_words=True)
        places = [np.array([-1 if n is None else n for n in found.word_ids(row)]) for row in range(len(words))]
        is_start = [(place >= 0) & (place != np.concatenate([[-1], place[:-1]])) for place in places]
        columns[STARTS] = Ragged.of([starts.astype(np.int8) for starts in is_start])
        if cut := sum(len(set(place[place >= 0])) < len(row) for place, row in zip(places, words, strict=True)):
            warnings.warn(
                f"{cut} of {len(words)} records of the {what} data have words without a token among the first "
                f"{self.sequence_length}: these words have no tag",
                stacklevel=2,
            )
        if what in self.data or all(record.get(self.tags) is not None for record in records):
            tags = self._numbers(records, words, what)
            rows = zip(tags, places, is_start, strict=True)
            labels = [np.where(starts, np.append(tag, IGNORED)[place], IGNORED) for tag, place, starts in rows]
            columns[LABELS] = Ragged.of([row.astype(np.int32) for row in labels])
        return ArraySource(columns)

    def _numbers(self, records: list[text_files.Record], words: list[Any], what: str) -> list[np.ndarray]:
        """Numbers of the words' tags, by record."""
        numbers: dict[Any, int] = {name: number for number, name in enumerate(self.names)}
        by_number = {number: number for number in range(len(self.names))}
        known = {**by_number, **{int(n): at for n, at in numbers.items() if n.isdecimal()}, **numbers}
        tags = _lists(text_files.column(records, self.tags, what=what), self.tags, what)
        for row, (own, values) in enumerate(zip(tags, words, strict=True)):
            where = f"column {self.tags} of record {row} of the {what} data"
            if len(own) != len(values):
                raise DataError.problem(where, f"has {len(own)} tags for {len(values)} words: each word needs one tag")
            if wrong := [tag for tag in own if tag not in known]:
                there = ", ".join(self.names[:12]) + (", ..." if len(self.names) > 12 else "")
                raise DataError.problem(
                    where, f"has the unknown tag {wrong[0]}: the tags are {there}", "see workload.args.labels"
                )
        return [np.array([known[tag] for tag in own], np.int64) for own in tags]


def has_entities(names: Sequence[str]) -> bool:
    """Whether the tags group words into entities, as `B-PER` and `I-PER` do."""
    return any(name[:2] in ("B-", "I-") for name in names)


def entity_metrics(
    found: torch.Tensor, right: torch.Tensor, rows: torch.Tensor, names: Sequence[str]
) -> dict[str, tuple[Any, Any]]:
    """Precision, recall and F1 of entities over all types, as sums and counts. An entity is correct if its type, first
    word and last word are. As in conlleval, an inside tag after a tag of another type begins an entity.

    found, right: predicted and correct tag numbers of the words of all rows, concatenated. rows: row of each word.
    """
    places = torch.arange(len(found), device=found.device)
    (own_start, own_last, own_kind), (start, last, kind) = (
        _entities(tags, rows, places, names) for tags in (found, right)
    )
    both = (own_start & start & (own_kind == kind) & (own_last == last)).sum()
    num_found, num_right = own_start.sum(), start.sum()
    pairs = {"precision": (both, num_found), "recall": (both, num_right), "f1": (2 * both, num_found + num_right)}
    return {name: pair for name, pair in pairs.items() if pair[1] > 0}  # no share without a denominator


def tag_metrics(
    found: torch.Tensor, right: torch.Tensor, rows: torch.Tensor, names: Sequence[str]
) -> dict[str, tuple[Any, Any]]:
    """F1 of each tag that occurs, as sums and counts; see `entity_metrics`."""
    num_found, num_right, both = (
        torch.bincount(tags, minlength=len(names)) for tags in (found, right, right[found == right])
    )
    counts = (num_found + num_right).tolist()
    return {f"f1_{name}": (2 * both[n], counts[n]) for n, name in enumerate(names) if counts[n]}


def _entities(
    tags: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, names: Sequence[str]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each word: whether an entity starts there, the position of the last word of its entity, and the number of the
    entity's type, -1 outside."""
    parts = [name.split("-", 1) if name[:2] in WITH_PREFIX else ["I", name] for name in names]
    kinds = {kind: number for number, kind in enumerate(sorted({kind for _, kind in parts if kind != OUTSIDE}))}
    of_tag = lambda values: torch.tensor(values, device=tags.device)[tags]
    kind = of_tag([kinds.get(kind, -1) for _, kind in parts])
    begins, ends = of_tag([prefix in BEGIN for prefix, _ in parts]), of_tag([prefix in END for prefix, _ in parts])
    follows = torch.zeros_like(begins)  # continues the entity of the previous word
    follows[1:] = (rows[1:] == rows[:-1]) & (kind[1:] == kind[:-1]) & ~begins[1:] & ~ends[:-1]
    is_last = torch.ones_like(begins)
    is_last[:-1] = ~follows[1:]
    last = torch.where(is_last, places, len(places)).flip(0).cummin(0).values.flip(0)
    return (kind >= 0) & ~follows, last, kind


def _lists(values: list[Any], name: str, what: str) -> list[Any]:
    """Values of a column, each a non-empty list. Raises DataError."""
    wrong = next((n for n, value in enumerate(values) if not isinstance(value, (list, tuple)) or not value), None)
    if wrong is not None:
        raise DataError(
            f"column {name} of record {wrong} of the {what} data",
            values[wrong],
            "it must be a list with one element per word",
        )
    return values
