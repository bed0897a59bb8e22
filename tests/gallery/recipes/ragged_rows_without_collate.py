"""Rows of unequal length that nothing pads."""

from recipe import Recipe, X, Y

REFUSED = "column x of the train data has rows of unequal length.*collate"


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": [x[: 1 + n % 4] for n, x in enumerate(X)], "y": Y}}
