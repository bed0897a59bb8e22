"""Ready-made workloads for classifying texts and images."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from scaleray.data import TRAIN, ArraySource
from scaleray.errors import WorkloadError
from scaleray.hugging_face import pretrained_models, text_files
from scaleray.hugging_face.base_workload import LABELS, HuggingFaceWorkload
from scaleray.hugging_face.classifier_losses import ONE_CLASS, LabelKind, OneClass, check_name, in_order_of, label_kind
from scaleray.hugging_face.language_models import LabelledTexts
from scaleray.images.classifier import dtype_of
from scaleray.images.image_data import PIXELS, ImageData
from scaleray.images.image_folder import ImageFiles, ImageFolder


class _Classifier(HuggingFaceWorkload):
    """Loss and metrics of a classifier, by the type of its labels."""

    @property
    def kind(self) -> LabelKind:
        raise NotImplementedError

    def labels(self, batch: Any) -> torch.Tensor:
        labels: torch.Tensor = batch[LABELS]
        return labels

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
        return self.kind.loss(*self.predictions(model, batch))

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        return self.kind.metrics(*self.predictions(model, batch))


class SequenceClassification(_Classifier, LabelledTexts):
    """Classify texts, or pairs of texts, or predict numbers for them.

    label: column of the label. pair: column of a second text. labels: class names in the order of the model's logits;
    None for the names in the training data, in the order of the model's id2label, of their ClassLabel, or else sorted.
    problem_type: as in transformers: `single_label_classification`, `multi_label_classification` (a label is a list of
    classes) or `regression` (a number or a list of them); None for the one in the model's config, or else a single
    label.
    """

    auto_class = "AutoModelForSequenceClassification"

    def __init__(
        self,
        model: Any,
        *,
        label: str = "label",
        pair: str | None = None,
        labels: Sequence[Any] | None = None,
        problem_type: str | None = None,
        **more: Any,
    ) -> None:
        super().__init__(model, **more)
        self.label, self.pair, self.stated_labels, self.problem_type = label, pair, labels, problem_type
        if problem_type is not None:
            check_name(problem_type)
        self._kind: LabelKind | None = None

    @property
    def kind(self) -> LabelKind:
        """Type of the labels of the training data."""
        if self._kind is None:
            found = text_files.column(self.records()[TRAIN], self.label, what=TRAIN)
            own = getattr(pretrained_models.read_config(self.model, {}), "problem_type", None)
            name = self.problem_type or own or ONE_CLASS
            order = partial(self.in_order, column=self.label)
            self._kind = label_kind(name, found, self.stated_labels, order=order)
        return self._kind

    @property
    def pad(self) -> int:
        """Padding token, by which some models find the end of a text. Raises WorkloadError if there is none."""
        tokenizer = self.tokenizer
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        if tokenizer.pad_token_id is None:
            raise WorkloadError.problem(
                "workload.args.tokenizer",
                "has neither a padding token nor an end-of-text token, one of which is needed to pad rows",
                'write "pad_token": "<pad>" into its tokenizer_config.json, or use another tokenizer',
            )
        return int(tokenizer.pad_token_id)

    def config_changes(self) -> dict[str, Any]:
        changes = {**super().config_changes(), **self.kind.config_changes()}
        if getattr(pretrained_models.read_config(self.model, {}), "pad_token_id", None) is None:
            changes["pad_token_id"] = self.pad
        return changes

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        """Most likely class of each row, its name and its probability, or the classes of each row with probabilities,
        or its numbers."""
        return self.kind.answers(model(**self.inputs(batch)).logits)

    def _rows(self, what: str, records: list[text_files.Record]) -> ArraySource:
        texts = [text_files.texts(records, name, what=what) for name in (self.text, self.pair) if name is not None]
        columns, _ = self.tokenized(*texts)
        if what in self.data or all(record.get(self.label) is not None for record in records):
            columns[LABELS] = self.kind.column(text_files.column(records, self.label, what=what), what=what)
        return ArraySource(columns)


class ImageClassification(_Classifier):
    """Classify images in folders with a vision model, with one folder per class.

    Classes are in the order of the model's id2label, if it has them. Size and channels come from the config; mean and
    standard deviation from preprocessor_config.json, if the model's folder has one. All other arguments are those of
    `scaleray.images.ImageData`."""

    auto_class = "AutoModelForImageClassification"
    collate = None  # type: ignore[assignment]  # images have one size

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
        config = pretrained_models.read_config(self.model, {})
        size = getattr(config, "image_size", 224)
        own = {
            "size": size if isinstance(size, int) else max(size),
            "channels": getattr(config, "num_channels", 3),
            **pretrained_models.image_statistics(self.folder),
        }
        order = partial(in_order_of, config, is_trained=self.folder is not None, argument="classes")
        self.images = ImageData(data, **{**own, **images}, order=order)

    @property
    def kind(self) -> LabelKind:
        return OneClass(self.images.classes)

    def config_changes(self) -> dict[str, Any]:
        return self.kind.config_changes()

    def datasets(self) -> dict[str, ImageFolder]:
        return self.images.datasets()

    def read_data(self, path: str) -> ImageFiles | None:
        return self.images.at(path)

    def transform(self, rows: dict[str, Any], rng: Any, split: str) -> dict[str, Any]:  # type: ignore[override]
        return self.images.transform(rows, rng, split)

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        """Most likely class of each row, its name, and its probability."""
        return self.kind.answers(self._logits(model, batch))

    def predictions(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self._logits(model, batch), self.labels(batch)

    def _logits(self, model: nn.Module, batch: Any) -> torch.Tensor:
        logits: torch.Tensor = model(pixel_values=self.images.pixels(batch[PIXELS], dtype_of(model))).logits
        return logits
