"""Tags of the tokens of Python source: a transformers model for token classification, with -100 where no loss is taken."""

from __future__ import annotations

import io
import tokenize
from typing import Any

import numpy as np

from scaleray.hugging_face import HuggingFaceWorkload
from scaleray.hugging_face.text_files import read_splits

TAGS = ("name", "operator", "number", "string", "comment")
KINDS = {tokenize.NAME: 0, tokenize.OP: 1, tokenize.NUMBER: 2, tokenize.STRING: 3, tokenize.COMMENT: 4}


class TokenTags(HuggingFaceWorkload):
    auto_class = "AutoModelForTokenClassification"

    def __init__(self, model: Any, data: dict[str, Any], length: int = 64) -> None:
        super().__init__(model)
        self.data, self.length = data, length

    def config_changes(self) -> dict[str, Any]:
        return {"vocab_size": 128, "num_labels": len(TAGS), "id2label": dict(enumerate(TAGS))}

    def datasets(self) -> dict[str, Any]:
        splits = read_splits(self.data, validation_share=0)
        return {
            name: self.rows("".join(r["text"] for r in records if r["text"].isascii()))
            for name, records in splits.items()
        }

    def rows(self, text: str) -> dict[str, np.ndarray]:
        ids, starts = np.frombuffer(text.encode(), np.uint8).copy(), np.cumsum([0, *map(len, text.splitlines(True))])
        labels = np.full(len(ids), -100)  # also within a token: its first character alone is tagged
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in KINDS:
                labels[starts[token.start[0] - 1] + token.start[1]] = KINDS[token.type]
        size = len(ids) // self.length * self.length
        return {"input_ids": ids[:size].reshape(-1, self.length), "labels": labels[:size].reshape(-1, self.length)}
