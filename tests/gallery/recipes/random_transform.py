"""Noise from the rows' own generator."""

from recipe import Recipe, X, Y


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": X, "y": Y}}

    def transform(self, rows, rng):
        rows["x"] = (rows["x"] + 0.1 * rng.normal(4)).astype("float32")
        return rows
