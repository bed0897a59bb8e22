"""Ready workloads that sort texts and images into classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from scaleray.data import TRAIN, ArraySource
from scaleray.errors import DataError
from scaleray.hugging_face import models, text_files
from scaleray.hugging_face.language_models import TextWorkload
from scaleray.hugging_face.workload import HuggingFaceWorkload
from scaleray.images.data import PIXELS, ImageData
from scaleray.images.folder import ImageFolder
from scaleray.images.workload import dtype_of


class SequenceClassification(TextWorkload):
    """Sort texts, or pairs of texts, into classes.

    label: column of the class, a name or a number. pair: column of a second text. labels: names of the classes in the
    order of the model's logits; None takes those of the training data, sorted.
    """

    auto_class = "AutoModelForSequenceClassification"

    def __init__(
        self,
        model: Any,
        *,
        label: str = "label",
        pair: str | None = None,
        labels: Sequence[Any] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(model, **more)
        self.label, self.pair = label, pair
        self.classes = None if labels is None else [str(name) for name in labels]

    def config_changes(self) -> dict[str, Any]:
        if self.classes is None:
            records = self.records()[TRAIN]
            self.classes = class_names(text_files.column(records, self.label, what=TRAIN))
        return {**super().config_changes(), **named_classes(self.classes)}

    def datasets(self) -> dict[str, ArraySource]:
        self.check_length()
        return {name: self._rows(name, records) for name, records in self.records().items()}

    def predict(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """The most likely class of each row and its probability."""
        probability, label = model(**self.inputs(batch)).logits.float().softmax(dim=-1).max(dim=-1)
        return {"label": label, "probability": probability}

    def _rows(self, what: str, records: list[text_files.Record]) -> ArraySource:
        texts = [text_files.texts(records, name, what=what) for name in (self.text, self.pair) if name is not None]
        found = self.tokenizer(
            *texts, truncation=True, padding="max_length", max_length=self.sequence_length, return_tensors="np"
        )
        columns = {name: values.astype(np.int32) for name, values in found.items()}
        assert self.classes is not None
        columns["labels"] = numbers_of(text_files.column(records, self.label, what=what), self.classes, what=what)
        return ArraySource(columns)


def class_names(found: Sequence[Any]) -> list[str]:
    """Names of the classes that occur, numbers in their order and other names in that of letters."""
    different = set(found)
    return [str(name) for name in sorted(different, key=lambda v: (isinstance(v, str), v))]


def named_classes(names: Sequence[str]) -> dict[str, Any]:
    """What a config says of the classes of a model."""
    return {
        "num_labels": len(names),
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
    }


def numbers_of(found: Sequence[Any], names: Sequence[str], *, what: str) -> np.ndarray:
    """The number of each row's class. Raises DataError for a class that is not among the names."""
    numbers: Mapping[str, int] = {name: number for number, name in enumerate(names)}
    unknown = next((value for value in found if str(value) not in numbers), None)
    if unknown is not None:
        raise DataError(
            f"a label of the {what} data",
            unknown,
            f"the classes are {', '.join(names[:12])}",
            "see workload.args.labels",
        )
    return np.array([numbers[str(value)] for value in found], np.int64)


class ImageClassification(HuggingFaceWorkload):
    """Sort the images of folders into classes with a vision model, a folder for each class.

    Size and channels are the config's; mean and deviation those of preprocessor_config.json, where the model's folder
    has one. Every other argument is one of `scaleray.images.ImageData`.
    """

    auto_class = "AutoModelForImageClassification"

    def __init__(
        self,
        model: Any,
        *,
        data: Mapping[str, str],
        attention: str | None = None,
        peft: Mapping[str, Any] | None = None,
        **images: Any,
    ) -> None:
        super().__init__(model, attention=attention, peft=peft)
        config = models.read_config(self.model, {})
        size = getattr(config, "image_size", 224)
        own = {
            "size": size if isinstance(size, int) else max(size),
            "channels": getattr(config, "num_channels", 3),
            **models.image_statistics(self.folder),
        }
        self.images = ImageData(data, **{**own, **images})

    def config_changes(self) -> dict[str, Any]:
        return named_classes(self.images.classes)

    def datasets(self) -> dict[str, ImageFolder]:
        return self.images.datasets()

    def transform(self, rows: dict[str, Any], rng: Any, split: str) -> dict[str, Any]:  # type: ignore[override]
        return self.images.transform(rows, rng, split)

    def predict(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """The most likely class of each row and its probability."""
        probability, label = self._logits(model, batch).float().softmax(dim=-1).max(dim=-1)
        return {"label": label, "probability": probability}

    def predictions(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self._logits(model, batch), self.labels(batch)

    def _logits(self, model: nn.Module, batch: Any) -> torch.Tensor:
        logits: torch.Tensor = model(pixel_values=self.images.pixels(batch[PIXELS], dtype_of(model))).logits
        return logits
