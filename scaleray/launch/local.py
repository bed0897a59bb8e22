"""The same run in this process, without Ray: for a debugger, and for tests."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from scaleray.checkpoints.catalog import Catalog
from scaleray.data import Part, StepStream
from scaleray.data.sources import Source
from scaleray.data.stream import local_blocks
from scaleray.errors import DataError
from scaleray.launch.trainer import Show
from scaleray.records import EventRecord, WorkerMessage
from scaleray.tracking.recorder import Recorder
from scaleray.training import loop
from scaleray.training.checkpointing import Checkpointing, Control
from scaleray.training.job import OpenStream, Split, TrainJob
from scaleray.training.place import Place
from scaleray.training.weights import save_weights

MIB = 2**20


def run_here(
    job: TrainJob, sources: Mapping[str, Source], recorder: Recorder, *,
    run_path: str, facts: Mapping[str, Any], show: Show,
) -> None:  # fmt: skip
    """Train with one worker in this process and this thread."""
    streamed = [name for name, split in job.splits.items() if split.is_streamed]
    if streamed:
        raise DataError(f"the {streamed[0]} data", "a Ray Dataset", "--local runs without Ray", "leave --local out")
    device = torch.device("cuda") if job.config.scale.gpus_per_worker else torch.device("cpu")

    def emit(message: WorkerMessage) -> None:
        recorder.log([message])
        show([message])

    place, control = Place(device=device), Control()
    checkpointing = Checkpointing(
        job, place, Catalog.of_run(run_path, job.config.checkpoint.copy_path), emit=emit, control=control, facts=facts,
        before_publishing=lambda: {"mlflow": recorder.durable()},
    )  # fmt: skip
    threads, was_deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    if device.type == "cpu":
        torch.set_num_threads(max(1, int(job.config.scale.cpus_per_worker)))
    try:
        with _leaving_on_sigterm(control):
            loop.run(
                job, place, open_stream=stream_opener(job, sources, emit), emit=emit, checkpointing=checkpointing,
                save_weights=lambda share: save_weights(share, run_path, rank=0),
            )  # fmt: skip
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(was_deterministic)


@contextlib.contextmanager
def _leaving_on_sigterm(control: Control) -> Iterator[None]:
    """A first SIGTERM asks the loop to save and leave after its step; a second one ends the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)

    def on_sigterm(signum: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, before)
        control.wants_leave.set()

    signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def stream_opener(job: TrainJob, sources: Mapping[str, Source], emit: loop.Emit) -> OpenStream:
    """Opens a split's batches by reading them in a thread of this process."""
    data, may_draw = job.config.data, job.config.deterministic

    def open_stream(split: Split, part: Part) -> StepStream:
        return StepStream(
            local_blocks(sources[split.name], part, chunk_bytes=data.chunk_mib * MIB, may_draw=may_draw), part,
            row_bytes=split.row_bytes, prefetch_bytes=data.prefetch_mib * MIB / 2, timeout_s=data.timeout_s,
            warn=lambda text: emit(EventRecord(text, kind="warning")),
        )  # fmt: skip

    return open_stream
