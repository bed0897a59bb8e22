"""A value that is missing."""

from recipe import Recipe, X, Y

REFUSED = "value 0 of column x is nothing .None."


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": [None, *X[1:, 0].tolist()], "y": Y}}
