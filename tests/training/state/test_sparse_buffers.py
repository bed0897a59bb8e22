"""Sparse buffers, as graph networks keep their adjacency matrix: trained, saved and restored under every strategy."""

from __future__ import annotations

import pytest
import torch
from small_runs import NUM_CLASSES, NUM_FEATURES, Classify, train_alone
from torch import nn
from verified import judge

from scaleray.common.equal_models import dense_parts

LAYOUTS = {"coo": torch.Tensor.to_sparse, "csr": torch.Tensor.to_sparse_csr, "csc": torch.Tensor.to_sparse_csc}


class Graph(Classify):
    """Mixes features by a sparse matrix whose values grow with every forward pass of training."""

    def __init__(self, layout="coo", persistent=True):
        super().__init__()
        self.layout, self.persistent = layout, persistent

    def build_model(self):
        class Net(nn.Module):
            def __init__(self, matrix, persistent):
                super().__init__()
                self.layer = nn.Linear(NUM_FEATURES, NUM_CLASSES)
                self.register_buffer("adjacency", matrix, persistent=persistent)

            def forward(self, x):
                if self.training:
                    dense_parts(self.adjacency)["values"].mul_(1.01)
                return self.layer((self.adjacency @ x.T).T)

        return Net(LAYOUTS[self.layout](torch.eye(NUM_FEATURES) + 0.1), self.persistent)


@pytest.mark.filterwarnings("ignore:Sparse CS")
@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sparse_buffer_comes_back_with_the_checkpoint(tmp_path, layout, persistent):
    flags = {"checkpoint.every": "2 steps", "stop.after": "6 steps", "averaging.decay": 0.9}
    whole = train_alone(Graph(layout, persistent), flags)
    train_alone(Graph(layout, persistent), flags, folder=tmp_path, kill_at=5)
    resumed = train_alone(Graph(layout, persistent), flags, folder=tmp_path)
    assert resumed.losses[-2:] == whole.losses[-2:] and len(resumed.losses) < 6


class Constant(Graph):
    """The matrix of a graph, which does not change."""

    def build_model(self):
        model = super().build_model()
        model.forward = lambda x: model.layer((model.adjacency @ x.T).T)
        return model


@pytest.mark.always("gossip")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "local_sgd", "gossip"])
def test_workers_with_a_sparse_buffer_train_what_one_does(gloo, strategy):
    outcome = gloo.run(2, judge, Constant(), {"strategy.name": strategy}, 1, 4)[0]
    assert outcome.verdict in ("equal", "as promised"), outcome
