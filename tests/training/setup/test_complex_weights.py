"""Complex weights, as Fourier layers have them: compared, averaged and converted with both of their parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from small_runs import NUM_CLASSES, NUM_FEATURES, Classify, train, train_alone
from torch import nn

from scaleray.training.setup.rank_context import RankContext
from scaleray.verification.traces.signatures import Signer


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(NUM_FEATURES // 2 + 1, 5, dtype=torch.cfloat))
        self.register_buffer("turn", torch.full((5,), 0.5 + 0.5j))
        self.head = nn.Linear(5, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((torch.fft.rfft(x) @ self.weight * self.turn).imag)


class Fourier(Classify):
    def build_model(self) -> nn.Module:
        return Spectral()


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_two_workers_train_complex_weights_in_float64_as_one_does(gloo, strategy):
    alone = train_alone(Fourier(), {"averaging.decay": 0.5})
    weights = gloo.run(2, weights_in_pool, {"strategy.name": strategy, "averaging.decay": 0.5})[0]
    assert weights["weight"].dtype == alone.weights["weight"].dtype == torch.complex128
    assert all(torch.allclose(weights[name], value, rtol=1e-12, atol=1e-13) for name, value in alone.weights.items())
    assert not torch.equal(alone.weights["weight"], alone.trained["weight"]), (
        "the average is one of complex weights too"
    )


def weights_in_pool(place: RankContext, flags: dict[str, Any]) -> dict[str, torch.Tensor]:
    return train(place, Fourier(), flags).weights


def test_replicas_that_train_apart_average_both_parts(gloo):
    flags = {"strategy.name": "local_sgd", "local_sgd.sync_every": 3, "optimizer.momentum": 0.9}
    first, second = gloo.run(2, last_weights_in_pool, flags)
    assert torch.equal(first.imag, second.imag) and torch.equal(first.real, second.real)


def last_weights_in_pool(place: RankContext, flags: dict[str, Any]) -> torch.Tensor:
    model: dict[str, nn.Module] = {}

    class Shown(Fourier):
        def build_model(self) -> nn.Module:
            return model.setdefault("made", super().build_model())

    train(place, Shown(), {**flags, "stop.after": "3 steps"})
    return model["made"].weight.detach()


def test_a_signature_shows_a_difference_of_the_imaginary_part():
    one = torch.full((3,), 1 + 2j)
    other = torch.full((3,), 1 + 3j)
    signer = Signer()
    assert np.allclose(signer("w", one)[0], one.abs().square().sum().sqrt())
    assert not np.allclose(signer("w", one), signer("w", other))
