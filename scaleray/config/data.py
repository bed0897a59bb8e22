"""Settings of the input pipeline: order of rows, reading, and distribution to the workers."""

from typing import Literal

from scaleray.config.base import Count, NonNegative, Positive, Settings


class DataSettings(Settings):
    """The input pipeline."""

    shuffle: bool = True
    """Shuffle the samples every epoch, in an order drawn from the run's seed."""
    bucket_by_length: Count | None = None
    """Number of global batches whose rows are sorted by length together, so that the rows of a batch have similar
    lengths and little padding; 50 leaves a few per cent. The batches are then shuffled. None: no sorting."""
    window_rows: Count = 100_000
    """Sources without cheap random access (Parquet): number of rows shuffled together, from several row groups in
    random order."""
    readers: Literal["auto", "worker", "ray"] = "auto"
    """Reader of the rows: a thread of each `worker`, or `ray` tasks on any node. auto: the worker reads arrays in
    memory and token files, which only need copying, and a torch Dataset without random numbers whose rows take at most
    50 us, measured at the start; tasks read all other data. Recorded as `read_by`. The rows and their order are
    identical."""
    chunk_mib: Positive = 16.0
    """MiB of rows that one Ray task reads for one worker; larger chunks have less overhead, smaller ones start sooner.
    A task reads fewer rows of a torch Dataset if they would take longer than a second."""
    prefetch_mib: Positive = 256.0
    """MiB of data by which the pipeline of one worker may run ahead of training, which also limits the number of
    concurrent tasks: one per chunk_mib. Rows in memory are copied at most 16 MiB or two batches ahead."""
    reserved_cpus: NonNegative = 1.0
    """Ray CPUs reserved for input tasks. With 0, the input can starve when training uses every CPU. The tasks of a run
    may use all CPUs that its workers leave free, on other nodes too; those of a study only the reserved ones."""
    timeout_s: Positive = 300.0
    """Seconds that a step may wait for its input before the run fails; a warning with the reason appears much earlier.
    With several workers, it is reduced so that this error precedes `scale.collective_timeout_s` on the other
    workers."""
