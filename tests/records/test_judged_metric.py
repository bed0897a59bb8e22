"""The evaluation metric that a run is judged by, and which of its values is best."""

import math

import pytest

from scaleray.records.judged_metric import judged_metric


@pytest.mark.parametrize(
    ("names", "config", "found"),
    [
        ([], {}, None),
        (["val/loss", "val/accuracy"], {}, ("val/accuracy", "max")),
        (["test/accuracy", "val/loss"], {}, ("val/loss", "min")),
        (["test/bits_per_byte"], {}, ("test/bits_per_byte", "min")),
        (["val/recall@10"], {}, ("val/recall@10", "max")),
        (["val/temperature"], {}, ("val/temperature", None)),
        (["val/loss", "val/accuracy"], {"stop": {"watch": "val/loss min"}}, ("val/loss", "min")),
        (["val/loss", "val/odd"], {"checkpoint": {"best": "val/odd max"}}, ("val/odd", "max")),
        (["val/loss", "val/odd"], {"stop": {"at": "val/odd >= 3"}}, ("val/odd", "max")),
        (["val/loss", "val/accuracy"], {"stop": {"at": "val/loss <= 3"}}, ("val/loss", "min")),
        (["val/accuracy"], {"stop": {"watch": "val/gone max"}}, ("val/accuracy", "max")),
    ],
)
def test_what_the_config_watches_comes_first_and_a_loss_last(names, config, found):
    judged = judged_metric(names, config)
    assert (judged and (judged.name, judged.better)) == found


def test_the_best_value_is_the_largest_or_the_smallest_that_is_a_number():
    judge = lambda name: judged_metric([name], {})
    assert judge("val/accuracy").best([0.2, math.nan, 0.9, 0.4]) == 0.9
    assert judge("val/loss").best([0.2, math.nan, 0.9]) == 0.2
    assert judge("val/loss").best([math.nan]) is None and judge("val/odd").best([1.0]) is None
