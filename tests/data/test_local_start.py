"""The hand-over from rows that a worker reads itself to rows that tasks deliver."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from scaleray.data import ArraySource, Part, StepPlan, StepStream
from scaleray.data.blocks import LocalBlocks
from scaleray.data.local_start import start_locally
from scaleray.errors import DataError, InputStarvedError

PLAN = StepPlan(60, 6, seed=3)
PART = Part(PLAN, rank=1, world_size=2, first_step=0, last_step=25)
SOURCE = ArraySource({"x": np.arange(60)})


def expected():
    return [PLAN.rank_indices(step, 1, 2).tolist() for step in range(25)]


def blocks():
    return LocalBlocks(SOURCE, PART, chunk_bytes=3 * 8 * 4)


def stream(remote, **more):
    return StepStream(lambda part, demand: start_locally(blocks(), remote, demand, **more), PART, timeout_s=5)


def gated(gate):
    """The same rows, from tasks that start when the gate opens."""
    assert gate.wait(timeout=20)
    yield from LocalBlocks(SOURCE, PART, chunk_bytes=3 * 8 * 7)


@pytest.mark.parametrize("opens_after", [0, 1, 2, 7, 24])
def test_the_order_is_exact_whenever_the_tasks_arrive(opens_after):
    gate = threading.Event()
    seen = []
    for number, batch in enumerate(stream(gated(gate))):
        if number >= opens_after:
            gate.set()
        seen.append(batch.columns["x"].tolist())
    assert seen == expected()


def test_all_rows_can_come_from_the_worker_when_no_task_ever_starts():
    never = threading.Event()
    assert [b.columns["x"].tolist() for b in stream(gated(never))] == expected()
    never.set()


def test_tasks_start_when_the_first_batch_is_asked_for_and_not_before():
    has_started = threading.Event()

    def remote():
        has_started.set()
        yield from blocks()

    batches = stream(remote())
    assert not has_started.wait(timeout=0.5)
    next(batches)
    assert has_started.wait(timeout=10)


def test_an_error_of_a_task_arrives():
    def remote():
        yield from ()
        raise DataError("a file", "damaged", "it cannot be read")

    def slowly():
        yield next(blocks())
        threading.Event().wait(2)  # the tasks fail meanwhile
        yield from ()

    batches = StepStream(lambda part, demand: start_locally(slowly(), remote(), demand), PART, timeout_s=10)
    with pytest.raises(DataError, match="damaged"):
        list(batches)


def test_patience_ends_and_a_late_pipeline_counts_as_starved():
    never = threading.Event()
    batches = StepStream(
        lambda part, demand: start_locally(blocks(), gated(never), demand, patience_s=0.0), PART, timeout_s=1
    )
    with pytest.raises(InputStarvedError):
        list(batches)
    never.set()
