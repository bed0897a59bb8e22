"""Count the FLOPs of a sample during a run, for its model FLOPs utilisation.

Counting runs in a separate process, since it imports torch and calls the user's code, which must not affect the
training's random numbers or GPUs. It is skipped if the devices' peak is certainly unknown, since there is no
utilisation without it."""

import contextlib
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from scaleray.common.guarded import guarded
from scaleray.data import TRAIN
from scaleray.data.source_interface import Source
from scaleray.errors import first_line
from scaleray.launch.workers.loaded_workload import ship_user_code
from scaleray.records.published import CountedFlops
from scaleray.records.run_record import EventRecord, WorkerMessage
from scaleray.training.setup.job import TrainJob

NUM_ROWS = 4
LIMIT_S = 300.0
NICE = 19


@contextlib.contextmanager
def counted_flops(
    job: TrainJob, sources: Mapping[str, Source], tell: Callable[[list[WorkerMessage]], None]
) -> Iterator[None]:
    """Count the cost of a sample during a run, and pass on the cost or the reason for its absence."""
    if not _is_wanted(job):
        yield
        return
    try:  # before it trains: a training changes what its workload holds
        given = _pickled(job, sources[TRAIN])
    except Exception as exc:  # a run does not end for what only watches it
        tell([_not_counted(exc)])
        yield
        return
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        guarded([sys.executable, "-m", "scaleray.launch.run.run_flop_count"]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    is_over = threading.Event()

    def wait() -> None:
        with contextlib.suppress(Exception):  # whoever is told may be gone
            message = _counted_by(process, given)
            if not is_over.is_set():
                tell([message])

    threading.Thread(target=wait, name="scaleray-flops", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
        process.terminate()


def _is_wanted(job: TrainJob) -> bool:
    has_peak = job.config.study.peak_tflops is not None or bool(job.config.scale.gpus)
    return job.config.monitoring.flops_per_sample is None and has_peak and not job.splits[TRAIN].is_streamed


def _pickled(job: TrainJob, source: Source) -> bytes:
    from ray import cloudpickle  # by value: user code that exists in the user's folder only

    ship_user_code(job.workload)
    rows = source.read(np.arange(min(NUM_ROWS, source.num_rows)))
    pickled: bytes = cloudpickle.dumps((job.workload, rows, job.config.precision, job.splits[TRAIN].gives_tuples))
    return pickled


def _counted_by(process: subprocess.Popen[bytes], given: bytes) -> WorkerMessage:
    """Count in a separate process, and return the result."""
    try:
        answer = json.loads(process.communicate(given, timeout=LIMIT_S)[0])
    except (OSError, ValueError, subprocess.TimeoutExpired) as exc:
        process.terminate()
        return _not_counted(exc)
    return CountedFlops(float(answer["flops"])) if "flops" in answer else _not_counted(answer["problem"])


def _not_counted(why: Exception | str) -> EventRecord:
    reason = why if isinstance(why, str) else _to_text(why)
    text = f"model FLOPs utilisation is not published, because the FLOPs of a sample could not be counted: {reason}"
    return EventRecord(f"{text}; set monitoring.flops_per_sample")


def _to_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def main() -> int:
    """Count the FLOPs for the description on standard input, and print the result as JSON."""
    os.nice(NICE)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what a workload prints must not mix with the answer
            workload, rows, precision, gives_tuples = pickle.load(sys.stdin.buffer)  # of the process that started this
            import torch

            from scaleray.training.flop_counter import profile_workload

            torch.set_num_threads(1)
            answer: dict[str, Any] = {
                "flops": profile_workload(workload, rows, precision, gives_tuples=gives_tuples).flops
            }
    except (Exception, SystemExit) as exc:
        answer = {"problem": _to_text(exc)}
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
