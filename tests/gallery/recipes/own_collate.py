"""A collate function of torch."""

from recipe import Recipe, X, Y
from torch.utils.data import default_collate


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": X, "y": Y}}

    def collate(self, rows):
        return default_collate([(row["x"], row["y"]) for row in rows])
