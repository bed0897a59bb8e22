"""How rows are ordered, read and handed to the workers."""

from __future__ import annotations

from typing import Literal

from scaleray.config.base import Count, NonNegative, Positive, Settings


class DataSettings(Settings):
    """The input pipeline."""

    shuffle: bool = True
    """Take the samples in a new order every epoch, drawn from the run's seed."""
    bucket_by_length: Count | None = None
    """Global batches whose rows are sorted by length together, so that the rows of a batch have nearly one length and
    little is padded; 50 leaves a few per cent. The batches then come in random order. None: rows are mixed."""
    window_rows: Count = 100_000
    """Sources without cheap random access (Parquet): rows shuffled together, from several row groups in random
    order."""
    readers: Literal["auto", "worker", "ray"] = "auto"
    """Where rows are read: in a thread of each `worker`, or by `ray` tasks on any node. auto: arrays in memory and
    token files by the worker, as that is only copying, and a torch Dataset of which a row takes at most 50 us and draws
    no random numbers, measured at the start; all else, decoded, computed or fetched, by tasks. Recorded as `read_by`.
    The rows, their order and their bits are the same."""
    chunk_mib: Positive = 16.0
    """Rows that one Ray task reads for one worker, in MiB; larger has less overhead, smaller starts sooner. A task
    reads fewer rows of a torch Dataset that would take longer than a second."""
    prefetch_mib: Positive = 256.0
    """Data in MiB by which the pipeline of one worker may run ahead of training, and so how many tasks read for it at
    a time: one for each chunk_mib that has room. Rows in memory are copied at most 16 MiB ahead, or two batches."""
    reserved_cpus: NonNegative = 1.0
    """Ray CPUs kept free for input tasks. With 0 the input can starve when training takes every CPU. The tasks of a
    run may use all CPUs that its workers leave, those of other nodes as well; in a study, these alone."""
    timeout_s: Positive = 300.0
    """Seconds that a step may wait for its input before the run fails; the wait is explained long before that. Of
    several workers, one fails a little before the others give up on it, which is after `scale.collective_timeout_s`."""
