"""Kills workers at random moments, and compares what the training computes with an undisturbed one.

    python jobs/benchmarks/recovery.py --kills 20 --seed 0

Three gloo processes and a spare train a network with dropout and BatchNorm; a further process replaces each one that is
killed, as Ray does. Prints one line for each run: kills, whether weights and losses are equal to the bit, steps lost or
recorded with two values, and how long training stood still after each kill."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import scaleray
from scaleray.checkpoints.catalog import Catalog
from scaleray.config import load_config
from scaleray.config.recipe.derive import derive
from scaleray.data import TRAIN, Split, load_sources
from scaleray.records.run_record import StepRecord
from scaleray.training import loop
from scaleray.training.process_group import interface_of
from scaleray.training.recovery.coordinator import Coordinator
from scaleray.training.recovery.member import EXIT_CODE, Group, Member
from scaleray.training.recovery.recovering import train_in_groups
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.state.checkpointing import Checkpointing
from scaleray.training.state.live_state import LiveState

HOST, TOKEN, RANKS, SPARES, SILENT_S = "127.0.0.1", "benchmark", 3, 1, 10.0


class Times(scaleray.Callback):
    """Wall clock at the end of each step in this process."""

    def __init__(self) -> None:
        self.ended: dict[int, float] = {}

    def on_step(self, run: Any) -> None:
        self.ended[run.step] = time.time()


class Network(scaleray.Workload):
    """Classification of fixed random rows. width: of the hidden layers; 512 gives 0.6 million parameters."""

    def __init__(self, width: int = 512) -> None:
        self.width, self.times = width, Times()

    def build_model(self) -> nn.Module:
        width = self.width
        hidden = [nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.ReLU()]
        return nn.Sequential(nn.Linear(64, width), *hidden, *hidden, nn.Linear(width, 10))

    def datasets(self) -> dict[str, Any]:
        draw = np.random.default_rng(0)
        return {"train": {"x": draw.normal(size=(1000, 64)).astype(np.float32), "y": draw.integers(0, 10, 1000)}}

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])

    def callbacks(self) -> list[Any]:
        return [self.times]


def job_of(steps: int, workload: Network) -> tuple[TrainJob, dict[str, Any]]:
    settings = {
        "workload.name": "recovery:Network",
        "batch.global_size": 96,
        "optimizer.learning_rate": 1e-3,
        "stop.after": f"{steps} steps",
        "scale.workers": RANKS,
        "scale.gpus_per_worker": 0,
        "strategy.name": "ddp",
        "deterministic": True,
        "tracking.system_metrics": False,
        "checkpoint.every_minutes": None,
    }
    config = load_config(flags=settings, environ={})
    sources = load_sources(workload)
    splits = {name: Split.of(name, source, workload) for name, source in sources.items()}
    return TrainJob(config, derive(config, splits[TRAIN].size), workload, splits, time.time()), sources


def run_worker(number: int, place: Any, steps: int, folder: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = interface_of(HOST) or "lo"
    workload = Network()
    losses: dict[int, list[float]] = {}
    weights: list[str] = []

    def emit(*messages: Any) -> None:
        for message in messages:
            for each in getattr(message, "messages", [message]):
                if isinstance(each, StepRecord):
                    losses.setdefault(each.step, []).append(each.loss)
                    pipe.send(("step", each.step))

    def save(share: Any, name: str) -> None:
        content = b"".join(value.detach().numpy().tobytes() for _, value in sorted(share.tensors.items()))
        weights.append(hashlib.sha256(content).hexdigest())

    def train(group: Group, live: LiveState) -> int:
        job, sources = job_of(steps, workload)
        context = RankContext(group.rank, group.world_size, group.local_rank, group.local_world_size)
        saves = Checkpointing(job, context, Catalog.of_run(folder), emit=emit, live=live)
        loop.run(job, context, sources=sources, emit=emit, checkpointing=saves, save_weights=save)
        return group.rank

    member = Member(place, TOKEN, number=number, node=HOST, silent_s=SILENT_S)
    rank = train_in_groups(member, lambda group: group.join("gloo", 60.0, "cpu"), train)
    pipe.send(("end", {"rank": rank, "weights": weights, "losses": losses, "ended": workload.times.ended}))


class Processes:
    """Workers and spares, of which some are killed and replaced."""

    def __init__(self, steps: int, folder: str) -> None:
        self.steps, self.folder = steps, folder
        self.lost: list[str] = []
        self.coordinator = Coordinator(
            HOST, RANKS, token=TOKEN, silent_s=SILENT_S, first_group_s=600.0, say=self.lost.append
        )
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["scaleray.verification.variants", "scaleray.training.recovery.recovering"])
        self.running: dict[int, tuple[Any, Any]] = {}
        for number in range(RANKS + SPARES):
            self.start(number)

    def start(self, number: int) -> None:
        ours, theirs = self.context.Pipe()
        arguments = (number, self.coordinator.place, self.steps, self.folder, theirs)
        process = self.context.Process(target=run_worker, args=arguments, daemon=True)
        process.start()
        theirs.close()
        self.running[number] = process, ours

    def kill(self, number: int) -> None:
        process, pipe = self.running.pop(number)
        process.kill()
        process.join()
        pipe.close()

    def train(self, kill_at: list[int], draw: random.Random) -> tuple[list[dict[str, Any]], list[float]]:
        """Results of all workers that ended, and the times of the kills, each of which comes at a random moment after
        a step of `kill_at`."""
        results: list[dict[str, Any]] = []
        killed: list[float] = []
        newest, number, waiting = 0, RANKS + SPARES, list(kill_at)
        listening = dict(self.running)
        while listening:
            for ready in wait([pipe for _, pipe in listening.values()], timeout=0.1):
                try:
                    kind, value = ready.recv()
                except EOFError:
                    gone = next(n for n, pair in listening.items() if pair[1] is ready)
                    process = self.running[gone][0]
                    process.join()
                    if process.exitcode != EXIT_CODE:
                        raise RuntimeError(f"worker {gone} ended by itself, with code {process.exitcode}") from None
                    self.kill(gone)  # it could not leave its group
                    self.start(number)
                    listening = {n: p for n, p in listening.items() if n != gone} | {number: self.running[number]}
                    number += 1
                    continue
                if kind == "end":
                    results.append(value)
                    listening = {n: pair for n, pair in listening.items() if pair[1] is not ready}
                newest = max(newest, value) if kind == "step" else newest
            if waiting and newest >= waiting[0] and len(listening) == RANKS + SPARES:
                waiting.pop(0)
                time.sleep(draw.uniform(0.0, 0.1))
                killed.append(time.time())
                victim = draw.choice(list(self.running))
                self.kill(victim)
                self.start(number)
                listening = {n: pair for n, pair in listening.items() if n != victim} | {number: self.running[number]}
                number += 1
        return results, killed

    def close(self) -> None:
        for number in list(self.running):
            self.kill(number)
        self.coordinator.close()


def measured(steps: int, kill_at: list[int], draw: random.Random) -> dict[str, Any]:
    """One training: the weights of rank 0, every loss that it recorded, and the stand-still after each kill."""
    with tempfile.TemporaryDirectory() as folder:
        processes = Processes(steps, folder)
        try:
            results, killed = processes.train(kill_at, draw)
        finally:
            processes.close()
    losses: dict[int, set[float]] = {}
    ended: dict[int, float] = {}
    for result in results:
        for step, values in result["losses"].items():
            losses.setdefault(step, set()).update(values)
        for step, at in result["ended"].items():
            ended[step] = max(at, ended.get(step, at))
    times = [at for _, at in sorted(ended.items())]
    usual = statistics.median(b - a for a, b in itertools.pairwise(times))
    gaps = [(a, b - a - usual) for a, b in itertools.pairwise(times) if b - a > 3 * usual]
    still = [next((gap for a, gap in gaps if a - usual < at < a + gap + usual), 0.0) for at in killed]
    weights = next((r["weights"][-1] for r in results if r["rank"] == 0), "")
    members = len(processes.lost)
    return {"weights": weights, "losses": losses, "still": still, "step_s": usual, "members": members}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="workers to kill in all")
    parser.add_argument("--a-run", type=int, default=5, help="kills in each training")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    calm = measured(given.steps, [], draw)
    print(
        f"undisturbed: {given.steps} steps of {1000 * calm['step_s']:.1f} ms, load {os.getloadavg()[0]:.1f}", flush=True
    )
    still: list[float] = []
    equal = runs = members = 0
    while len(still) < given.kills:
        kill_at = sorted(draw.sample(range(10, given.steps - 60), given.a_run))
        found = measured(given.steps, kill_at, draw)
        is_equal = found["weights"] == calm["weights"] and found["losses"] == calm["losses"]
        runs, equal, still = runs + 1, equal + is_equal, still + found["still"]
        members += found["members"]
        twice = sum(len(values) > 1 for values in found["losses"].values())
        lost = given.steps - len(found["losses"])
        print(
            f"kills after steps {kill_at}: {'equal to the bit' if is_equal else 'DIFFERENT'}, {lost} steps lost, {twice} with "
            f"two values, stood still for {', '.join(f'{s:.2f}' for s in found['still'])} s, load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    ordered = sorted(still)
    summary = {
        "runs": runs, "members_killed": members, "equal_to_the_bit": equal, "kills": len(still), "p50_s": statistics.median(ordered),
        "p95_s": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], "longest_s": ordered[-1],
    }  # fmt: skip
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
