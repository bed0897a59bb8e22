"""A shard that is kept until a row of another one is asked for."""

from recipe import Recipe, Rows, X
from torch.utils.data import ConcatDataset, Subset


class Shards(Rows):
    number, shard = -1, None

    def row(self, index):
        if self.number != index // 6:
            self.number = index // 6
            self.shard = X[6 * self.number : 6 * self.number + 6].copy()
        return self.shard[index % 6]


class Workload(Recipe):
    def datasets(self):
        rows = ConcatDataset([Shards()])
        return {"train": rows, "val": Subset(rows, range(5))}
