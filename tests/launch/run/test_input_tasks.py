"""Rows read by Ray tasks in processes of their own: the bits of a worker's own reading, and each source unpickled
once."""

from __future__ import annotations

import os
import uuid

import numpy as np
import pytest
import torch

from scaleray.data import Part, StepPlan, as_source
from scaleray.data.blocks import LocalBlocks
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
