"""Blocks of rows of a part, delivered by Ray: by tasks on any node, or as the shard of a Ray Dataset."""

import functools
import itertools
import math
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from scaleray.data.blocks import chunks, read_chunk
from scaleray.data.rank_part import Part
from scaleray.data.ray_dataset_source import seeds_of_values
from scaleray.data.row_random import RowRandom
from scaleray.data.sample_order import StepPlan, stream_key
from scaleray.data.source_interface import Columns, Source, as_column, rows_in
from scaleray.data.transformed import Step


def ray_blocks(
    source_ref: Any, part: Part, *, row_bytes: int, chunk_bytes: float, memory_bytes: float, cpus: float
) -> Iterator[Columns]:
    """Yield the chunks of a part, read by Ray tasks on any node and delivered in order, in read-only memory.

    source_ref: the source in the object store. cpus: total Ray CPUs that this rank's tasks may use.
    """
    import ray

    read = ray.remote(_read_in_task).options(num_cpus=min(1.0, cpus), scheduling_strategy="SPREAD")
    part_ref = ray.put(part)
    remaining = chunks(part, row_bytes=row_bytes, chunk_bytes=chunk_bytes)
    window_rows = 0 if part.plan.group_sizes is None else min(part.plan.window_rows, part.plan.num_samples)
    largest = max(chunk_bytes, max(part.rows_per_step, window_rows / part.world_size) * row_bytes)
    # for each CPU a task that runs and one that can begin at once, as far as their rows have room
    most = max(2, min(2 * math.ceil(cpus), int(memory_bytes // largest)))
    under_way: deque[Any] = deque()
    while True:
        for steps in itertools.islice(remaining, most - len(under_way)):
            under_way.append(read.remote([source_ref], part_ref, steps))
        if not under_way:
            return
        yield ray.get(under_way.popleft())


def _read_in_task(sources: list[Any], part: Part, steps: range) -> Columns:
    # a task has its process for itself while it runs
    return read_chunk(_source_in_task(sources[0]), part, steps, is_alone=True)


@functools.lru_cache(maxsize=2)  # a training alternates between two splits
def _source_in_task(reference: Any) -> Source:
    """The source, unpickled once in each reading process instead of for every task."""
    import ray

    source: Source = ray.get(reference)
    return source


def stream_blocks(
    iterator: Any, part: Part, *, shuffle: bool, window_rows: int, allows_text: bool = False
) -> Iterator[tuple[int, Columns]]:
    """Yield this rank's shard of a Ray Dataset, epoch after epoch, in order of arrival, as the number of the epoch and
    a block of rows. allows_text: see `as_column`."""
    batch_rows = max(1, part.plan.global_batch_size // part.world_size)
    first_epoch, passed = part.plan.place(part.first_step)
    skipped = passed // part.world_size  # read again and left out: a stream cannot start in the middle
    for epoch in range(first_epoch, part.plan.place(part.last_step - 1)[0] + 1):
        remaining = part.plan.num_samples // part.world_size
        shuffling = (
            {
                "local_shuffle_buffer_size": window_rows,
                "local_shuffle_seed": stream_key(part.plan.seed, "data", epoch) % 2**32,
            }
            if shuffle
            else {}
        )
        for block in iterator.iter_batches(batch_size=max(batch_rows, 1024), batch_format="numpy", **shuffling):
            length = rows_in(block)
            wanted = slice(min(skipped, length), min(length, remaining))
            skipped -= wanted.start
            if wanted.stop > wanted.start:
                rows = {name: values[wanted] for name, values in block.items()}
                is_plain = lambda column: column.dtype.kind in "biufc"
                made = {n: c if is_plain(c) else as_column(n, c, allows_text=allows_text) for n, c in rows.items()}
                yield epoch, made
            remaining -= min(length, remaining)
            if not remaining:
                break


def transformed_blocks(
    blocks: Iterator[tuple[int, Columns]], transform: Step, plan: StepPlan, *, cpus: float
) -> Iterator[Columns]:
    """Yield the blocks of a stream, transformed by Ray tasks, in order. cpus: see `ray_blocks`."""
    import ray

    change = ray.remote(_change_in_task).options(num_cpus=min(1.0, cpus), scheduling_strategy="SPREAD")
    step = ray.put(transform)
    under_way: deque[Any] = deque()
    most = max(2, 2 * math.ceil(cpus))
    for epoch, rows in blocks:
        under_way.append(change.remote([step], rows, seeds_of_values(rows, plan, epoch)))
        if len(under_way) >= most:
            yield ray.get(under_way.popleft())
    while under_way:
        yield ray.get(under_way.popleft())


def _change_in_task(transforms: list[Any], rows: Columns, seeds: np.ndarray) -> Columns:
    transform: Any = _source_in_task(transforms[0])
    changed: Columns = transform(rows, RowRandom(seeds))
    return changed


def starvation_reason() -> str | None:
    """Explanation of late input under Ray if the cluster has no free CPU for the reading tasks."""
    import ray

    free = ray.available_resources().get("CPU", 0.0)
    if free >= 0.1:
        return None
    total = ray.cluster_resources().get("CPU", 0.0)
    return (
        f"the cluster has {free:g} of {total:g} CPUs free, so the input tasks cannot run; training or another job uses "
        f"the others. Use fewer workers or a smaller scale.cpus_per_worker"
    )
