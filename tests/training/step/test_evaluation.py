"""What an evaluation reads, and how often."""

import pytest

from scaleray.training.setup.place import Place
from scaleray.training.step.evaluation import KEPT_BYTES, Evaluator


@pytest.mark.parametrize(("rank_bytes", "times_read"), [(KEPT_BYTES, 1), (KEPT_BYTES + 1, 3)])
def test_a_small_split_is_read_once_and_kept_and_a_large_one_is_not(rank_bytes, times_read):
    opened = []

    def open_stream():
        opened.append(len(opened))
        return iter(["a", "b"])

    evaluator = Evaluator("val", None, None, Place(), open_stream, gives_tuples=False, rank_bytes=rank_bytes)
    for _ in range(3):
        assert list(evaluator._batches()) == ["a", "b"]
    assert len(opened) == times_read
