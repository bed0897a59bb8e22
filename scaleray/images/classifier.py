"""Ready-made workload for image classification, configured in YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from scaleray.common.model_blocks import find_blocks
from scaleray.images import vision_models
from scaleray.images.image_data import PIXELS, ImageData
from scaleray.images.image_folder import LABELS, ImageFiles, ImageFolder
from scaleray.workload import Workload


class ImageClassification(Workload):
    """Classify images in folders, with one folder per class.

    model: `torchvision:NAME` or `timm:NAME`; may be omitted in a subclass with its own `build_model`. weights: a local
    file to start from. options: more arguments of the model's function. All other arguments are those of `ImageData`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        data: Mapping[str, str],
        weights: str | None = None,
        options: Mapping[str, Any] | None = None,
        **images: Any,
    ) -> None:
        self.model, self.options = model, dict(options or {})
        self.weights = None if weights is None else str(Path(weights).expanduser().absolute())
        self.images = ImageData(data, **images)

    def build_model(self) -> nn.Module:
        return vision_models.build(
            str(self.model), num_classes=len(self.images.classes), options=self.options, weights=self.weights
        )

    def datasets(self) -> dict[str, ImageFolder]:
        return self.images.datasets()

    def read_data(self, path: str) -> ImageFiles | None:
        return self.images.at(path)

    def transform(self, rows: dict[str, Any], rng: Any, split: str) -> dict[str, Any]:  # type: ignore[override]
        return self.images.transform(rows, rng, split)

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        return F.cross_entropy(self.logits(model, batch), batch[LABELS], reduction="sum"), len(batch[LABELS])

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        logits, labels = self.logits(model, batch), batch[LABELS]
        loss = F.cross_entropy(logits, labels, reduction="sum")
        return {"loss": (loss, len(labels)), "accuracy": ((logits.argmax(dim=1) == labels).sum(), len(labels))}

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        """Most likely class of each row, its name, and its probability."""
        return class_answers(self.logits(model, batch), self.images.classes)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return find_blocks(model)

    def logits(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Output of the model for a batch, at least float32."""
        found: torch.Tensor = model(self.images.pixels(batch[PIXELS], dtype_of(model)))
        return found.to(torch.promote_types(found.dtype, torch.float32))


def class_answers(logits: torch.Tensor, names: Sequence[str]) -> dict[str, Any]:
    """Most likely class of each row, its name, and its probability."""
    probability, label = logits.float().softmax(dim=-1).max(dim=-1)
    return {"label": label, "class": [names[number] for number in label.tolist()], "probability": probability}


def dtype_of(model: nn.Module) -> torch.dtype:
    """dtype of a model's parameters."""
    return next(p.dtype for p in model.parameters() if p.is_floating_point())
