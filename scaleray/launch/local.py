"""The same run in this process, without Ray: for a debugger, and for tests."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from scaleray.data import Part, StepStream
from scaleray.data.sources import Source
from scaleray.data.stream import local_blocks
from scaleray.errors import DataError
from scaleray.launch.trainer import Show
from scaleray.records import EventRecord, WorkerMessage
from scaleray.tracking.recorder import Recorder
from scaleray.training import loop
from scaleray.training.job import Split, TrainJob
from scaleray.training.place import Place
from scaleray.training.weights import save_weights

MIB = 2**20


def run_here(
    job: TrainJob, sources: Mapping[str, Source], recorder: Recorder, *, weights_path: str, show: Show
) -> None:
    """Train with one worker in this process and this thread."""
    streamed = [name for name, split in job.splits.items() if split.is_streamed]
    if streamed:
        raise DataError(f"the {streamed[0]} data", "a Ray Dataset", "--local runs without Ray", "leave --local out")
    device = torch.device("cuda") if job.config.scale.gpus_per_worker else torch.device("cpu")

    def emit(message: WorkerMessage) -> None:
        recorder.log([message])
        show([message])

    threads, was_deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    if device.type == "cpu":
        torch.set_num_threads(max(1, int(job.config.scale.cpus_per_worker)))
    try:
        loop.run(
            job, Place(device=device), open_stream=stream_opener(job, sources, emit), emit=emit,
            save_weights=lambda weights: save_weights(weights, weights_path),
        )  # fmt: skip
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(was_deterministic)


def stream_opener(job: TrainJob, sources: Mapping[str, Source], emit: loop.Emit) -> loop.OpenStream:
    """Opens a split's batches by reading them in a thread of this process."""
    data = job.config.data

    def open_stream(split: Split, part: Part) -> StepStream:
        return StepStream(
            local_blocks(sources[split.name], part, chunk_bytes=data.chunk_mib * MIB), part, row_bytes=split.row_bytes,
            prefetch_bytes=data.prefetch_mib * MIB / 2, timeout_s=data.timeout_s,
            warn=lambda text: emit(EventRecord(text, kind="warning")),
        )  # fmt: skip

    return open_stream
