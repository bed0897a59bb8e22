"""A training whose computing is a timed sleep and whose gradients, collectives and input are real: see scaleray.emulation.

Many workers on a few cores behave like a cluster, so that ladders, strategies and reports can be rehearsed on a laptop.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from scaleray import Workload
from scaleray.emulation import EmulatedLayer, Timing

NUM_CLASSES = 10


class Emulated(Workload):
    """A stack of layers that sleep, over made-up rows.

    forward_ms_per_sample: of the whole stack; a backward pass takes twice as long. overhead_ms: of a forward pass of the stack
    whatever its number of samples. parameters: of the whole stack, which decide how much there is to communicate. jitter: up
    to how much a pass may be slower or faster, as a share.
    """

    def __init__(
        self,
        forward_ms_per_sample: float = 1.0,
        overhead_ms: float = 2.0,
        num_layers: int = 4,
        width: int = 64,
        parameters: int = 65_536,
        jitter: float = 0.1,
        num_rows: int = 4096,
    ) -> None:
        self.num_layers, self.width, self.parameters, self.num_rows = num_layers, width, parameters, num_rows
        self.timing = Timing(
            forward_s=overhead_ms / 1e3 / num_layers,
            forward_s_per_sample=forward_ms_per_sample / 1e3 / num_layers,
            jitter=jitter,
        )

    def build_model(self) -> nn.Module:
        each = self.parameters // self.num_layers
        layers = [
            EmulatedLayer(self.width, self.timing, num_parameters=each, index=number)
            for number in range(self.num_layers)
        ]
        return nn.Sequential(*layers, nn.Linear(self.width, NUM_CLASSES))

    def datasets(self) -> dict[str, dict[str, np.ndarray]]:
        draw = np.random.default_rng(0)
        x = draw.normal(size=(self.num_rows, self.width)).astype(np.float32)
        return {"train": {"x": x, "y": x[:, :NUM_CLASSES].argmax(axis=1)}}

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])
