"""Who reads the rows, how often they are copied, and how many tasks are under way: counted, not timed."""

from __future__ import annotations

import itertools
import math
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from random_rows import Augmented, Unmoved

from scaleray.config.data import DataSettings
from scaleray.data import ArraySource, DatasetSource, Input, Part, RaySources, Split, StepPlan, StepStream, TokenSource
from scaleray.data.blocks import COPIED_BYTES, LocalBlocks, chunks, rebatch
from scaleray.data.local_start import deliver
from scaleray.data.ray_blocks import ray_blocks
from scaleray.data.split_facts import CHEAP_ROW_S
from scaleray.errors import DataError


def split_of(dataset, *, row_s):
    """The split of a Dataset on a clock that says that a row takes so long."""
    clock = SimpleNamespace(perf_counter=itertools.count(0, row_s).__next__)
    with mock.patch("scaleray.data.sources.time", clock):
        return Split.of("train", DatasetSource(dataset))


@pytest.mark.parametrize(("row_s", "reader"), [(CHEAP_ROW_S / 2, "worker"), (CHEAP_ROW_S * 2, "ray")])
def test_a_dataset_is_read_by_the_worker_where_a_row_takes_little_time(row_s, reader):
    split = split_of(Unmoved(), row_s=row_s)
    assert split.row_s == pytest.approx(row_s)
    assert split.reading("auto") == {"read_by": reader, "row_us": pytest.approx(1e6 * row_s)}
    assert {split.read_by(stated) for stated in ("worker", "ray")} == {"worker", "ray"}


def test_a_dataset_that_draws_random_numbers_is_read_by_tasks_however_cheap_it_is():
    assert split_of(Augmented(), row_s=CHEAP_ROW_S / 100).read_by("auto") == "ray"


def test_what_is_in_memory_is_read_by_the_worker_and_nothing_is_measured():
    arrays = Split.of("train", ArraySource({"x": np.arange(9)}))
    assert arrays.reading("auto") == {"read_by": "worker"}


def test_rows_in_memory_are_copied_once_and_a_batch_is_a_view_of_them():
    tokens = TokenSource(np.arange(64 * 1024 + 1, dtype=np.uint16), sequence_length=1024)
    reads = []
    with mock.patch.object(TokenSource, "read", lambda self, i: reads.append(i) or {"x": np.empty((len(i), 1025))}):
        part = Part(StepPlan(tokens.num_rows, 4), 0, 1, 0, 160)
        pieces = [p["x"] for p, _ in rebatch(LocalBlocks(tokens, part, chunk_bytes=2**24), [4] * 160)]
    memories = {id(piece.base) for piece in pieces}
    assert sum(len(indices) for indices in reads) == 640 == sum(map(len, pieces))
    assert len(memories) == len(reads) < 160 / 4
    assert max(len(indices) for indices in reads) * tokens.row_bytes <= COPIED_BYTES


def delivered_together(source, part, **options):
    """How many batches of a part are handed over together, one delivery after another."""
    delivered = []

    def noted(groups, queue, demand):
        deliver((delivered.append(group) or group for group in groups), queue, demand)

    with mock.patch("scaleray.data.stream.deliver", noted):
        stream = StepStream(lambda part, demand: LocalBlocks(source, part, **options), part, row_bytes=8)
        assert [batch.step for batch in stream] == list(range(part.first_step, part.last_step))
    return [len(batches) for batches in delivered]


def test_batches_that_were_read_together_are_handed_over_together_and_wait_for_no_others():
    part = Part(StepPlan(24, 4), 0, 1, 2, 87)
    read_together = [len(steps) for steps in chunks(part, row_bytes=28, chunk_bytes=2**20)]
    assert delivered_together(DatasetSource(Unmoved()), part, chunk_bytes=2**20) == read_together == [1, 4, 16, 64]
    assert delivered_together(DatasetSource(Augmented()), part, chunk_bytes=2**20) == [1] * 85


def test_batches_that_are_copied_are_handed_over_in_growing_numbers():
    part = Part(StepPlan(400, 4), 0, 1, 2, 87)
    assert delivered_together(ArraySource({"x": np.arange(400)}), part, chunk_bytes=64) == [1, 1, 2, 4, 8, 16, 32, 21]


def test_a_row_is_written_where_it_belongs_with_the_type_that_all_rows_have():
    rows = [{"x": np.float32(1.5)}, {"x": np.float64(2.5)}, {"x": np.float32(3.5)}]
    items = type("Items", (), {"__len__": lambda self: 3, "__getitem__": lambda self, index: rows[index]})()
    found = DatasetSource(items).read(np.array([2, 1, 0, 2]))["x"]
    assert found.dtype == np.float64 and found.tolist() == [3.5, 2.5, 1.5, 3.5]


def test_rows_that_take_long_are_read_a_second_at_a_time():
    class Rows(Unmoved):
        def __init__(self):
            super().__init__(4000)

    source = DatasetSource(Rows())
    source.row_s = 0.1  # ten rows a second
    reads = []
    part = Part(StepPlan(4000, 2), 0, 1, 0, 200)
    with mock.patch.object(DatasetSource, "read", lambda self, i: reads.append(len(i)) or {"x": np.asarray(i)}):
        settings = DataSettings(readers="worker")
        opened = Input({"train": source}, settings, False, lambda: math.inf, print).open(
            Split.of("train", source), part
        )
        assert len(list(opened)) == 200
    assert max(reads) == 10


# tasks


SOURCE = ArraySource({"x": np.arange(400)})
PART = Part(StepPlan(400, 4, seed=5), 0, 1, 3, 190)


@pytest.mark.parametrize(
    ("cpus", "memory_chunks", "most"), [(0.25, 100, 2), (1, 100, 2), (3, 100, 6), (2.5, 100, 6), (64, 5, 5), (4, 1, 2)]
)
def test_tasks_are_under_way_for_every_cpu_as_far_as_their_rows_have_room(ray, cpus, memory_chunks, most):
    chunk_bytes = 8 * 4 * 2
    options = {"row_bytes": 8, "chunk_bytes": chunk_bytes, "memory_bytes": memory_chunks * chunk_bytes, "cpus": cpus}
    found = np.concatenate([block["x"] for block in ray_blocks(SOURCE, PART, **options)])
    assert np.array_equal(found, np.concatenate([PART.plan.global_indices(step) for step in range(3, 190)]))
    assert ray.most_under_way == most and ray.under_way == 0
    assert ray.num_cpus == min(1, cpus)
    assert ray.steps == list(chunks(PART, row_bytes=8, chunk_bytes=chunk_bytes))


def test_windows_of_row_groups_count_as_large_as_they_are(ray):
    part = Part(StepPlan(400, 4, group_sizes=(40,) * 10, window_rows=200), 0, 1, 0, 200)
    list(ray_blocks(SOURCE, part, row_bytes=8, chunk_bytes=64, memory_bytes=3 * 200 * 8, cpus=16))
    assert ray.most_under_way == 3


@pytest.mark.parametrize("cause", [DataError("row 7", "damaged", "it must be readable"), ZeroDivisionError("row 7")])
def test_an_error_of_scaleray_in_a_task_arrives_as_itself_and_any_other_with_rays_text(ray, cause):
    failed = ray.exceptions.RayTaskError("the traceback in the task")
    failed.cause = cause

    def fail(value):
        if callable(value):
            raise failed
        return value

    ray.get = fail
    options = {"row_bytes": 8, "chunk_bytes": 64, "memory_bytes": 1000, "cpus": 1}
    with pytest.raises((DataError, ray.exceptions.RayTaskError)) as caught:
        next(StepStream(lambda part, demand: ray_blocks(SOURCE, part, **options), PART))
    assert caught.value is (cause if isinstance(cause, DataError) else failed)


def test_a_process_that_runs_tasks_unpickles_a_source_once():
    from scaleray.data.ray_blocks import _read_in_task, _source_in_task

    asked = []
    _source_in_task.cache_clear()
    try:
        with mock.patch.dict(sys.modules, {"ray": SimpleNamespace(get=lambda ref: asked.append(ref) or SOURCE)}):
            for steps in chunks(PART, row_bytes=8, chunk_bytes=64):
                _read_in_task(["train"], PART, steps)
                _read_in_task(["val"], PART, steps)
    finally:
        _source_in_task.cache_clear()
    assert asked == ["train", "val"]


@pytest.mark.parametrize("readers", ["worker", "ray"])
def test_no_reader_changes_a_bit_of_the_rows(ray, readers, tmp_path):
    np.arange(6001, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    images = torch.utils.data.TensorDataset(torch.rand(300, 3, 8, 8), torch.arange(300))
    for source in (
        ArraySource({"x": np.random.default_rng(0).random((300, 5))}),
        TokenSource(tmp_path / "tokens.bin", sequence_length=20, dtype="uint16"),
        DatasetSource(images),
        DatasetSource(Augmented(300)),
    ):
        part = Part(StepPlan(300, 32, seed=1), 1, 2, 5, 35)
        settings = DataSettings(readers=readers, chunk_mib=0.01)
        stored = RaySources({"train": source}, 2.0)
        stream = Input(stored, settings, False, lambda: math.inf, print).open(Split.of("train", source), part)
        batches = list(stream)
        stream.close(wait_s=20)  # the stand-in's tasks draw from this process's generators, as does what follows
        expected = LocalBlocks(source, part, chunk_bytes=100)
        sizes = [part.num_rows(step) for step in range(5, 35)]
        for batch, (piece, _) in zip(batches, rebatch(expected, sizes), strict=True):
            for name, values in piece.items():
                found = batch.columns[name]
                assert found.dtype == values.dtype and found.tobytes() == values.tobytes()
                assert found.flags.writeable
