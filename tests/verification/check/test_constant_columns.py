"""Columns and rows that hold one value are named, in every kind of data."""

import numpy as np
import pytest

from scaleray.data import RankBatch
from scaleray.verification.check.data_checks import constant

DRAW = np.random.default_rng(0)
TABLE = DRAW.normal(size=(8, 4)).astype(np.float32)
WIDE = DRAW.normal(size=(8, 40))
IMAGES = DRAW.integers(0, 255, (8, 3, 4, 4)).astype(np.uint8)
TOKENS = DRAW.integers(0, 90, (8, 16))


def with_one_value(values, where, value):
    changed = values.copy()
    changed[where] = value
    return changed


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.full((8, 3, 4, 4), 255, np.uint8), "column x is 255 in all of 8 rows"),
        (np.full(8, 0.5), "column x is 0.5 in all of 8 rows"),
        (with_one_value(TABLE, (slice(None), 2), 7.0), "column x has one value in all of 8 rows at position 2"),
        (with_one_value(TOKENS, (slice(None), 5), 7), "column x has one value in all of 8 rows at position 5"),
        (np.zeros((8, 3, 4, 4), np.uint8), "column x is 0 in all of 8 rows"),
        (with_one_value(WIDE, (slice(None), 33), 0), "column x has one value in all of 8 rows at position 33"),
        (with_one_value(IMAGES, [1, 5], 9), "2 of 8 rows of column x consist of a single value"),
        (with_one_value(TOKENS, 3, 0), "1 of 8 rows of column x consist of a single value"),
    ],
)
def test_what_is_constant_is_named(values, words):
    [finding] = constant(RankBatch(0, {"x": values, "y": np.arange(8)}, 8))
    assert finding.text.startswith(words)


def test_a_mask_of_ones_and_values_that_differ_are_not():
    columns = {
        "table": TABLE,
        "images": IMAGES,
        "tokens": TOKENS,
        "mask": np.ones((8, 16), np.int64),
        "padded": np.tril(np.ones((8, 8), int)),
        "drawn": with_one_value(WIDE, (slice(None), slice(8)), 0),
    }
    assert list(constant(RankBatch(0, columns, 8))) == []


def test_tokens_of_a_model_that_looks_them_up_begin_alike():
    columns = {"tokens": with_one_value(TOKENS, (slice(None), 0), 1)}
    assert list(constant(RankBatch(0, columns, 8), embeds=True)) == []
