"""The trainings in which faults are planted: which there are, and how each runs on two gloo processes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
import torch

from planted.faults import (
    BATCH,
    EVERY,
    FAULTS,
    FORWARD_S,
    IN_NAMESPACE,
    LAYER_PARAMETERS,
    REAL_LINK,
    ROW_BYTES,
    STEPS,
    Planted,
    planted_around,
)
from scaleray.checkpoints.catalog import Catalog
from scaleray.config import load_config
from scaleray.config.recipe.derive import derive
from scaleray.config.recipe.values import DataSize
from scaleray.data import TRAIN, Split
from scaleray.data.as_source import as_source
from scaleray.launch.workers.gloo import GlooProcesses, UserCode, gloo_processes
from scaleray.profiling.run_profile import run_profile
from scaleray.profiling.verdict.findings import Verdict
from scaleray.profiling.verdict.of_run import FIRST_STEPS, signals_of
from scaleray.profiling.verdict.signals import Facts
from scaleray.profiling.verdict.verdict import evaluate
from scaleray.records.profile_record import RunProfile
from scaleray.records.run_record import WorkerSummary
from scaleray.training import loop
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.state.checkpointing import Checkpointing

WARM_UP = {
    "seed": 99,
    "layers": 6,
    "layer": 0,
    "rank": 0,
    "strategy": "ddp",
    "fault": "healthy",
    "size": 0.0,
    "step_s": 0.0,
}
"""Settings of the first training of a process, which is slower than all others."""


def cases(strategies: Sequence[str], sizes: Sequence[float], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Settings of every training: each seed draws a model, a culprit and a layer of its own. The healthy ones first."""
    found = []
    for seed in seeds:
        draw = random.Random(seed)
        layers = draw.randint(5, 8)
        shared = {"seed": seed, "layers": layers, "layer": draw.randrange(layers), "rank": draw.randrange(2)}
        for strategy in strategies:
            found.append({**shared, "strategy": strategy, "fault": "healthy", "size": 0.0})
            for fault in FAULTS[1:]:
                if fault.name == REAL_LINK or (fault.name == "slow link, emulated" and strategy == "fsdp"):
                    continue  # what is emulated is DDP's; `--tc` has a real one for all
                found += [{**shared, "strategy": strategy, "fault": fault.name, "size": size} for size in sizes]
    return found


def real_link_cases(strategies: Sequence[str], sizes: Sequence[float], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """The same trainings healthy and over a slow link of the kernel, in a namespace of their own."""
    healthy = [one for one in cases(strategies, [], seeds) if one["fault"] == "healthy"]
    return [
        {**one, "fault": fault, "size": size, "in_namespace": True}
        for one in healthy
        for fault, size in [("healthy", 0.0), *((REAL_LINK, size) for size in sizes)]
    ]


@contextlib.contextmanager
def slow_link(settings: dict[str, Any]) -> Iterator[None]:
    """The loopback of this namespace with the bandwidth that costs a step the planted share, about."""
    if settings["fault"] != REAL_LINK:
        yield
        return
    num_bytes = settings["layers"] * LAYER_PARAMETERS * 4
    delay_s, hidden_s = settings["size"] * settings["step_s"], 2 * FORWARD_S * (1 - 1 / settings["layers"])
    # both ranks send over it: an all-reduce twice the gradients, behind a backward pass; FSDP and ZeRO-1 what is seen
    seconds = {"ddp": (hidden_s + delay_s) / 2, "zero1": delay_s, "fsdp": delay_s / 3}[settings["strategy"]]
    limit = f"rate {8 * num_bytes / seconds:.0f}bit burst 2000 limit 4mb"
    subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", "tbf", *limit.split()], check=True)
    try:
        yield
    finally:
        subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=True)


def enter_namespace() -> None:
    """Run this command again in a network of its own, whose loopback sends packets as long as an Ethernet's."""
    if os.environ.get(IN_NAMESPACE) is None:
        os.execvpe("unshare", ["unshare", "--net", sys.executable, *sys.argv], {**os.environ, IN_NAMESPACE: "1"})
    subprocess.run(["ip", "link", "set", "lo", "up", "mtu", "1500"], check=True)


def key_of(settings: dict[str, Any]) -> str:
    """Name of a training."""
    name = "{strategy}/{fault}/{size}/{seed}".format(**settings)
    return f"{name} in a namespace" if settings.get("in_namespace") else name


def kind_of(settings: dict[str, Any]) -> tuple[str, bool]:
    """Trainings that take the same time without a fault, whatever their seed: the median of the healthy ones, which a
    hiccup of the machine does not move, is what a faulty one is held against."""
    return settings["strategy"], bool(settings.get("in_namespace"))


def healthy_key(settings: dict[str, Any]) -> str:
    """Name of the same training without a fault."""
    return key_of({**settings, "fault": "healthy", "size": 0.0})


def with_retries(profile: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """The profile with the allocator's statistics that a device would have had: a retry in every 5th step."""
    if settings["fault"] != "memory retries":
        return profile
    first = profile["buckets"]["first_step"]
    steps = range(first, first + profile["buckets"]["count"])
    for rank in profile["ranks"]:
        rank["memory"]["series"]["retries"] = [float(step // EVERY) for step in steps]
    return profile


def verdict_on(result: dict[str, Any]) -> Verdict:
    """The verdict on a finished training."""
    settings = result["settings"]
    profile = RunProfile.of(with_retries(result["profile"], settings))
    assert profile is not None
    facts = Facts(2, settings["strategy"], 1, BATCH)
    return evaluate(signals_of(profile), facts)


def step_time(result: dict[str, Any]) -> float:
    """Mean time of a step in steady state, with its part of evaluations and checkpoints."""
    series = [rank["step"]["series"] for rank in result["profile"]["ranks"]]
    return statistics.fmean(statistics.fmean(one[FIRST_STEPS:]) for one in series)


def training(place: RankContext, settings: dict[str, Any]) -> dict[str, Any]:
    """One training; what all ranks measured of it, on rank 0."""
    torch.set_num_threads(1)
    planted = Planted(settings, place.rank)
    flags = {
        "workload.name": "planted.faults:Planted",
        "batch.global_size": BATCH,
        "optimizer.learning_rate": 0.01,
        "stop.after": f"{STEPS} steps",
        "scale.workers": place.world_size,
        "strategy.name": settings["strategy"],
        # a bucket a layer
        "strategy.bucket_size_mib": LAYER_PARAMETERS * 4 / 2**20,
        "data.readers": "worker",
        # a batch at a time, two ahead
        "data.chunk_mib": ROW_BYTES * BATCH / 2 / 2**20,
        "data.prefetch_mib": ROW_BYTES * BATCH / 2**20,
        "tracking.system_metrics": False,
        "checkpoint.every_minutes": None,
        "seed": settings["seed"],
    }
    if planted.name in ("heavy evaluation", "two at once"):
        flags["evaluation.every"] = f"{planted.evaluation_every} steps"
    if planted.name == "synchronous checkpoint":
        flags |= {"checkpoint.every": f"{EVERY} steps", "checkpoint.is_asynchronous": False}
    config = load_config(flags=flags, environ={})
    sources = {name: as_source(value, split=name) for name, value in planted.datasets().items()}
    recipe = derive(config, DataSize(sources[TRAIN].num_rows))
    splits = {name: Split.of(name, source) for name, source in sources.items()}
    job = TrainJob(config, recipe, planted, splits, time.time())
    messages: list[Any] = []
    with tempfile.TemporaryDirectory() as folder, planted_around(planted, place):
        shared = [folder]
        torch.distributed.broadcast_object_list(shared)
        saves = planted.name == "synchronous checkpoint"
        checkpointing = Checkpointing(job, place, Catalog.of_run(shared[0]), emit=messages.append) if saves else None
        loop.run(job, place, sources=sources, emit=messages.append, checkpointing=checkpointing)
        torch.distributed.barrier()
    [summary] = [message for message in messages if isinstance(message, WorkerSummary)]
    everyone: list[Any] = [None] * place.world_size
    torch.distributed.all_gather_object(everyone, summary.profile)
    profile = run_profile(everyone)
    assert profile is not None
    return {"profile": dataclasses.asdict(profile), "buckets": settings["layers"]}


def run_all(todo: Sequence[dict[str, Any]], kept: Path, minutes: float) -> bool:
    """Train what is missing, until the time is over; whether all is there. Sizes are shares of the healthy step of the
    same seed, which comes before its faults."""
    done = {one["key"]: one for one in map(json.loads, kept.read_text().splitlines())} if kept.exists() else {}
    left = [settings for settings in todo if key_of(settings) not in done]
    ends_at = time.monotonic() + 60 * minutes
    with gloo_processes(2, UserCode(None, {}, None, None), timeout_s=60) as processes, kept.open("a") as file:
        measured(processes, WARM_UP)
        for number, settings in enumerate(left):
            if time.monotonic() > ends_at:
                harness.log(f"{len(left) - number} trainings are left")
                return False
            healthy = done.get(healthy_key(settings))
            result = measured(processes, {**settings, "step_s": step_time(healthy) if healthy else 0.0})
            done[key_of(settings)] = result
            file.write(json.dumps({"key": key_of(settings), **result}) + "\n")
            file.flush()
            if number % 20 == 0:
                harness.log(f"{number + 1} of {len(left)}: {key_of(settings)}: {verdict_on(result).sentence[:80]}")
    return True


def measured(processes: GlooProcesses, settings: dict[str, Any]) -> dict[str, Any]:
    """One training."""
    with slow_link(settings):
        return {"settings": settings, **processes.run(2, training, settings, workload=None)}
