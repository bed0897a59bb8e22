"""A CSV file, read into lists of numbers."""

import csv

from recipe import Recipe, X, Y


class Workload(Recipe):
    @staticmethod
    def prepare():
        with open("rows.csv", "w", newline="") as file:
            csv.writer(file).writerows([*x, y] for x, y in zip(X, Y, strict=True))

    def datasets(self):
        with open("rows.csv", newline="") as file:
            rows = [[float(value) for value in row] for row in csv.reader(file)]
        return {"train": {"x": [row[:4] for row in rows], "y": [int(row[4]) for row in rows]}}
