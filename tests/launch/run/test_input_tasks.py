"""Rows read by Ray tasks in processes of their own: the bits of a worker's own reading, and each source unpickled
once."""

from __future__ import annotations

import os
import uuid

import numpy as np
import pytest
import torch

from scaleray.data import Padding, Part, StepPlan, as_source, load_sources, preprocessing
from scaleray.data.as_source import preprocessor_of
from scaleray.data.blocks import LocalBlocks
from scaleray.data.ragged import flat_values, joined
from scaleray.data.ray_blocks import ray_blocks
from scaleray.errors import DataError

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def noted(*, fails_at=-1):
    """A Dataset whose rows say which process read them, and from which copy of itself."""

    class Noted(torch.utils.data.Dataset):  # in here, so that Ray ships it with its code
        def __init__(self):
            self.copy = 0

        def __setstate__(self, state):
            self.copy = uuid.uuid4().int % 2**62

        def __len__(self):
            return 64

        def __getitem__(self, index):
            if index == fails_at and self.copy:
                raise DataError(f"row {index}", "damaged", "it must be readable")
            return {"noise": torch.rand(5), "row": index, "copy": self.copy, "process": os.getpid()}

    return as_source(Noted(), split="train")


def test_tasks_give_the_bits_of_the_workers_own_reading_and_unpickle_a_source_once_a_process(ray_session):
    import ray

    source, part = noted(), Part(StepPlan(64, 8, seed=2), 0, 1, 3, 43)
    options = {"row_bytes": source.row_bytes, "chunk_bytes": 1, "memory_bytes": 1e8, "cpus": 2.0}
    blocks = list(ray_blocks(ray.put(source), part, **options))
    here = list(LocalBlocks(source, part, chunk_bytes=1))
    for name in ("noise", "row"):
        found, expected = (np.concatenate([block[name] for block in all_of]) for all_of in (blocks, here))
        assert found.tobytes() == expected.tobytes()
    copies = {(block["process"][0], block["copy"][0]) for block in blocks}
    assert len(blocks) == 40 > len(copies)
    assert len(copies) == len({process for process, _ in copies})
    assert os.getpid() not in {process for process, _ in copies}
    assert not blocks[0]["noise"].flags.writeable  # the object store's memory itself, and no copy

    part = Part(StepPlan(64, 8, shuffle=False), 0, 1, 0, 8)
    reading = ray_blocks(ray.put(noted(fails_at=30)), part, **options)
    assert [next(reading)["row"][0] for _ in range(3)] == [0, 8, 16]
    with pytest.raises(DataError, match="row 30"):
        next(reading)


def prepared():
    """A workload whose rows Ray Data fits a preprocessor to, and whose transform makes them ragged."""
    from ray.data.preprocessors import Chain, OrdinalEncoder, StandardScaler

    class Prepared:
        build_model = loss = None
        collate = Padding()

        def datasets(self):
            return {"train": {"city": np.array(["Ulm", "Oslo", "Bonn", "Oslo"] * 16), "x": np.arange(64.0) ** 2}}

        def preprocessor(self):
            return Chain(StandardScaler(["x"]), OrdinalEncoder(["city"]))

        def transform(self, rows, rng):
            lengths = rng.integers(1, 5)
            x = [row * np.ones(length) for row, length in zip(rows["x"], lengths, strict=True)]
            return {"x": x, "city": rows["city"]}

    return Prepared()


def test_rays_preprocessors_are_fitted_by_ray_and_tasks_give_the_bits_of_the_worker(ray_session, tmp_path):
    import ray

    source, part = load_sources(prepared())["train"], Part(StepPlan(64, 8, seed=2), 0, 1, 3, 43)
    options = {"row_bytes": source.row_bytes, "chunk_bytes": 900, "memory_bytes": 1e8, "cpus": 2.0}
    tasks = joined(list(ray_blocks(ray.put(source), part, **options)))
    here = joined(list(LocalBlocks(source, part, chunk_bytes=1)))
    for name in ("x", "city"):
        assert flat_values(tasks[name]).tobytes() == flat_values(here[name]).tobytes()
    assert tasks["x"].offsets.tolist() == here["x"].offsets.tolist()
    rows = source.source.read(np.arange(64))
    assert rows["city"][:4].tolist() == [2, 1, 0, 1]
    assert abs(rows["x"].mean()) < 1e-9 and abs(rows["x"].std() - 1) < 1e-9
    preprocessing.save(preprocessor_of(source), str(tmp_path))
    again = preprocessing.apply(preprocessing.load(str(tmp_path)), prepared().datasets()["train"])
    assert again["x"].tobytes() == rows["x"].tobytes() and again["city"].tobytes() == rows["city"].tobytes()
