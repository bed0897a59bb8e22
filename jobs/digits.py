"""Scikit-learn's handwritten digits with a small convolutional network: a job that finishes in seconds.

Real data that ships inside an ordinary package: 1797 images of 8 x 8 pixels in ten classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from scaleray import Workload


class Digits(Workload):
    """Classify digits; must reach 97 % test accuracy.

    width: channels of the first convolution. test_share: share of the images held out, chosen by a hash of the pixels.
    class_weights: weight of each of the ten classes in the training loss, which is divided by the weights of its rows.
    label_softness: share of each label that is spread over all classes.
    """

    def __init__(
        self,
        width: int = 32,
        test_share: float = 0.2,
        class_weights: Sequence[float] | None = None,
        label_softness: float = 0.0,
    ) -> None:
        if class_weights is not None and (len(class_weights) != 10 or min(class_weights) < 0):
            raise ValueError(f"class_weights must be ten numbers of at least 0, not {class_weights}")
        if not 0 <= label_softness < 1:
            raise ValueError(f"label_softness must be at least 0 and below 1, not {label_softness}")
        self.width, self.test_share = width, test_share
        self.class_weights, self.label_softness = class_weights, label_softness

    def build_model(self) -> nn.Module:
        # GroupNorm rather than BatchNorm: its result does not depend on how a batch is shared among workers
        return nn.Sequential(
            nn.Conv2d(1, self.width, 3, padding=1),
            nn.GroupNorm(4, self.width),
            nn.ReLU(),
            nn.Conv2d(self.width, 2 * self.width, 3, padding=1),
            nn.GroupNorm(4, 2 * self.width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(2 * self.width, 2 * self.width, 3, padding=1),
            nn.GroupNorm(4, 2 * self.width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * self.width, 10),
        )

    def datasets(self) -> dict[str, dict[str, np.ndarray]]:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        pixels = (images / 16.0).astype(np.float32).reshape(-1, 1, 8, 8)
        # by content, so that the split does not change when rows are added or reordered
        held_out = np.array(
            [hashlib.sha256(row.tobytes()).digest()[0] < 256 * self.test_share for row in images.astype(np.uint8)]
        )
        return {
            "train": {"image": pixels[~held_out], "label": labels[~held_out]},
            "test": {"image": pixels[held_out], "label": labels[held_out]},
        }

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | int]:
        logits, labels = model(batch["image"]), batch["label"]
        if self.class_weights is None and self.label_softness == 0:
            return F.cross_entropy(logits, labels, reduction="sum"), len(labels)
        soft = F.one_hot(labels, 10).to(logits.dtype) * (1 - self.label_softness) + self.label_softness / 10
        losses = F.cross_entropy(logits, soft, reduction="none")
        weights = torch.tensor(self.class_weights or [1.0] * 10, dtype=losses.dtype, device=losses.device)[labels]
        return (losses * weights).sum(), weights.sum()

    def metrics(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, int]]:
        logits, labels = model(batch["image"]), batch["label"]
        loss = F.cross_entropy(logits, labels, reduction="sum")
        return {"loss": (loss, len(labels)), "accuracy": ((logits.argmax(dim=1) == labels).sum(), len(labels))}
