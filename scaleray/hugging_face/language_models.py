"""Ready-made workloads for text: causal and masked language models, configured in YAML."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from scaleray.data import TRAIN, ArraySource, Ragged
from scaleray.errors import ConfigError, DataError, WorkloadError, first_line
from scaleray.hugging_face import text_files, token_rows
from scaleray.hugging_face.base_workload import HuggingFaceWorkload
from scaleray.hugging_face.classifier_losses import in_order_of
from scaleray.hugging_face.pretrained_models import read_config
from scaleray.hugging_face.token_rows import IGNORED, Tokens

ASSISTANT = "assistant"
Span = tuple[int, int]


def conversations(found: Sequence[Any], tokenizer: Any, *, length: int, what: str) -> list[Tokens]:
    """Tokenise conversations. Those without text of the assistant in their first `length` tokens are omitted, with a
    warning. Raises DataError for invalid conversations, WorkloadError for an unusable template."""
    if not tokenizer.chat_template:
        raise WorkloadError.problem(
            "the tokenizer",
            "has no chat template, which is needed for conversations",
            "set chat_template in its folder",
        )
    if not tokenizer.is_fast:
        raise WorkloadError(
            "the tokenizer", type(tokenizer).__name__, "conversations need a fast tokenizer (tokenizer.json)"
        )
    documents, empty, longer = [], 0, 0
    for number, messages in enumerate(found):
        document = _one(_checked(messages, f"conversation {number} of the {what} data"), tokenizer)
        longer += len(document) > length
        if bool((document.piece(0, length).as_labels == IGNORED).all()):
            empty += 1
        else:
            documents.append(document)
    if longer:
        warnings.warn(
            f"{longer} of {len(found)} conversations of the {what} data are longer than {length} tokens and are cut; "
            f"{empty} have no text of the assistant in the remaining part and are omitted",
            stacklevel=2,
        )
    if not documents:
        raise DataError.problem(f"the {what} data", "has no text of the assistant to learn from")
    return documents


def _checked(messages: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise DataError(where, type(messages).__name__, 'it must be a list of {"role": ..., "content": ...}')
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise DataError.problem(where, "has a message without role or content")
    return [dict(message) for message in messages]


def _one(messages: list[dict[str, Any]], tokenizer: Any) -> Tokens:
    text, spans = _marked_text(messages, tokenizer)
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = np.array(found["input_ids"], np.int32)
    starts, stops = np.array(found["offset_mapping"], np.int64).reshape(-1, 2).T
    is_said = np.zeros(len(ids), bool)
    for begin, end in spans:
        is_said |= (starts >= begin) & (stops <= end) & (stops > starts)
    return Tokens(ids, np.where(is_said, ids, IGNORED).astype(np.int32))


def _marked_text(messages: list[dict[str, Any]], tokenizer: Any) -> tuple[str, list[Span]]:
    """Return the conversation as text, and the spans of the assistant: from the end of the generation prompt to the end
    of the answer, including its closing token. Later turns must not change the template's text of earlier ones."""

    def rendered(until: int, *, asks: bool) -> str:
        try:
            text: str = tokenizer.apply_chat_template(messages[:until], tokenize=False, add_generation_prompt=asks)
        except Exception as exc:  # any error of Jinja and the template
            raise WorkloadError.problem("the chat template", f"rejects the conversation: {first_line(exc)}") from exc
        return text

    whole = rendered(len(messages), asks=False)
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before, after = rendered(number, asks=True), rendered(number + 1, asks=False)
        if not whole.startswith(after) or not after.startswith(before):
            raise WorkloadError.problem(
                "the chat template",
                "changes earlier messages, so the assistant's text cannot be located",
                "tokenise in your own workload, with labels of -100 outside the assistant's text",
            )
        spans.append((len(before), len(after)))
    return whole, spans


# Masking for masked language models: the hidden tokens follow from the row's seed, so they are the same on any
# number of workers.
#
# Source: Devlin et al. 2018, arXiv:1810.04805, section 3.1: of the chosen tokens, 80 % become the mask, 10 % become
# another token, and 10 % are kept.

MASKED_SHARE, RANDOM_SHARE = 0.8, 0.1


@dataclass(frozen=True)
class Masking:
    """Masking of tokens. share: share of the non-special tokens to hide. mask: id of the mask. special: ids that are
    never hidden. vocabulary: number of ids."""

    share: float
    mask: int
    special: tuple[int, ...]
    vocabulary: int

    def hide(self, ids: np.ndarray, rng: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens (rows, length) with some hidden, and labels: the hidden tokens, and -100 elsewhere.

        rng: a `scaleray.data.RowRandom` of these rows.
        """
        length = ids.shape[1]
        chance, kind = rng.random(length), rng.random(length)
        drawn = rng.integers(self.vocabulary, shape=length)
        is_chosen = (chance < self.share) & ~np.isin(ids, self.special)
        labels = np.where(is_chosen, ids, IGNORED).astype(ids.dtype)
        hidden = np.where(is_chosen & (kind < MASKED_SHARE), self.mask, ids)
        is_random = is_chosen & (kind >= MASKED_SHARE) & (kind < MASKED_SHARE + RANDOM_SHARE)
        return np.where(is_random, drawn, hidden).astype(ids.dtype), labels


SPECIAL = tuple(f"{name}_token_id" for name in ("bos", "eos", "pad", "cls", "sep"))
PACKINGS = ("concatenate", "separate", "pad")


class TextWorkload(HuggingFaceWorkload):
    """Base of workloads with a tokenizer and text files.

    data: files or Datasets of Hugging Face by split, as accepted by `text_files.read_splits`. sequence_length: tokens
    per row. text: column of the text in records. validation_share: share of the training records held out as `val`, if
    the data has no `val`."""

    def __init__(
        self,
        model: Any,
        *,
        data: Mapping[str, Any],
        tokenizer: str | None = None,
        sequence_length: int = 256,
        text: str = "text",
        validation_share: float = 0.0,
        attention: str | None = None,
        peft: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(model, tokenizer=tokenizer, attention=attention, peft=peft)
        if sequence_length < 2:
            raise ConfigError("workload.args.sequence_length", sequence_length, "it must be at least 2")
        if not 0 <= validation_share < 1:
            raise ConfigError("workload.args.validation_share", validation_share, "it must be at least 0 and below 1")
        self.data, self.text = data, text
        self.sequence_length, self.validation_share = sequence_length, validation_share

    def records(self) -> dict[str, list[text_files.Record]]:
        """The records of each split."""
        return text_files.read_splits(self.data, validation_share=self.validation_share)

    def in_order(self, names: list[str], *, column: str) -> list[str]:
        """Names of classes in the order of the model's id2label, if it has them, or of the column's ClassLabel in a
        Hugging Face Dataset; otherwise unchanged."""
        stated = text_files.classes_of(self.data[TRAIN], column) or names
        is_trained = self.folder is not None
        return in_order_of(read_config(self.model, {}), stated, is_trained=is_trained, argument="labels")

    def config_changes(self) -> dict[str, Any]:
        """Vocabulary and special tokens of the tokenizer, for a config that does not state them."""
        if isinstance(self.model, str):
            return {}
        there = read_config(self.model, {})
        special = {name: getattr(self.tokenizer, name) for name in SPECIAL if hasattr(there, name)}
        return {k: v for k, v in {"vocab_size": len(self.tokenizer), **special}.items() if k not in self.model}

    def check_length(self) -> None:
        """Raise ConfigError if the model has fewer positions than a row, or fewer tokens than the tokenizer."""
        config = self.config()
        longest = getattr(config, "max_position_embeddings", None)
        if isinstance(longest, int) and self.sequence_length > longest:
            raise ConfigError(
                "workload.args.sequence_length", self.sequence_length, f"the model has {longest} positions"
            )
        known, used = getattr(config, "vocab_size", None), len(self.tokenizer)
        if isinstance(known, int) and used > known:
            raise ConfigError.problem(
                "workload.args.tokenizer",
                f"has {used} tokens, while the model has {known}",
                "use the model's tokenizer, or set vocab_size in your own config",
            )

    @property
    def pad(self) -> int:
        """Padding token; an arbitrary token if the tokenizer has none, as the loss ignores it."""
        found = self.tokenizer.pad_token_id
        return int(found if found is not None else self.tokenizer.eos_token_id or 0)

    def tokenized(self, *texts: Any, **more: Any) -> tuple[dict[str, Any], Any]:
        """Tokenise texts or pairs of texts, with special tokens, truncated to `sequence_length` and not padded. Returns
        columns and the tokenizer's own result. more: options of the tokenizer."""
        cut = {"truncation": True, "max_length": self.sequence_length, "return_attention_mask": False}
        found = self.tokenizer(*texts, **cut, **more)
        return {name: Ragged.of([np.array(row, np.int32) for row in rows]) for name, rows in found.items()}, found

    def datasets(self) -> dict[str, ArraySource]:
        self.check_length()
        return {name: self._rows(name, records) for name, records in self.records().items()}

    def _rows(self, what: str, records: list[text_files.Record]) -> ArraySource:
        """Rows for the records of a split or file, named `what`."""
        raise NotImplementedError


class LabelledTexts(TextWorkload):
    """Base of workloads whose records have a text and a target, which may be missing in `--data`."""

    text_type: ClassVar[type] = str
    """Type of a record's text."""

    def read_data(self, path: str) -> ArraySource | None:
        """Rows of a file of records with a text, and all columns of the records; None for files of another type."""
        try:
            records = list(text_files.read_records(path, what="--data"))
        except DataError:
            return None  # not in such a format: other readers may support it
        if not records or not all(isinstance(record.get(self.text), self.text_type) for record in records):
            return None
        found = self._rows(path, records)
        found.beside = {name: [record.get(name) for record in records] for name in records[0]}
        return found


class CausalLanguageModel(TextWorkload):
    """Predict each token from the previous ones, in plain text or in conversations.

    packing: `concatenate` (documents are joined and cut into rows; attention crosses their ends), `separate` (documents
    share rows, separated by their positions) or `pad` (one per row). None: `concatenate` for text, `pad` for
    conversations. messages: column of conversations, formatted by the tokenizer's chat template, with a loss only on
    the assistant's text."""

    auto_class = "AutoModelForCausalLM"
    predicts_next = True
    collate = None  # type: ignore[assignment]  # rows have one length

    def __init__(self, model: Any, *, packing: str | None = None, messages: str = "messages", **more: Any) -> None:
        super().__init__(model, **more)
        if packing not in (None, *PACKINGS):
            raise ConfigError("workload.args.packing", packing, f"it must be one of {', '.join(PACKINGS)}")
        self.packing, self.messages = packing, messages

    def _rows(self, what: str, records: list[text_files.Record]) -> ArraySource:
        is_chat = self.messages in records[0]
        documents = self._conversations(what, records) if is_chat else self._documents(what, records)
        packing = self.packing or ("pad" if is_chat else "concatenate")
        if packing == "concatenate":
            return token_rows.concatenated(documents, self.sequence_length, what=what)
        arrange = token_rows.packed if packing == "separate" else token_rows.padded
        return arrange(documents, self.sequence_length, pad=self.pad)

    def _documents(self, what: str, records: list[text_files.Record]) -> list[Tokens]:
        texts = text_files.texts(records, self.text, what=what)
        return token_rows.tokenize(texts, self.tokenizer, end=self.tokenizer.eos_token_id)

    def _conversations(self, what: str, records: list[text_files.Record]) -> list[Tokens]:
        found = text_files.column(records, self.messages, what=what)
        return conversations(found, self.tokenizer, length=self.sequence_length, what=what)


class MaskedLanguageModel(TextWorkload):
    """Predict hidden tokens of a text. Each epoch hides different tokens; every evaluation hides the same ones.

    masked_share: share of the tokens that are hidden; 80 % of these are replaced by the mask and 10 % by another token.
    """

    auto_class = "AutoModelForMaskedLM"
    collate = None  # type: ignore[assignment]  # rows have one length

    def __init__(self, model: Any, *, masked_share: float = 0.15, **more: Any) -> None:
        super().__init__(model, **more)
        if not 0 < masked_share < 1:
            raise ConfigError("workload.args.masked_share", masked_share, "it must be between 0 and 1")
        self.masked_share = masked_share
        self._masking: Masking | None = None

    @property
    def masking(self) -> Masking:
        """Return the masking. Raises ConfigError for a tokenizer without a mask."""
        if self._masking is None:
            tokenizer = self.tokenizer
            if tokenizer.mask_token_id is None:
                raise ConfigError.problem(
                    "workload.args.tokenizer", "has no mask token, which is needed for a masked language model"
                )
            special = tuple(tokenizer.all_special_ids)
            self._masking = Masking(self.masked_share, tokenizer.mask_token_id, special, len(tokenizer))
        return self._masking

    def datasets(self) -> dict[str, ArraySource]:
        self.check_length()
        self._masking = self.masking  # available where rows are read
        end, tokenizer = self.tokenizer.sep_token_id, self.tokenizer
        return {
            name: token_rows.concatenated(
                token_rows.tokenize(text_files.texts(records, self.text, what=name), tokenizer, end=end),
                self.sequence_length,
                what=name,
            )
            for name, records in self.records().items()
        }

    def transform(self, rows: dict[str, Any], rng: Any) -> dict[str, Any]:
        """Hide tokens, using the row's own random numbers."""
        ids, labels = self.masking.hide(rows["input_ids"], rng)
        return {**rows, "input_ids": ids, "labels": labels}
