"""Durations and targets: what is written is what is read."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scaleray.config import Duration, Target
from scaleray.config.base import LARGEST_COUNT, UNITS, absolute_path

units = st.sampled_from(UNITS)
names = st.from_regex(r"[a-z][\w.-]{0,8}/[\w.-]{1,8}(/[\w.-]{1,4})?", fullmatch=True)


@given(value=st.floats(0, LARGEST_COUNT), unit=units)
def test_a_duration_reads_what_it_writes(value, unit):
    assert Duration.parse(str(Duration(value, unit))) == Duration(value, unit)


@given(value=st.integers(0, 10**6), unit=units)
@example(value=1, unit="epochs")
def test_a_whole_duration_is_written_without_a_point(value, unit):
    assert Duration(float(value), unit).stored() == f"{value} {unit}"
    assert str(Duration(float(value), unit)) == f"{value} {unit.removesuffix('s') if value == 1 else unit}"


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("3 epochs", Duration(3, "epochs")), ("1 epoch", Duration(1, "epochs")), ("1.5e6 samples", Duration(1.5e6, "samples")),
        (" 2_000 steps ", Duration(2000, "steps")), ("10tokens", Duration(10, "tokens")), ("1e-3 epochs", Duration(0.001, "epochs")),
    ],
)  # fmt: skip
def test_durations_are_written_as_people_do(text, duration):
    assert Duration.parse(text) == duration


@pytest.mark.parametrize(
    "text",
    ["", "epochs", "3", "-3 epochs", "3 weeks", "nan steps", "inf steps", "1e99 steps", "1 2 steps", "three steps", 3, None, ["1 step"]],
)  # fmt: skip
def test_what_is_no_duration_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match=r"3 epochs|at most"):
        Duration.parse(text)


@given(metric=names, comparison=st.sampled_from([">=", "<="]), value=st.floats(allow_nan=False, allow_infinity=False))
def test_a_target_reads_what_it_writes(metric, comparison, value):
    assert Target.parse(str(Target(metric, comparison, value))) == Target(metric, comparison, value)


@pytest.mark.parametrize(
    "text", ["", "accuracy >= 1", "val/accuracy > 1", "val/accuracy >= high", "val/a >= 1e999", "val/a >= .", "val/a >= 1.2.3", 5]
)  # fmt: skip
def test_what_is_no_target_is_refused(text):
    with pytest.raises(ValueError, match=r"needed|finite|convert"):
        Target.parse(text)


@given(value=st.floats(-1e9, 1e9), measured=st.floats(-1e9, 1e9))
def test_a_target_is_reached_from_its_own_side(value, measured):
    assert Target("a/b", ">=", value).is_reached({"a/b": measured}) == (measured >= value)
    assert Target("a/b", "<=", value).is_reached({"a/b": measured}) == (measured <= value)


def test_a_target_is_not_reached_by_what_was_not_measured():
    assert not Target("a/b", ">=", 0).is_reached({"a/c": 1.0})
    assert not Target("a/b", "<=", 0).is_reached({"a/b": float("nan")})


def test_paths_become_absolute_and_uris_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert absolute_path("runs") == str(tmp_path / "runs")
    assert absolute_path("~/runs") == "/home/someone/runs"
    assert absolute_path("s3://bucket/runs") == "s3://bucket/runs"
    assert absolute_path("file:///data/a%20folder") == "/data/a folder"
