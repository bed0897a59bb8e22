"""A graph network with a sparse matrix: handwritten digits as nodes that know the classes of few, and their neighbours.

scaleray train -c jobs/recipes/graph.yaml
"""

import torch
from sklearn.datasets import load_digits
from sklearn.neighbors import kneighbors_graph
from torch import nn

from scaleray import Workload


class GraphNet(nn.Module):
    """Two layers, each of which adds up the neighbours of every node."""

    def __init__(self, features, neighbours):
        super().__init__()
        self.register_buffer("features", features)
        self.register_buffer("neighbours", neighbours)
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, nodes):
        hidden = torch.relu(self.neighbours @ self.first(self.features))
        return (self.neighbours @ self.last(hidden))[nodes]


class Graph(Workload):
    def __init__(self, labelled=200):
        self.images, self.labels = load_digits(return_X_y=True)
        self.labelled = labelled

    def build_model(self):
        edges = kneighbors_graph(self.images, 8, include_self=True).tocoo()
        index = torch.tensor([edges.row.tolist(), edges.col.tolist()])
        values = torch.full((edges.nnz,), 1 / 8)
        neighbours = torch.sparse_coo_tensor(index, values, edges.shape, check_invariants=True).coalesce()
        return GraphNet(torch.tensor(self.images / 16, dtype=torch.float32), neighbours)

    def datasets(self):
        rows = {"node": range(len(self.labels)), "label": self.labels}
        parts = {"train": slice(0, self.labelled), "test": slice(self.labelled, None)}
        return {
            split: {name: torch.tensor(values)[part] for name, values in rows.items()} for split, part in parts.items()
        }

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch["node"]), batch["label"], reduction="sum"), len(batch["node"])

    def metrics(self, model, batch):
        return {"accuracy": ((model(batch["node"]).argmax(1) == batch["label"]).sum(), len(batch["node"]))}
