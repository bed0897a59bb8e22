"""Conversations as tokens, using the tokenizer's chat template, with labels only for the assistant's text."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scaleray.errors import DataError, WorkloadError, first_line
from scaleray.hugging_face.token_rows import IGNORED, Tokens

ASSISTANT = "assistant"
Span = tuple[int, int]


def conversations(found: Sequence[Any], tokenizer: Any, *, length: int, what: str) -> list[Tokens]:
    """Tokenise conversations; those without text of the assistant in their first `length` tokens are omitted, with a
    warning. Raises DataError for invalid conversations, WorkloadError for an unusable template."""
    if not tokenizer.chat_template:
        raise WorkloadError.problem(
            "the tokenizer", "has no chat template, which conversations need", "set chat_template in its folder"
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
                "rewrites earlier messages, so the assistant's text cannot be located",
                "tokenise in your own workload: labels are -100 outside the assistant's text",
            )
        spans.append((len(before), len(after)))
    return whole, spans
