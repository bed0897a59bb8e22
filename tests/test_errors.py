"""Errors: one tree, four parts, and a way through pickle that loses nothing."""

import inspect
import pickle

import pytest

from scaleray import errors
from scaleray.errors import ConfigError, RunFailedError, ScaleRayError, UsageError

ALL = [e for _, e in inspect.getmembers(errors, inspect.isclass) if issubclass(e, ScaleRayError)]
EXAMPLES = [
    e("the thing", 5, "it must be 6", "try 6") if issubclass(e, UsageError) else e("rank 1, step 3: no") for e in ALL
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_every_error_survives_pickling_and_stands_in_the_tree(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error) and again.args == error.args
    assert type(error).__name__ in errors.__doc__


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_what_the_user_can_mend_exits_with_2_and_the_rest_with_1(error):
    assert error.exit_code == (2 if isinstance(error, UsageError) else 1)
    assert not (isinstance(error, UsageError) and isinstance(error, RunFailedError))


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        (None, "required"), ("word", "word"), ("Odd", "'Odd'"), ("two words", "two words"), ("two\nlines", "'two\\nlines'"), (3, "3"), ([1, 2], "[1, 2]"),
        ("x" * 500, "x" * 197 + "..."),
        ("\udcff bytes", "'\\udcff bytes'"),
    ],
)  # fmt: skip
def test_a_message_shows_what_was_found_briefly_and_printably(found, shown):
    message = str(ConfigError("batch.global_size", found, "it must be 64", "use 64"))
    assert message == f"batch.global_size is {shown}: it must be 64.\n  use 64"
    message.encode()


def test_a_number_that_python_refuses_to_print_does_not_break_the_message():
    assert "a value of type int that is too large to print" in str(ConfigError("seed", 1 << 20_000, "no"))


def test_a_message_without_a_hint_is_one_line():
    assert str(ConfigError("seed", -1, "it must be 0 or more")) == "seed is -1: it must be 0 or more."


@pytest.mark.parametrize(
    ("found", "allowed", "message"),
    [
        ("/a", "it does not exist", "the file '/a' does not exist."),
        ("/a", "it must be one of two", "the file is '/a': it must be one of two."),
        ("empty", "it has no line", "the file is empty: it has no line."),
        (3, "it has no line", "the file is 3: it has no line."),
    ],
)
def test_a_reason_about_a_quoted_value_continues_the_sentence(found, allowed, message):
    assert str(UsageError("the file", found, allowed)) == message


def test_an_error_about_the_result_of_a_method_says_what_it_returned():
    assert (
        str(UsageError("loss()", "a mean", "it must return a sum")) == "loss() returned a mean: it must return a sum."
    )
    assert (
        str(UsageError("the sum of loss()", 0, "it must be above 0")) == "the sum of loss() is 0: it must be above 0."
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [("lacks a line", "the file lacks a line.\n  add it"), (": it has no line", "the file: it has no line.\n  add it")],
)
def test_an_error_without_a_value_is_a_sentence_and_survives_pickling(text, message):
    error = ConfigError.problem("the file", text, "add it")
    again = pickle.loads(pickle.dumps(error))
    assert type(error) is ConfigError and str(error) == str(again) == message and again.found is errors.NO_VALUE


def test_a_config_error_knows_its_key_without_the_place():
    assert ConfigError("job.yaml:3 batch.global_size", 0, "no").key == "batch.global_size"
    assert ConfigError("seed", 0, "no").key == "seed"


class NoText(ValueError):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\ntwo"), "one"),
        (ValueError("\n one"), "one"),
        (AssertionError(), "AssertionError"),
        (NoText(), "its text cannot be made: RuntimeError"),
    ],
)
def test_the_first_line_of_an_error_without_words_is_its_type(error, line):
    assert errors.first_line(error) == line
