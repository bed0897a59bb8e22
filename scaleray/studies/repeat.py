"""One measurement of a size (a "turn"): some steps of the real training, and the same work without communication. The
wait for communication cannot be timed directly: transfers overlap with computing, and workers on shared cores slow each
other down even without communication. So the same micro-batches and the same update run a second time, as a training of
one worker on each of the same workers at the same time, step by step from a common start. The difference is the cost of
communication: waiting for transfers, copies and reductions. Under FSDP and ZeRO-1 the separate update covers all
parameters instead of a share, so their results are slightly too good."""

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil
import torch
import torch.distributed as dist

from scaleray.common.seeding import same_switches
from scaleray.config.batch_noise_scale import NoiseScaleSettings
from scaleray.config.compression import CompressionSettings
from scaleray.config.parallel import Degrees
from scaleray.config.strategy import SharesSettings
from scaleray.config.strategy_traits import traits_of
from scaleray.data import RankBatch, Sources
from scaleray.emulation import is_emulated
from scaleray.errors import RunFailedError
from scaleray.records.published import RankSample
from scaleray.records.run_record import EventRecord, Say, StepRecord, WorkerMessage, WorkerSummary
from scaleray.records.study_record import Repeat
from scaleray.training import loop
from scaleray.training.profile.used_memory import peak_since_reset, reset_peak
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.model_setup import Setup
from scaleray.training.setup.rank_context import RankContext
from scaleray.workload import built_model

STATE_BYTES = 16  # bytes of a parameter with its gradient and two moments, in fp32
MOST_MEMORY = 0.8  # share of the free memory
LEAST_ALONE_STEPS = 10
AT_USUAL_SPEED: Mapping[str, Any] = {"noise_scale": NoiseScaleSettings()}
"""Settings of timed steps: without noise measurement, whose method differs for a single worker."""
NUM_TRANSFERS = 7


def take_repeat(
    job: TrainJob,
    place: RankContext,
    *,
    round: int,
    sources: Sources,
    say: Say,
    samples: list[RankSample] | None = None,
) -> Repeat:
    """Train some steps and time them. Collective over the place's group; rank 0 has the group's result. samples:
    receives this worker's samples. In every second round, the work without communication comes first, so that drift of
    the machine favours neither."""
    is_alone_first = round % 2 == 1
    alone = _step_alone(job, place, sources) if is_alone_first else None
    reset_peak(place.device)
    steps: list[StepRecord] = []
    watcher = _Watcher()
    with same_switches():
        emit = emit_to(steps, say, place, samples)
        summary = loop.run(job, place, sources=sources, emit=emit, probe=watcher)
    _check_complete(job, place, steps, summary)
    peak = peak_since_reset(place.device)
    if not is_alone_first:
        alone = _step_alone(job, place, sources)
    own = {
        "node": place.node,
        "peak": peak,
        "wait": summary.input_wait_share or 0.0,
        "hardware": {**summary.hardware, "device": summary.device.partition(":")[0]},
    }
    facts = place.gathered(own)
    sent = statistics.fmean(step.sent_bytes for step in steps) if steps else 0.0
    hardware = [fact["hardware"] for fact in facts]
    return Repeat(
        step_times_s=[step.step_time_s for step in steps],
        input_waits_s=[step.input_wait_s for step in steps],
        input_share=max(fact["wait"] for fact in facts),
        alone_s=alone[0] if alone else None,
        slowest_alone_s=alone[1] if alone else None,
        comm_s=_transfer_s(job, place, sent),
        sent_bytes=sent,
        peak_memory_bytes=max(fact["peak"] for fact in facts),
        hardware=[kind for number, kind in enumerate(hardware) if kind not in hardware[:number]],
        is_emulated=watcher.is_emulated,
        measured_at=time.time(),
        round=round,
        placement=dict(Counter(fact["node"] for fact in facts)),
    )


class _Watcher:
    """Probe that only stores a reference to the model."""

    is_emulated = False

    def on_setup(self, setup: Setup) -> None:
        self.is_emulated = is_emulated(setup.parallel.module)

    def on_batch(self, batch: RankBatch) -> None: ...

    def on_gradients(self, correction: float) -> None: ...

    def on_step(self, result: Any, learning_rate: float) -> None: ...


class _Starter(_Watcher):
    """Probe that starts the steps of all workers together. spent_s: seconds that this took in each step."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.spent_s = device, list[float]()

    def on_batch(self, batch: RankBatch) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # what is still running belongs to the steps
        started = time.perf_counter()
        dist.barrier()
        self.spent_s.append(time.perf_counter() - started)


def _check_complete(job: TrainJob, place: RankContext, steps: Sequence[StepRecord], summary: WorkerSummary) -> None:
    if place.rank == 0 and len(steps) < job.recipe.total_steps:
        raise RunFailedError(
            f"the training ended after {len(steps)} of {job.recipe.total_steps} steps: {summary.verdict}"
        )


def emit_to(
    steps: list[StepRecord], say: Say, place: RankContext, samples: list[RankSample] | None = None
) -> Callable[[WorkerMessage], None]:
    """Function that collects the steps of a training and forwards messages of its first worker. samples: receives this
    worker's samples."""

    def emit(message: WorkerMessage) -> None:
        if isinstance(message, StepRecord):
            steps.append(message)
        elif isinstance(message, RankSample) and samples is not None:
            samples.append(message)
        elif isinstance(message, EventRecord) and place.rank == 0:
            say(message.text)

    return emit


def _step_alone(job: TrainJob, place: RankContext, sources: Sources) -> list[float] | None:
    """Seconds of a step's work without communication, as [mean, maximum] over the workers of medians over the steps.
    Collective."""
    if place.world_size == 1 or job.degrees.model > 1:
        return None
    if not _fits_whole(job, place):
        return None
    own, mine = alone(job, place.rank), RankContext(device=place.device)
    steps: list[StepRecord] = []
    starter = _Starter(place.device)
    with same_switches():
        emit = emit_to(steps, lambda text: None, mine)
        summary = loop.run(own, mine, sources=sources, emit=emit, probe=starter)
    _check_complete(own, mine, steps, summary)
    times = [max(1e-9, s.step_time_s - s.input_wait_s - b) for s, b in zip(steps, starter.spent_s, strict=True)]
    everyone = place.gathered(times)
    by_step = list(zip(*everyone, strict=True))[len(times) // 2 :]  # the first half warms up
    return [statistics.median(map(statistics.fmean, by_step)), statistics.median(map(max, by_step))]


def alone(job: TrainJob, rank: int) -> TrainJob:
    """Train on this worker's share of each step, as a training of one worker."""
    recipe = job.recipe
    rows = recipe.worker_shares[rank] if recipe.worker_shares else recipe.per_worker_batch_size
    values = {
        "strategy": "single",
        "global_batch_size": rows,
        "per_worker_batch_size": rows,
        "worker_shares": None,
        "measure_shares_every_steps": None,
        "degrees": Degrees(),
        "total_steps": max(LEAST_ALONE_STEPS, recipe.total_steps // 2),
        "accumulation_steps": math.ceil(rows / recipe.micro_batch_size),
    }
    settings = {"scale.workers": 1, "shares": SharesSettings(), "compression": CompressionSettings()}
    return job.changed(settings, values=values, workers=1)


def _fits_whole(job: TrainJob, place: RankContext) -> bool:
    """Whether every worker has memory for the whole model that the training shards. Collective."""
    if traits_of(job.recipe.strategy).sharding == "none":
        return True
    with torch.device("meta"):
        try:
            parameters = sum(p.numel() for p in built_model(job.workload).parameters())
        except (Exception, SystemExit):  # a workload's code need not know that device: then nobody can tell
            parameters = 0
    free = float(psutil.virtual_memory().available) / place.local_world_size
    if place.device.type == "cuda":
        free = float(torch.cuda.mem_get_info(place.device)[0])
    return not place.all_reduce_max([float(parameters * STATE_BYTES > MOST_MEMORY * free)])[0]


def _transfer_s(job: TrainJob, place: RankContext, sent_bytes: float) -> float | None:
    """Seconds to send a step's gradients through the group in DDP's buckets, without other work. Collective."""
    is_plain = job.recipe.strategy == "ddp" and job.config.compression.name == "none"
    (num_bytes,) = place.all_reduce_max([sent_bytes])
    if place.world_size == 1 or not is_plain or not num_bytes:
        return None
    bucket = int(job.config.strategy.bucket_size_mib * 2**20)
    sizes = [bucket] * int(num_bytes // bucket) + ([int(num_bytes % bucket)] if num_bytes % bucket else [])
    buffers = [torch.zeros(max(1, size // 4), device=place.device) for size in sizes]
    times = []
    for _ in range(NUM_TRANSFERS):
        dist.barrier()
        started = time.perf_counter()
        for work in [dist.all_reduce(buffer, async_op=True) for buffer in buffers]:
            work.wait()
        if place.device.type == "cuda":
            torch.cuda.synchronize(place.device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])
