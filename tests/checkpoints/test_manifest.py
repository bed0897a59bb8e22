"""A manifest is whole and unchanged, or it is none."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaleray.checkpoints.manifest import (
    FORMAT,
    HASH,
    Chunk,
    Incomplete,
    Manifest,
    StoredFile,
    Tensor,
    _digest,
    folder_name,
    step_of,
)
from scaleray.errors import CheckpointError


def example(**changes):
    chunk = Chunk((0, 2), (3, 2), "step-000000007/rank-00000-ab.bin", 64, 24, "d1")
    values = {
        "step": 7,
        "world_size": 2,
        "strategy": "ddp",
        "created_at": 1.5,
        "values": {"progress": {"step": 7, "bad": float("inf")}},
        "tensors": {"model.ä weight": Tensor("float32", (3, 4), (chunk,)), "model.empty": Tensor("bool", (0,), ())},
        "files": {"step-000000007/rank-00000-ab.bin": StoredFile("ff" * 32, 88)},
        "facts": {"metrics": {"val/loss": 0.1}},
        "chain": 3,
        "bytes_written": 88,
    }
    return Manifest(**{**values, **changes})


TEXT = example().to_json().encode()


def test_a_manifest_survives_its_text():
    assert Manifest.from_json(TEXT, where="here") == example()
    assert json.loads(TEXT)["step"] == 7, "other programs read it as plain JSON"


@pytest.mark.parametrize(
    ("facts", "progress", "evaluated_at"),
    [
        ({"metrics": {"val/loss": 0.1}, "evaluated_at": 7}, {"evaluated_at": 3}, 7),
        ({"metrics": {"val/loss": 0.1}, "evaluated_at": 5}, {}, 5),
        ({"metrics": {"val/loss": 0.1}}, {"evaluated_at": 7}, 7),  # of older versions
        ({"metrics": {"val/loss": 0.1}}, {"evaluated_at": 6}, 6),
        ({"metrics": {"val/loss": 0.1}}, {}, None),
        ({"metrics": {}, "evaluated_at": None}, {"evaluated_at": -1}, None),
        ({"metrics": {}}, {"evaluated_at": -1}, None),
        ({"imported_from": "w.pt"}, {}, None),
    ],
)
def test_metrics_belong_to_the_step_that_they_were_measured_at(facts, progress, evaluated_at):
    manifest = example(facts=facts, values={"progress": progress})
    assert Manifest.from_json(manifest.to_json().encode(), where="here").evaluated_at == evaluated_at
    assert manifest.metrics == facts.get("metrics", {})
    assert manifest.own_metrics == (manifest.metrics if evaluated_at == 7 else {})


@given(st.integers(0, len(TEXT) - 1), st.integers(1, 255))
def test_every_single_changed_byte_is_noticed(position, difference):
    changed = bytearray(TEXT)
    changed[position] ^= difference
    with pytest.raises(Incomplete, match="truncated or changed"):
        Manifest.from_json(bytes(changed), where="here")


@given(st.integers(0, len(TEXT) - 1))
def test_a_manifest_that_is_cut_is_none(length):
    with pytest.raises(Incomplete):
        Manifest.from_json(TEXT[:length], where="here")


def test_a_newer_format_is_refused_with_what_to_do():
    with pytest.raises(
        CheckpointError, match=rf"is {FORMAT + 1}: this version reads formats up to {FORMAT}.\n.*upgrade"
    ):
        Manifest.from_json(example(format=FORMAT + 1).to_json().encode(), where="here")


def test_a_format_with_other_fields_is_named_too():
    rest = b'"format": 99, "entirely": "different"}'
    with pytest.raises(CheckpointError, match="upgrade"):
        Manifest.from_json((HASH % _digest(rest)).encode() + rest, where="here")


@pytest.mark.parametrize(
    "name", ["../../outside.bin", "/etc/passwd", "step-000000007/../../x", "step-000000007/.hidden"]
)
def test_a_file_outside_of_the_folder_is_refused(name):
    with pytest.raises(Incomplete, match="outside"):
        Manifest.from_json(example(files={name: StoredFile("", 0)}).to_json().encode(), where="here")


@given(st.integers(0, 10**12))
def test_folder_names_sort_by_step_and_give_it_back(step):
    assert step_of(folder_name(step)) == step
    assert step > 999_999_998 or folder_name(step) < folder_name(step + 1)


@pytest.mark.parametrize(
    "name", ["step-5", "step-²00000000", "step-000000001x", "weights", "step-0000000010000000000000.part"]
)
def test_other_folders_are_no_checkpoints(name):
    assert step_of(name) is None
