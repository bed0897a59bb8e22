"""A workload's transform: the same rows to the bit whoever reads them, and what it must not do said with its line."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
from random_rows import Augmented
from small_runs import rows

from scaleray.config.data import DataSettings
from scaleray.data import Input, Padding, Part, Ragged, RaySources, Split, StepPlan, load_sources, transformed
from scaleray.errors import DataError, WorkloadError

STEPS = 9


class Base:
    """A workload as far as its data go."""

    build_model = loss = None
    num_rows = 26

    def datasets(self):
        return {"train": rows(self.num_rows), "val": rows(11, seed=1)}


class Noisy(Base):
    def transform(self, rows, rng, split):
        if split == "train":
            rows["x"] += rng.normal(rows["x"].shape[1]).astype(np.float32)
        return {"x": rows["x"], "label": rows["y"], "shift": rng.integers(9)}


class Cropped(Base):
    """Ragged rows, cut at random to ragged rows."""

    collate = Padding(value=-1)

    def datasets(self):
        lengths = np.random.default_rng(0).integers(1, 9, size=self.num_rows)
        return {"train": {"x": np.split(np.arange(lengths.sum(), dtype=np.float64), np.cumsum(lengths)[:-1])}}

    def transform(self, rows, rng):
        begin = rng.integers(rows["x"].lengths)
        return {"x": [row[start:] for row, start in zip(rows["x"], begin, strict=True)]}


class FromDataset(Noisy):
    """The Dataset below draws random numbers too, from the generators of the process."""

    def datasets(self):
        return {"train": Augmented(26)}


def bits(source, *, readers, world_size, first_step=0, chunk_mib=200 / 2**20, split="train"):
    """The rows of every step over all ranks, as bytes by column and step."""
    plan = StepPlan(source.num_rows, 8, seed=3, name=split)
    found = {}
    for rank in range(world_size):
        part = Part(plan, rank, world_size, first_step, STEPS)
        settings = DataSettings(readers=readers, chunk_mib=chunk_mib)
        given = RaySources({split: source}, 2.0)
        stream = Input(given, settings, False, lambda: math.inf, print).open(Split.of(split, source), part)
        for batch in stream:
            for row in range(batch.num_rows):
                values = {name: column[row] for name, column in batch.columns.items()}
                found.setdefault(batch.step, []).append({n: (v.shape, v.tobytes()) for n, v in values.items()})
        stream.close(wait_s=20)
    return found


@pytest.mark.parametrize("workload", [Noisy, Cropped, FromDataset])
def test_rows_are_the_same_to_the_bit_whoever_reads_them_on_any_number_of_workers_from_any_step(ray, workload):
    source = load_sources(workload())["train"]
    whole = bits(source, readers="worker", world_size=1)
    assert len({str(row) for step in whole.values() for row in step}) > 26  # other values in every epoch
    for readers, world_size, first_step, chunk_mib in [
        ("ray", 1, 0, 1), ("ray", 2, 4, 1e-4), ("worker", 2, 0, 1), ("worker", 3, 5, 1e-4), ("ray", 3, 0, 1e-3),
    ]:  # fmt: skip
        found = bits(source, readers=readers, world_size=world_size, first_step=first_step, chunk_mib=chunk_mib)
        assert found == {step: whole[step] for step in range(first_step, STEPS)}


def test_splits_are_told_apart_and_columns_renamed():
    sources = load_sources(Noisy())
    plain = rows(11, seed=1)
    found = sources["val"].read(np.arange(11))
    assert np.array_equal(found["x"], plain["x"]) and set(found) == {"x", "label", "shift"}
    assert not np.array_equal(sources["train"].read(np.arange(11))["x"], rows(26)["x"][:11])
    assert sources["train"].describe()["transform"] == "Noisy.transform"


def test_the_cost_of_a_transform_decides_who_reads():
    source = load_sources(Noisy())["train"]
    for row_s, reader in ((1e-6, "worker"), (1e-3, "ray")):
        source.row_s = row_s
        assert Split.of("train", source).reading("auto") == {"read_by": reader, "row_us": pytest.approx(1e6 * row_s)}


def test_the_promise_tells_of_random_transforms():
    assert Split.of("train", load_sources(Noisy())["train"]).row_values.promise.startswith("random transforms follow")

    class Doubled(Base):
        def transform(self, rows, rng):
            return {**rows, "x": 2 * rows["x"]}

    assert Split.of("train", load_sources(Doubled())["train"]).row_values.promise == ""


def line_of(method):
    return method.__code__.co_firstlineno


class FromNumpy(Base):
    def transform(self, rows, rng):
        rows["x"] *= 2
        rows["x"] += np.random.normal(size=rows["x"].shape)
        return rows


class FromElsewhere(Base):
    def transform(self, rows, rng):
        return {**rows, "x": rows["x"] * np.frombuffer(os.urandom(8), np.uint64)[0]}


class Mixed(Base):
    def transform(self, rows, rng):
        return {**rows, "x": rows["x"] - rows["x"].mean(axis=0)}


@pytest.mark.parametrize(
    ("workload", "offset", "what"),
    [
        (FromNumpy, 2, "draws from the generators of the process"),
        (FromElsewhere, 0, "returns a different column x for the same rows and rng"),
        (Mixed, 0, "returns a different column x if fewer rows are read together"),
    ],
)
def test_a_transform_that_is_not_repeatable_is_found_with_its_line(workload, offset, what):
    state = np.random.get_state()[1].copy()
    values = load_sources(workload())["train"].row_values
    assert what in values.difference
    assert f"{os.path.basename(__file__)}:{line_of(workload.transform) + offset}" in values.difference
    assert values.advice.startswith("draw random numbers from rng")
    assert np.array_equal(np.random.get_state()[1], state)


def with_transform(function):
    return type("Given", (Base,), {"transform": function})()


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda self, rows, rng: {"x": rows["x"][1:]}, WorkloadError, "it received 8 rows, and must return as many"),
        (lambda self, rows, rng: rows["x"], WorkloadError, "must return a dict of columns"),
        (lambda self, rows: rows, WorkloadError, "it must take rows and rng, and split"),
        (lambda self, rows, rng: {"x": rows["z"]}, WorkloadError, r"test_transformed.py.*\n[^$]*KeyError: 'z'"),
        (
            lambda self, rows, rng: {"x": [np.ones(i) for i in range(1, len(rng) + 1)]},
            DataError,
            "column x of the train data has rows of unequal length .1 to 8 values.*\n.*scaleray.data.Padding",
        ),
    ],
)
def test_what_a_transform_must_not_return_is_one_clear_error(function, error, message):
    with pytest.raises(error, match=message):
        load_sources(with_transform(function))


def test_a_transform_in_place_leaves_the_users_memory_as_it_was():
    class Own(Base):
        memory = np.zeros((26, 2))

        def datasets(self):
            return {"train": {"x": self.memory}}

        def transform(self, rows, rng):
            rows["x"] += 1
            return rows

    source = load_sources(Own())["train"]
    assert source.read(np.arange(3))["x"].tolist() == [[1, 1]] * 3 and not Own.memory.any()


def test_a_column_that_is_ragged_in_a_few_rows_is_ragged_in_every_block():
    seen = []

    class Seen(Cropped):
        def transform(self, rows, rng):
            seen.append(type(rows["x"]))
            return rows

    load_sources(Seen())["train"].read(np.array([3]))
    assert len(seen) > 3 and set(seen) == {Ragged}


def test_reading_leaves_the_generators_alone_so_that_a_thread_may_read_beside_a_training(monkeypatch):
    workload = with_transform(lambda self, rows, rng: {"x": rows["x"] * 2})
    source = load_sources(workload)["train"]

    def kept():
        raise AssertionError("what the training has drawn meanwhile would be put back")

    monkeypatch.setattr(transformed, "generators_kept", kept)
    assert len(source.read(np.arange(4))["x"]) == 4
