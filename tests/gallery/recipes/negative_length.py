"""A length below zero."""

from recipe import Recipe, Rows

REFUSED = r"Odd\.__len__\(\) .*an int of at least 0"


class Odd(Rows):
    def __len__(self):
        return -1


class Workload(Recipe):
    def datasets(self):
        return {"train": Odd()}
