"""JSON lines at offsets, found once."""

import json

import numpy as np
from recipe import Recipe, Rows, X


class Lines(Rows):
    def __init__(self):
        with open("rows.jsonl", "rb") as file:
            self.offsets = np.cumsum([0, *map(len, file)])

    def row(self, index):
        with open("rows.jsonl", "rb") as file:
            file.seek(self.offsets[index])
            return json.loads(file.readline())["x"]


class Workload(Recipe):
    @staticmethod
    def prepare():
        with open("rows.jsonl", "w") as file:
            file.writelines(json.dumps({"x": row.tolist()}) + "\n" for row in X)

    def datasets(self):
        return {"train": Lines()}
