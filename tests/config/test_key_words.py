"""Keys of the config in a user's words: what each may hold, and what other libraries call it."""

import pytest

from scaleray.config.loading import known_keys, load_config
from scaleray.config.reference import key_rows, rows_of
from scaleray.config.synonyms import KEYS, NOTES, WORDS, meant_by
from scaleray.errors import ConfigError


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("optimizer.learning_rate", "a number above 0, at most 1e+06, or null"),
        ("optimizer.betas", "a list of 2 numbers from 0 to below 1"),
        ("batch.micro_size", "a whole number of at least 1, or null"),
        ("batch.drop_last", "true or false"),
        ("scale.workers", "a whole number from 1 to 100,000, or a range such as {min: 1, max: 4}"),
        ("precision.dtype", "one of fp32, bf16, fp16, fp64"),
        ("fsdp.reduce_dtype", "one of fp32, bf16, fp16, null"),
        ("noise_scale.measure", "one of auto, true, false"),
        ("compression.allowed", "a list of any of none, fp16, bf16, int8, powersgd, topk"),
        ("shares.speeds", "a list of numbers above 0, or null"),
        ("stop.after", "a length such as 3 epochs or 500 steps"),
        ("stop.at", "a target such as val/accuracy >= 0.97, or null"),
        ("tracking.experiment", "text, not empty"),
        ("workload.args", "a mapping"),
    ],
)
def test_a_type_is_said_in_words(key, words):
    assert rows_of(key)[0].type == words


def test_no_key_shows_pythons_name_of_a_type():
    shown = " ".join(row.type for row in key_rows())
    words = set(shown.replace(",", " ").split())
    assert not words & {"int", "str", "float", "bool", "dict", "union", "None", "ellipsis", "duration", "optional"}
    assert "|" not in shown and "[" not in shown


@pytest.mark.parametrize(("key", "shown"), [("optimizer.betas", "[0.9, 0.999]"), ("batch.drop_last", "false"), ("stop.at", "null"), ("study.currency", "''")])  # fmt: skip
def test_a_default_is_shown_as_in_a_file(key, shown):
    assert rows_of(key)[0].default == shown


def test_each_word_of_others_leads_to_a_key_that_there_is_and_to_one_only():
    every = [word for words in WORDS.values() for word in words.split()]
    assert len(every) == len(set(every)) == len(KEYS)
    assert set(WORDS) | set(NOTES) <= set(known_keys())


def test_a_usual_word_wins_over_a_key_of_that_name_in_a_section_that_few_have():
    with pytest.raises(ConfigError, match=r"did you mean schedule\.warmup \(with its unit"):
        load_config(flags={"warmup_steps": 3}, environ={})
    for flag, key in {"workload.class": "workload.name", "batch.accumulation": "batch.micro_size"}.items():
        with pytest.raises(ConfigError, match=f"did you mean {key}"):
            load_config(flags={flag: 3}, environ={})


@pytest.mark.parametrize(
    ("word", "key"),
    [("lr", "optimizer.learning_rate"), ("batch-size", "batch.global_size"), ("num_train_epochs", "stop.after"), ("GPUs", "scale.workers"), ("wd", "optimizer.weight_decay"), ("class", "workload.name"), ("accumulation", "batch.micro_size")],
)  # fmt: skip
def test_the_usual_words_are_known_in_any_spelling(word, key):
    assert meant_by(word) == key


def test_keys_are_filtered_by_section_by_a_part_of_their_name_and_by_what_others_call_them():
    assert {row.key.partition(".")[0] for row in rows_of("optimizer")} == {"optimizer"}
    assert {"batch.micro_size", "evaluation.micro_size"} <= {row.key for row in rows_of("micro")}
    assert [row.key for row in rows_of("lr")] == ["optimizer.learning_rate"]
    with pytest.raises(ConfigError, match="did you mean optimizer"):
        rows_of("optimzer")
