"""Transforms over a Ray Dataset: seeded by the row's values, whatever order the rows come in."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
from small_runs import rows

from scaleray.data import Part, Split, StepPlan, StreamSource
from scaleray.data.as_source import for_workload
from scaleray.data.ray_blocks import stream_blocks, transformed_blocks
from scaleray.data.ray_dataset_source import seeds_of_values

NUM = 24
NAMES = np.array([f"row {number}" for number in range(NUM)], dtype=object)
ROWS = {**rows(NUM), "number": np.arange(NUM), "name": NAMES}


class Noisy:
    def transform(self, rows, rng, split):
        lengths = np.array([len(name) for name in rows.pop("name")])
        return {**rows, "noise": rng.random(2), "length": lengths}


class Shard:
    """A shard of a Ray Dataset, in another order each epoch."""

    def __init__(self, order):
        self.order, self.epoch = order, 0

    def iter_batches(self, *, batch_size, batch_format):
        order = np.roll(self.order, self.epoch)
        self.epoch += 1
        for start in range(0, len(order), 5):
            yield {name: column[order[start : start + 5]] for name, column in ROWS.items()}


def noise(ray, orders, *, seed=3, first_step=0):
    """The noise of each row by epoch and number."""
    source = for_workload(StreamSource(SimpleNamespace(), num_rows=NUM), Noisy(), split="train")
    transform = Split.of("train", source).transform
    plan = StepPlan(NUM, 8, seed=seed, is_streamed=True)
    found = {}
    for rank, order in enumerate(orders):
        part = Part(plan, rank, len(orders), first_step, 6)
        blocks = stream_blocks(Shard(order), part, shuffle=False, window_rows=9, allows_text=True)
        epochs, given = itertools.tee(blocks)
        changed = transformed_blocks(given, transform, plan, cpus=1)
        for (epoch, before), after in zip(epochs, changed, strict=True):
            assert after["number"].tolist() == before["number"].tolist()
            assert after["length"].tolist() == [len(f"row {number}") for number in after["number"]]
            found.update(
                {(epoch, int(n)): row.tobytes() for n, row in zip(after["number"], after["noise"], strict=True)}
            )
    return found


def test_a_row_draws_the_same_on_any_number_of_workers_in_any_order_and_after_a_resume(ray):
    alone = noise(ray, [np.arange(NUM)])
    assert len(alone) == len(set(alone.values())) == 2 * NUM  # other numbers in every row and every epoch
    shuffled = np.random.default_rng(0).permutation(NUM)
    assert noise(ray, [shuffled[:12], shuffled[12:]]) == alone
    resumed = noise(ray, [np.arange(NUM)], first_step=4)
    assert resumed and resumed.items() <= alone.items()
    assert noise(ray, [np.arange(NUM)], seed=4).keys() == alone.keys() != set()
    assert noise(ray, [np.arange(NUM)], seed=4) != alone


def test_tasks_run_ahead_of_the_one_that_is_waited_for(ray):
    noise(ray, [np.arange(NUM)])
    assert ray.most_under_way == 2 and ray.num_cpus == 1


def test_rows_that_are_equal_draw_alike_and_every_column_counts():
    plan = StepPlan(4, 2)
    x, y = np.array([[1.0, 2], [1, 2], [1, 3], [1, 2]]), np.array([0, 0, 0, 1])
    seeds = seeds_of_values({"x": x, "y": y}, plan, 0)
    assert seeds[0] == seeds[1] and len(set(seeds.tolist())) == 3
    assert seeds.tolist() == seeds_of_values({"y": y, "x": x}, plan, 0).tolist()
