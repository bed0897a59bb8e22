"""Workloads that use their model otherwise than by calling it: its methods, its parts, its weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from small_runs import NUM_CLASSES, NUM_FEATURES, Classify
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(NUM_FEATURES, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


class Net(nn.Module):
    """A model in the style of Lightning: it knows its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)

    def training_step(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self(batch["x"]), batch["y"], reduction="sum")


class ByCall(Classify):
    """What all others must equal, but those with a penalty."""

    def build_model(self) -> nn.Module:
        return Net()

    def blocks(self, model: Any) -> Any:
        return model.encoder.blocks

    def tensor_plan(self, model: nn.Module, *, size: int, sequence_parallel: bool) -> Any:
        return dict.fromkeys(
            ["encoder.stem", "encoder.blocks.*.0", "head"], ColwiseParallel(output_layouts=Replicate())
        )

    def logits(self, model: Any, batch: Any) -> torch.Tensor:
        return model(batch["x"])

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(self.logits(model, batch), batch["y"], reduction="sum"), len(batch["y"])

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {"accuracy": ((self.logits(model, batch).argmax(dim=1) == batch["y"]).sum(), len(batch["y"]))}


class ByTrainingStep(ByCall):
    def loss(self, model: Any, batch: Any) -> Any:
        assert isinstance(model, Net)
        return model.training_step(batch), len(batch["y"])


class ByMethod(ByCall):
    """A method that is not `forward`, then a part of the model that is called without it."""

    def logits(self, model: Any, batch: Any) -> torch.Tensor:
        return model.head(model.encode(batch["x"]))


class ByParts(ByCall):
    """The model itself is never called."""

    def logits(self, model: Any, batch: Any) -> torch.Tensor:
        return model.head(model.encoder(batch["x"]))


class ByWeight(ByCall):
    """A weight is read where it is not used by its own layer."""

    def logits(self, model: Any, batch: Any) -> torch.Tensor:
        return F.linear(model.encode(batch["x"]), model.head.weight, model.head.bias)


class Twice(ByCall):
    """Two passes before one backward pass."""

    def logits(self, model: Any, batch: Any) -> torch.Tensor:
        return 0.5 * (model(batch["x"]) + model(2 * batch["x"]))


class PenaltyOfHead(ByCall):
    def loss(self, model: Any, batch: Any) -> Any:
        total, count = super().loss(model, batch)
        return total + 0.1 * count * model.head.weight.square().sum(), count


class PenaltyOfAll(ByCall):
    def loss(self, model: Any, batch: Any) -> Any:
        total, count = super().loss(model, batch)
        return total + 0.1 * count * sum(p.square().sum() for p in model.parameters()), count


class GradientPenalty(ByCall):
    """The norm of the loss's gradient with respect to the inputs, as in adversarial training."""

    def loss(self, model: Any, batch: Any) -> Any:
        x = batch["x"].detach().requires_grad_()
        total, count = super().loss(model, {**batch, "x": x})
        (slope,) = torch.autograd.grad(total, x, create_graph=True)
        return total + slope.square().sum(), count


class Adversarial(ByCall):
    """Trains on inputs that were moved along the loss's gradient, which is itself not differentiated."""

    def loss(self, model: Any, batch: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().loss(model, batch)
        x = batch["x"].detach().requires_grad_()
        (slope,) = torch.autograd.grad(super().loss(model, {**batch, "x": x})[0], x)
        return super().loss(model, {**batch, "x": (x + 0.1 * slope.sign()).detach()})


class OnlyInTraining(ByCall):
    """A loss that evaluation mode does not have, as detection networks' is; evaluations get one from `metrics`."""

    def loss(self, model: Any, batch: Any) -> Any:
        if not model.training:
            raise RuntimeError("targets are for training")
        return super().loss(model, batch)

    def metrics(self, model: Any, batch: Any) -> Any:
        return {"loss": super().loss(model, batch)}
