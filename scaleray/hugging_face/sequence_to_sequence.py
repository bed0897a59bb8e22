"""Ready-made workload for models that map a text to another text, such as T5 and BART."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from scaleray.common.installed import library
from scaleray.data import ArraySource, Ragged
from scaleray.errors import ConfigError, DataError, WorkloadError
from scaleray.hugging_face import pretrained_models, text_files
from scaleray.hugging_face.base_workload import LABELS
from scaleray.hugging_face.language_models import LabelledTexts
from scaleray.hugging_face.token_rows import IGNORED

GENERATED = "is_generated"
"""Column that is 1 in rows for which evaluations generate answers."""
ROUGE = ("rouge1", "rouge2", "rougeL")
"""Types of ROUGE that do not need a library for splitting sentences."""


class SequenceToSequence(LabelledTexts):
    """Map a text to another text.

    source, target: columns of the two texts. prefix: text before every source, as T5 uses for its tasks.
    sequence_length, target_length: maximum tokens of a source and of a target. generated_rows: number of rows of each
    evaluated split, evenly spaced, for which every evaluation generates an answer; 0: none. num_beams: for generation.
    rouge: whether to measure answers by ROUGE in addition to exact match."""

    auto_class = "AutoModelForSeq2SeqLM"

    def __init__(
        self,
        model: Any,
        *,
        source: str = "source",
        target: str = "target",
        prefix: str = "",
        target_length: int = 64,
        generated_rows: int = 256,
        num_beams: int = 1,
        rouge: bool = False,
        **more: Any,
    ) -> None:
        super().__init__(model, text=source, **more)
        for name, value, least in (("target_length", target_length, 2), ("generated_rows", generated_rows, 0),
                                   ("num_beams", num_beams, 1)):  # fmt: skip
            if value < least:
                raise ConfigError(f"workload.args.{name}", value, f"it must be at least {least}")
        self.target, self.prefix, self.target_length = target, prefix, target_length
        self.generated_rows, self.num_beams, self.rouge = generated_rows, num_beams, rouge
        if rouge:
            library("torchmetrics", extra="metrics", wanted_by="the argument rouge")
        if not generated_rows:
            self.evaluate = None  # type: ignore[assignment, method-assign]

    def config_changes(self) -> dict[str, Any]:
        changes = super().config_changes()
        there = pretrained_models.read_config(self.model, changes)
        if not there.is_encoder_decoder:
            raise WorkloadError.problem(
                "workload.args.model", f"is a {there.model_type}, which has no encoder and decoder, as t5 and bart have"
            )
        if changes and "decoder_start_token_id" not in self.model:
            changes["decoder_start_token_id"] = self.pad
        return changes

    def inputs(self, batch: Any) -> dict[str, torch.Tensor]:
        return {name: column for name, column in super().inputs(batch).items() if name != GENERATED}

    def predictions(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        labels = self.labels(batch)
        shifted = model.prepare_decoder_input_ids_from_labels(labels)  # type: ignore[operator]
        return model(**self.inputs(batch), decoder_input_ids=shifted).logits, labels

    def evaluate(
        self, model: nn.Module, batches: Iterable[Any], *, split: str, rank: int, world_size: int
    ) -> Mapping[str, Any]:
        """Share of generated answers that equal the target, and their ROUGE scores."""
        sums = {"exact_match": 0.0, **(dict.fromkeys(ROUGE, 0.0) if self.rouge else {})}
        count = 0
        for batch in batches:
            is_chosen = batch[GENERATED] > 0
            rows = {name: column[is_chosen] for name, column in batch.items()}
            if not len(rows[GENERATED]):
                continue
            targets = self.tokenizer.batch_decode([row[row != IGNORED] for row in rows[LABELS]], **PLAIN)
            for answer, target in zip(self.predict(model, rows)["text"], targets, strict=True):
                count += 1
                sums["exact_match"] += answer.strip() == target.strip()
                if self.rouge:
                    for name, value in _rouge(answer, target).items():
                        sums[name] += value
        return {name: (total, count) for name, total in sums.items()}

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        """Generated text of each row."""
        ids = model.generate(  # type: ignore[operator]
            **self.inputs(batch), max_new_tokens=self.target_length, num_beams=self.num_beams, do_sample=False,
            use_cache=True,
        )  # fmt: skip
        return {"text": self.tokenizer.batch_decode(ids, **PLAIN)}

    def _rows(self, what: str, records: list[text_files.Record]) -> ArraySource:
        sources = [self.prefix + text for text in text_files.texts(records, self.text, what=what)]
        columns, _ = self.tokenized(sources)
        if what in self.data or all(record.get(self.target) is not None for record in records):
            columns[LABELS] = self._targets(text_files.texts(records, self.target, what=what), what)
        chosen = np.zeros(len(records), np.int8)
        if self.generated_rows:
            chosen[np.linspace(0, len(records) - 1, min(self.generated_rows, len(records))).astype(int)] = 1
        return ArraySource({**columns, GENERATED: chosen})

    def _targets(self, texts: list[str], what: str) -> Ragged:
        """Tokens of the targets, each ending with the end-of-text token."""
        tokenizer, end = self.tokenizer, self.tokenizer.eos_token_id
        if end is None:
            raise WorkloadError.problem(
                "workload.args.tokenizer",
                "has no eos_token, with which every answer must end",
                'write "eos_token": "</s>" into its tokenizer_config.json, or use another tokenizer',
            )
        found = tokenizer(text_target=texts, truncation=True, max_length=self.target_length)["input_ids"]
        if not all(found):
            raise DataError.problem("a target", f"of the {what} data is empty", "remove such records")
        ended = [ids if ids[-1] == end else [*ids[: self.target_length - 1], end] for ids in found]
        return Ragged.of([np.array(ids, np.int32) for ids in ended])


PLAIN = {"skip_special_tokens": True}


def _rouge(answer: str, target: str) -> dict[str, float]:
    """F-measures of ROUGE-1, -2 and -L of one answer."""
    from torchmetrics.functional.text.rouge import rouge_score

    found = rouge_score([answer], [target], rouge_keys=ROUGE)
    return {name: float(found[f"{name}_fmeasure"]) for name in ROUGE}
