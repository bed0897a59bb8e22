"""Texts that nothing makes numbers of."""

from recipe import Recipe, Y

REFUSED = "column x is .<U6.: columns hold numbers"


class Workload(Recipe):
    def datasets(self):
        return {"train": {"x": [f"row {n}" for n in range(24)], "y": Y}}
