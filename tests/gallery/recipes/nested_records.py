"""Records in a column."""

from recipe import Recipe, Y

REFUSED = "value 0 of column x is a dict.*each of its keys"


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": [{"a": 1.0}] * 24, "y": Y}}
