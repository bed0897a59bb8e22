"""Sparse gradients, as of nn.Embedding(sparse=True): their norm is that of dense ones, so that clipping is too."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_runs import largest_difference, train_alone
from torch import nn
from torch.nn.functional import cross_entropy

from scaleray import Workload
from scaleray.errors import ConfigError
from scaleray.training.health.live_memory import LiveTensors, storage_bytes
from scaleray.verification.traces.signatures import Signer


class Words(Workload):
    def __init__(self, *, sparse: bool) -> None:
        self.sparse = sparse

    def build_model(self):
        return nn.Sequential(nn.EmbeddingBag(30, 8, sparse=self.sparse), nn.Linear(8, 2)).double()

    def datasets(self):
        words = np.random.default_rng(0).integers(0, 10, size=(32, 6))  # a row has a word twice: parts to be added up
        return {"train": {"words": words, "label": (words[:, 0] > 5).astype("int64")}}

    def loss(self, model, batch):
        return cross_entropy(model(batch["words"]), batch["label"], reduction="sum"), len(batch["label"])


@pytest.mark.parametrize(
    "flags", [{}, {"optimizer.clip_norm": 0.01}, {"batch.micro_size": 4, "optimizer.clip_norm": 0.01}]
)
def test_clipped_sparse_gradients_train_as_dense_ones(flags):
    """90 lines of the registrations of torch, as it has no norm of a list of sparse tensors."""
    sparse, dense = (train_alone(Words(sparse=kind), flags) for kind in (True, False))
    assert largest_difference(sparse.weights, dense.weights) < 1e-12


def test_a_momentum_of_sparse_gradients_comes_back_with_the_checkpoint(tmp_path):
    flags = {"checkpoint.every": "2 steps", "stop.after": "6 steps", "optimizer.name": "sgd"}
    whole = train_alone(Words(sparse=True), flags)
    assert largest_difference(whole.weights, train_alone(Words(sparse=False), flags).weights) < 1e-12
    train_alone(Words(sparse=True), flags, folder=tmp_path, kill_at=5)
    resumed = train_alone(Words(sparse=True), flags, folder=tmp_path)
    assert resumed.losses[-2:] == whole.losses[-2:] and len(resumed.losses) < 6


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ({"optimizer.name": "adamw"}, "adamw"),
        ({"optimizer.name": "lamb"}, "lamb"),
        ({"optimizer.name": "sgd", "optimizer.weight_decay": 0.1}, "sgd with weight_decay 0.1"),
    ],
)
def test_optimizers_that_need_dense_gradients_are_refused_before_the_first_step(flags, found):
    with pytest.raises(ConfigError, match=f"{found}: 0 .sparse=True. has sparse gradients"):
        train_alone(Words(sparse=True), flags)


def test_sparse_gradients_have_bytes_and_a_signature():
    layer = nn.Embedding(30, 8, sparse=True)
    with LiveTensors() as live:
        layer(torch.tensor([1, 4])).sum().backward()
    assert live.knows(layer.weight.grad) and storage_bytes([layer.weight.grad])
    dense = layer.weight.grad.to_dense()
    assert (Signer()("weight", layer.weight.grad) == Signer()("weight", dense)).all()
