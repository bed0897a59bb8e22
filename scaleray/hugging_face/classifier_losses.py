"""Types of labels: one of several classes, any number of classes, or numbers. These are the three losses of
transformers' `problem_type`.

Each type provides the entries for the model's config, converts the labels of records to a column, and computes loss,
metrics and predictions from logits. Losses are sums over the rows; a row with several values counts with their mean."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from scaleray.data import TRAIN
from scaleray.errors import ConfigError, DataError
from scaleray.images.classifier import class_answers

ONE_CLASS, SEVERAL_CLASSES, NUMBERS = "single_label_classification", "multi_label_classification", "regression"
KINDS = (ONE_CLASS, SEVERAL_CLASSES, NUMBERS)
CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "ForImageClassification")
"""Suffixes of the names of transformers' classes with classification heads."""
LIKELY = 0.5  # probability above which a class is predicted, if a row may have several

Pair = tuple[torch.Tensor, Any]


class LabelKind(Protocol):
    """One type of labels."""

    def config_changes(self) -> dict[str, Any]:
        """Labels in the model's config."""

    def column(self, found: Sequence[Any], *, what: str) -> np.ndarray:
        """Convert the labels to a column with one row each. Raises DataError for invalid labels. what: name of the
        split."""

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> Pair:
        """Return the sum of the rows' losses and the number of rows."""

    def metrics(self, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, Pair]:
        """Sums and counts by name."""

    def answers(self, logits: torch.Tensor) -> dict[str, Any]:
        """Prediction for each row, by name."""


def label_kind(
    name: str, found: Sequence[Any], classes: Sequence[Any] | None, *, order: Callable[[list[str]], list[str]]
) -> LabelKind:
    """Return the label type with this name. found: labels of the training data. classes: names of classes in order;
    None: the names that occur, sorted. Raises ConfigError and DataError."""
    check_name(name)
    if name == NUMBERS:
        if classes is not None:
            raise ConfigError("workload.args.labels", list(classes), "a regression has no classes")
        return Numbers(len(_numbers(found[0], 0, TRAIN)))
    if name == SEVERAL_CLASSES:
        occurring = [(row, value) for row, values in enumerate(found) for value in _several(values, row, TRAIN)]
        return SeveralClasses(order(class_names(occurring)) if classes is None else classes)
    if classes is None:
        _refuse_other_kinds(found)
    return OneClass(order(class_names(enumerate(found))) if classes is None else classes)


def check_name(name: str) -> None:
    """Raise ConfigError for a name that transformers does not support."""
    if name not in KINDS:
        raise ConfigError("workload.args.problem_type", name, f"it must be one of {', '.join(KINDS)}")


class OneClass:
    """Each row has one class."""

    def __init__(self, names: Sequence[Any]) -> None:
        self.names = [str(name) for name in names]

    def config_changes(self) -> dict[str, Any]:
        return named_classes(self.names)

    def column(self, found: Sequence[Any], *, what: str) -> np.ndarray:
        numbers = {name: number for number, name in enumerate(self.names)}
        return np.array([_number_of(value, numbers, what) for value in found], np.int64)

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> Pair:
        return F.cross_entropy(_wide(logits), labels.long(), reduction="sum"), len(labels)

    def metrics(self, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, Pair]:
        is_right = logits.argmax(dim=-1) == labels
        return {"loss": self.loss(logits, labels), "accuracy": (is_right.sum(), len(labels))}

    def answers(self, logits: torch.Tensor) -> dict[str, Any]:
        return class_answers(logits, self.names)


class SeveralClasses:
    """Each row has any number of classes."""

    def __init__(self, names: Sequence[Any]) -> None:
        self.names = [str(name) for name in names]

    def config_changes(self) -> dict[str, Any]:
        return {"problem_type": SEVERAL_CLASSES, **named_classes(self.names)}

    def column(self, found: Sequence[Any], *, what: str) -> np.ndarray:
        numbers = {name: number for number, name in enumerate(self.names)}
        column = np.zeros((len(found), len(self.names)), np.float32)
        for row, values in enumerate(found):
            for value in _several(values, row, what):
                column[row, _number_of(value, numbers, what)] = 1
        return column

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> Pair:
        wide = _wide(logits)
        total = F.binary_cross_entropy_with_logits(wide, labels.to(wide.dtype), reduction="sum")
        return total / len(self.names), len(labels)

    def metrics(self, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, Pair]:
        is_right = (logits > 0) == (labels > 0)
        return {
            "loss": self.loss(logits, labels),
            "accuracy": (is_right.all(dim=-1).sum(), len(labels)),  # of whole rows, as in scikit-learn
            "label_accuracy": (is_right.sum(), is_right.numel()),
        }

    def answers(self, logits: torch.Tensor) -> dict[str, Any]:
        probability = logits.float().sigmoid()
        return {"labels": (probability > LIKELY).long(), "probability": probability}


class Numbers:
    """Each row has one or more numbers."""

    def __init__(self, size: int) -> None:
        self.size = size

    def config_changes(self) -> dict[str, Any]:
        return {"problem_type": NUMBERS, "num_labels": self.size}

    def column(self, found: Sequence[Any], *, what: str) -> np.ndarray:
        rows = [_numbers(value, row, what) for row, value in enumerate(found)]
        wrong = next((row for row, values in enumerate(rows) if len(values) != self.size), None)
        if wrong is not None:
            raise DataError(
                f"the label of record {wrong} of the {what} data", found[wrong], f"it must have {self.size} numbers"
            )
        return np.array(rows, np.float32)

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> Pair:
        wide = _wide(logits)
        return F.mse_loss(wide, labels.to(wide.dtype), reduction="sum") / self.size, len(labels)

    def metrics(self, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, Pair]:
        distance = (_wide(logits) - labels).abs().sum() / self.size
        return {"loss": self.loss(logits, labels), "mean_absolute_error": (distance, len(labels))}

    def answers(self, logits: torch.Tensor) -> dict[str, Any]:
        return {"value": logits[:, 0] if self.size == 1 else logits}


def class_names(found: Iterable[tuple[int, Any]]) -> list[str]:
    """Names of the classes that occur, numbers in numerical and other names in alphabetical order. found: labels, each
    with the number of its record. Raises DataError for an empty name, or for two names that look alike."""
    first: dict[Any, int] = {}
    for record, value in found:
        first.setdefault(value, record)
    by_text: dict[str, Any] = {}
    for value, record in first.items():
        text = str(value).strip()
        other = by_text.setdefault(text, value)
        if not text or other is not value:
            allowed = "a class needs a name"
            if text:
                allowed = f"the label of record {first[other]} is {other!r}, and the two would be separate classes"
            what = f"the label of record {record} of the {TRAIN} data"
            raise DataError.problem(what, f"is {value!r}: {allowed}", "correct the file, or remove the row")
    return [str(name) for name in sorted(first, key=lambda v: (isinstance(v, str), v))]


def in_order_of(config: Any, names: list[str], *, is_trained: bool, argument: str) -> list[str]:
    """Names of the classes in the order of the model's `id2label`, if it has them; otherwise unchanged.

    is_trained: whether the model has weights. argument: the workload argument that sets the order. Raises DataError for
    a trained classifier with the same number of classes but other names, which cannot be matched."""
    own = [str(name) for _, name in sorted(config.id2label.items())]
    if set(names) <= set(own):
        return own
    is_classifier = is_trained and any(name.endswith(CLASSIFIERS) for name in config.architectures or ())
    if not is_classifier:
        return names
    if all(name.isdecimal() and int(name) < len(own) for name in names):
        return [str(number) for number in range(len(own))]
    if len(names) != len(own):
        return names  # its head does not fit these classes
    raise DataError(
        f"the classes of the {TRAIN} data",
        ", ".join(names[:12]),
        f"the model was trained for {', '.join(own[:12])}",
        f"workload.args.{argument} sets your names in the order of the model's",
    )


def named_classes(names: Sequence[str]) -> dict[str, Any]:
    """Class names in a model's config."""
    return {
        "num_labels": len(names),
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
    }


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _number_of(value: Any, numbers: Mapping[str, int], what: str) -> int:
    if str(value) not in numbers:
        known = ", ".join(list(numbers)[:12])
        raise DataError(f"a label of the {what} data", value, f"the classes are {known}", "see workload.args.labels")
    return numbers[str(value)]


def _several(value: Any, row: int, what: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise DataError(f"the label of record {row} of the {what} data", value, "it must be a list of classes")
    return list(value)


def _numbers(value: Any, row: int, what: str) -> list[float]:
    """Numbers of a label; text is also parsed, as CSV has nothing else."""
    try:
        numbers = [float(v) for v in (value if isinstance(value, (list, tuple)) else [value])]
    except (TypeError, ValueError):
        numbers = [np.nan]
    if not numbers or not np.isfinite(numbers).all():
        raise DataError(
            f"the label of record {row} of the {what} data", value, "it must be a finite number, or several"
        )
    return numbers


def _refuse_other_kinds(found: Sequence[Any]) -> None:
    """Raise DataError for labels that do not look like one class per row."""
    for row, value in enumerate(found):
        if isinstance(value, (list, tuple)):
            kind, is_other = SEVERAL_CLASSES, True
        else:
            kind, is_other = NUMBERS, isinstance(value, float) and not value.is_integer()
        if is_other:
            raise DataError(
                f"the label of record {row} of the {TRAIN} data",
                value,
                "each row needs one class",
                f"workload.args.problem_type: {kind}, or list the classes in workload.args.labels",
            )
