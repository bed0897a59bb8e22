"""How a worker opens its batches: reading them itself, or having them read by Ray Data's tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from scaleray.data import Part, StepStream
from scaleray.data.blocks import LocalBlocks
from scaleray.data.local_start import LOCAL_CHUNK_STEPS, LOCAL_START_S, Demand, start_locally
from scaleray.data.ray_blocks import ray_blocks, ray_starvation_reason, stream_blocks
from scaleray.data.source import Columns, Source
from scaleray.records.run import Emit, EventRecord
from scaleray.training.setup.job import TRAIN, OpenStream, Split, TrainJob

MIB = 2**20


def local_opener(job: TrainJob, sources: Mapping[str, Source], emit: Emit) -> OpenStream:
    """Opens a split's batches by reading them in a thread of this process, without Ray."""
    data, may_draw = job.config.data, job.config.deterministic

    def open_stream(split: Split, part: Part) -> StepStream:
        return StepStream(
            LocalBlocks(sources[split.name], part, chunk_bytes=data.chunk_mib * MIB, may_draw=may_draw),
            part,
            row_bytes=split.row_bytes,
            prefetch_bytes=data.prefetch_mib * MIB / 2,
            timeout_s=data.timeout_s,
            warn=lambda text: emit(EventRecord(text, kind="warning")),
        )

    return open_stream


def ray_opener(job: TrainJob, sources: Mapping[str, Any], *, input_cpus: float, emit: Emit) -> OpenStream:
    """Opens a split's batches on a worker of Ray Train: rows in memory are read in a thread of it, others by Ray Data's
    tasks, and a Ray Dataset is streamed. sources: object references by split. input_cpus: Ray CPUs of the tasks."""
    import ray
    import ray.train

    data, may_draw = job.config.data, job.config.deterministic

    def planned_blocks(split: Split, part: Part, demand: Demand) -> Iterator[Columns]:
        reference = sources[split.name]
        chunk_bytes = data.chunk_mib * MIB
        source = ray.get(reference)
        here = LocalBlocks(
            source,
            part,
            chunk_bytes=min(chunk_bytes, split.row_bytes * part.rows_per_step * LOCAL_CHUNK_STEPS),
            may_draw=may_draw,
        )
        is_less_than_one_task = split.name != TRAIN and split.num_rows * split.row_bytes <= chunk_bytes
        if split.read_by(data.readers) == "worker" or is_less_than_one_task:
            return here
        tasks = ray_blocks(
            reference,
            part,
            row_bytes=split.row_bytes,
            chunk_bytes=chunk_bytes,
            memory_bytes=data.prefetch_mib * MIB,
            cpus=input_cpus,
        )
        if here.is_read_alone:
            return tasks  # here the model is being built and trained meanwhile, which draws random numbers too
        return start_locally(here, tasks, demand, patience_s=min(LOCAL_START_S, data.timeout_s))

    def open_stream(split: Split, part: Part) -> StepStream:
        demand = Demand()
        if split.is_streamed:
            blocks = stream_blocks(
                ray.train.get_dataset_shard(split.name),
                part,
                shuffle=data.shuffle and split.name == TRAIN,
                window_rows=data.window_rows,
            )
        else:
            blocks = planned_blocks(split, part, demand)
        return StepStream(
            blocks,
            part,
            row_bytes=split.row_bytes,
            demand=demand,
            prefetch_bytes=data.prefetch_mib * MIB / 2,
            timeout_s=data.timeout_s,
            explain_wait=(lambda: None) if isinstance(blocks, LocalBlocks) else ray_starvation_reason(),
            warn=lambda text: emit(EventRecord(text, kind="warning")),
        )

    return open_stream
