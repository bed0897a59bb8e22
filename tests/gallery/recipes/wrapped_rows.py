"""A Dataset around another one."""

from recipe import Recipe, Rows, X, Y


class Scaled(Rows):
    def __init__(self, inner):
        self.inner = inner

    def __getitem__(self, index):
        return {name: 2 * value for name, value in self.inner[index].items() if name == "x"} | {"y": Y[index]}


class Plain(Rows):
    def row(self, index):
        return X[index]


class Workload(Recipe):
    def datasets(self):
        return {"train": Scaled(Plain())}
