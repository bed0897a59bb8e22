"""Conditions in words: what they mean, and what is refused."""

import pytest

from scaleray.records.where import Condition

RUN = {
    "efficiency": 0.72,
    "model": "digits.Digits",
    "gpus": 8,
    "owner": "Ben B.",
    "val/accuracy": 0.97,
    "seed": "3",
    "dirty": False,
    "started": "2026-11-20T10:00:00",
}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("efficiency < 0.8", True),
        ("efficiency<0.8", True),
        ("efficiency >= 0.8", False),
        ("gpus >= 4 and gpus < 8", False),
        ("gpus == 8 or efficiency > 1", True),
        ("not gpus == 8", False),
        ("gpus == 1 or gpus == 8 and efficiency < 0.5", False),  # and binds more tightly
        ("(gpus == 1 or gpus == 8) and not efficiency < 0.5", True),
        ("owner == 'Ben B.'", True),
        ('owner != "Ben B."', False),
        ("model = digits.Digits", True),
        ("model in [cnn.Net, digits.Digits]", True),
        ("gpus in [1, 2, 4]", False),
        ("val/accuracy >= 9.7e-1", True),
        ("seed == 3 and seed < 4", True),
        ("dirty == false", True),
        ("started >= 2026-11-01", True),
        ("started < '2026-11-20'", False),
        ("efficiency is known and cost is missing", True),
        ("cost is not missing", False),
        ("cost < 5", None),
        ("not cost < 5", None),
        ("cost < 5 or gpus == 8", True),
        ("cost < 5 and gpus == 1", False),
        ("cost in [1, 2]", None),
    ],
)
def test_a_condition_says_what_it_reads_like(text, holds):
    assert Condition.parse(text).holds(RUN) is holds


def test_a_condition_names_the_fields_that_it_asks_for():
    assert Condition.parse("gpus > 1 and (cost < 3 or gpus < 9) and not val/loss is known").fields == (
        "gpus",
        "cost",
        "val/loss",
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "a field is expected"),
        ("efficiency", "a comparison such as"),
        ("efficiency <", "a value is expected"),
        ("efficiency < 0.8 and", "a field is expected instead of the end"),
        ("efficiency < 0.8 gpus > 1", "'gpus' is not expected"),
        ("(efficiency < 0.8", "is expected instead of the end"),
        ("efficiency < 0.8)", "is not expected"),
        ("0.8 > efficiency", "a field is expected instead of '0.8'"),
        ("gpus in 4", r"'\[' is expected"),
        ("cost is cheap", "known or missing"),
        ("__import__('os').system('id')", "a comparison such as"),
        ("gpus == `id`", "cannot be read"),
        ("gpus < 1e999", "too large"),
        ("(" * 100 + "gpus > 1" + ")" * 100, "nested more than"),
        ("not " * 100 + "gpus > 1", "nested more than"),
        ("gpus > 1 or " * 300, "characters"),
    ],
)
def test_what_is_no_condition_is_refused_with_the_place(text, reason):
    with pytest.raises(ValueError, match=reason):
        Condition.parse(text)


def test_a_word_is_not_above_or_below_a_number():
    with pytest.raises(ValueError, match=r"owner is 'Ben B\.', which < cannot compare"):
        Condition.parse("owner < 3").holds(RUN)
