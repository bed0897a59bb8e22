"""Who reads the rows of a split."""

import numpy as np
import pytest

from scaleray.data import Split, as_source

ROWS = np.arange(12.0).reshape(6, 2)


def split_of(data):
    return Split.of("train", as_source(data, split="train"))


class Doubled:
    """A source of the user's own, which computes its rows."""

    num_rows, row_bytes, tokens_per_row, group_sizes = 6, 16, None, None

    def read(self, indices):
        return {"x": 2 * ROWS[indices]}

    def describe(self):
        return {"kind": "doubled", "sha256": None}


@pytest.mark.parametrize(("data", "reader"), [({"x": ROWS}, "worker"), (Doubled(), "ray")])
def test_rows_in_memory_are_read_by_the_worker_and_others_by_tasks_unless_told_otherwise(data, reader):
    split = split_of(data)
    assert split.read_by("auto") == reader
    assert [split.read_by(told) for told in ("worker", "ray")] == ["worker", "ray"]
