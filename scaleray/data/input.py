"""Rows of a training as read by one worker, directly or through Ray tasks."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from scaleray.config.data import DataSettings
from scaleray.data.blocks import LocalBlocks
from scaleray.data.collate_ahead import CollateAhead
from scaleray.data.local_start import LOCAL_CHUNK_STEPS, LOCAL_START_S, Demand, start_locally
from scaleray.data.not_finite import RowsOfStep, look_at_step
from scaleray.data.rank_part import Part
from scaleray.data.ray_blocks import ray_blocks, starvation_reason, stream_blocks, transformed_blocks
from scaleray.data.sample_order import StepPlan
from scaleray.data.source_interface import TRAIN, Columns, Source
from scaleray.data.split_facts import Split
from scaleray.data.stream import StepStream
from scaleray.records.text.units import MIB

READ_S = 1.0  # rows that are read together take no longer, however small they are: training waits for the first
COPIES_AHEAD_BYTES = 2**24  # rows in memory need not be far ahead, and more would leave the caches


@dataclass(frozen=True)
class RaySources:
    """Sources in Ray's object store, whose rows can be read by tasks. Ray Datasets are not included."""

    references: Mapping[str, Any]
    """Object references by split."""
    cpus: float
    """Total Ray CPUs that the tasks of one worker may use."""


Sources = Mapping[str, Source] | RaySources
"""Input of a training: sources by split that each worker reads itself, or sources in Ray."""


@dataclass(frozen=True)
class Input:
    """Input of one worker. A thread of its process reads the sources that `Split.read_by` assigns to it, or all sources
    without Ray. Ray tasks read all other rows; a Ray Dataset is streamed.

    may_draw, others_wait_s, warn: see LocalBlocks and StepStream."""

    sources: Sources
    settings: DataSettings
    may_draw: bool
    others_wait_s: Callable[[], float]
    warn: Callable[[str], None]

    def open(self, split: Split, part: Part, collate: CollateAhead | None = None) -> StepStream:
        """Open the batches of a part, which are read ahead of training. collate: see StepStream."""
        copies = split.is_in_memory and self._reads_here(split)
        return StepStream(
            lambda part, demand: self._blocks(split, part, demand),
            part,
            row_bytes=split.row_bytes,
            prefetch_bytes=min(self.settings.prefetch_mib * MIB / 2, COPIES_AHEAD_BYTES if copies else math.inf),
            timeout_s=self.settings.timeout_s,
            others_wait_s=self.others_wait_s,
            explain_wait=(lambda: None) if self._reads_here(split) else starvation_reason,
            warn=self.warn,
            collate=collate,
        )

    def look_at_step(self, split: Split, plan: StepPlan, number: int) -> RowsOfStep | None:
        """Read the rows of a step, counted from 1, again to find non-finite values. None if that is impossible."""
        if split.is_streamed:
            return None
        try:
            return look_at_step(self._source(split.name), plan, number - 1)
        except Exception:  # of a source that gives its rows once; there is an error to report already
            return None

    def _reads_here(self, split: Split) -> bool:
        """Whether a thread of this process, rather than Ray tasks, reads the rows."""
        if not isinstance(self.sources, RaySources):
            return True
        if split.read_by(self.settings.readers) == "worker":
            return True
        is_less_than_one_task = split.num_rows * split.row_bytes <= self.settings.chunk_mib * MIB
        return split.name != TRAIN and is_less_than_one_task and not split.is_streamed

    def _blocks(self, split: Split, part: Part, demand: Demand) -> Iterable[Columns]:
        settings = self.settings
        chunk_bytes = settings.chunk_mib * MIB
        if split.row_s:
            chunk_bytes = min(chunk_bytes, split.row_bytes * READ_S / split.row_s)
        if split.is_streamed:
            import ray.train

            shard, shuffle = ray.train.get_dataset_shard(split.name), settings.shuffle and split.name == TRAIN
            has_transform = split.transform is not None
            blocks = stream_blocks(
                shard, part, shuffle=shuffle, window_rows=settings.window_rows, allows_text=has_transform
            )
            if split.transform is None:
                return (rows for _, rows in blocks)
            assert isinstance(self.sources, RaySources)
            return transformed_blocks(blocks, split.transform, part.plan, cpus=self.sources.cpus)
        here = LocalBlocks(
            self._source(split.name),
            part,
            chunk_bytes=min(chunk_bytes, split.row_bytes * part.rows_per_step * LOCAL_CHUNK_STEPS),
            may_draw=self.may_draw,
        )
        if not isinstance(self.sources, RaySources) or self._reads_here(split):
            return here
        tasks = ray_blocks(
            self.sources.references[split.name],
            part,
            row_bytes=split.row_bytes,
            chunk_bytes=chunk_bytes,
            memory_bytes=settings.prefetch_mib * MIB,
            cpus=self.sources.cpus,
        )
        if here.is_read_alone:
            return tasks  # here the model is being built and trained meanwhile, which draws random numbers too
        return start_locally(here, tasks, demand, patience_s=min(LOCAL_START_S, settings.timeout_s))

    def _source(self, name: str) -> Source:
        if not isinstance(self.sources, RaySources):
            return self.sources[name]
        import ray

        source: Source = ray.get(self.sources.references[name])
        return source
