"""A generator, which can be read once."""

from recipe import Recipe, X, Y

REFUSED = "a generator is an iterator: it can be read only once"


class Workload(Recipe):
    def datasets(self):
        return {"train": ({"x": x, "y": y} for x, y in zip(X, Y, strict=True))}
