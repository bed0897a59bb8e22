"""Blocks of rows of a part that Ray Data delivers: by tasks on any node, or as the shard of a Ray Dataset.

One execution of Ray Data runs across epochs: each new one costs 0.3 s.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from scaleray.data.blocks import chunks, read_chunk
from scaleray.data.part import Part
from scaleray.data.sample_order import stream_key
from scaleray.data.source import Columns

CHUNKS_PER_EXECUTION = 512  # task descriptions are made when an execution starts, so a long run uses several


def ray_blocks(
    source_ref: Any, part: Part, *, row_bytes: int, chunk_bytes: float, memory_bytes: float, cpus: float
) -> Iterator[Columns]:
    """The chunks of a part, read by Ray Data tasks and delivered in order.

    source_ref: the source in the object store. cpus: Ray CPUs that this rank's tasks may use together.
    """
    import ray
    import ray.data

    everything = chunks(part, row_bytes=row_bytes, chunk_bytes=chunk_bytes)
    while segment := list(itertools.islice(everything, CHUNKS_PER_EXECUTION)):
        dataset = ray.data.range(len(segment), override_num_blocks=len(segment)).map_batches(
            _read_in_task,
            batch_size=None,
            batch_format="numpy",
            num_cpus=min(1.0, cpus),
            fn_args=(source_ref, part, segment),
        )
        dataset.context.enable_progress_bars = False
        options = dataset.context.execution_options
        options.preserve_order = True
        options.resource_limits = options.resource_limits.copy(cpu=cpus, object_store_memory=memory_bytes)
        yield from dataset.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=2)


def _read_in_task(ids: Columns, source_ref: Any, part: Part, segment: list[range]) -> Columns:
    import ray

    source = ray.get(source_ref)
    # a task has its process for itself while it runs
    pieces = [read_chunk(source, part, segment[int(i)], is_alone=True) for i in ids["id"]]
    return pieces[0] if len(pieces) == 1 else {name: np.concatenate([p[name] for p in pieces]) for name in pieces[0]}


def stream_blocks(iterator: Any, part: Part, *, shuffle: bool, window_rows: int) -> Iterator[Columns]:
    """A Ray Dataset's shard for this rank, epoch after epoch, in whatever order it comes."""
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
            length = len(next(iter(block.values())))
            wanted = slice(min(skipped, length), min(length, remaining))
            skipped -= wanted.start
            if wanted.stop > wanted.start:
                yield {name: values[wanted] for name, values in block.items()}
            remaining -= min(length, remaining)
            if not remaining:
                break


def starvation_reason() -> str | None:
    """Sentence that explains a late input under Ray, where the cluster has no CPU free for the reading tasks."""
    import ray

    free = ray.available_resources().get("CPU", 0.0)
    if free >= 0.1:
        return None
    total = ray.cluster_resources().get("CPU", 0.0)
    return (
        f"the cluster has {free:g} of {total:g} CPUs free, so the input tasks cannot run; "
        "training or another job holds the rest. Use fewer workers or a smaller scale.cpus_per_worker"
    )
