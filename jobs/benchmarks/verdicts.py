"""The verdict judged by planted faults: is the class, the rank and the layers right, and what removing the fault gives?

    chrt -f 20 python jobs/benchmarks/verdicts.py [--seeds 10] [--sizes 0.25,0.1] [--minutes 13]
    chrt -f 20 python jobs/benchmarks/verdicts.py --tc --kept FILE    # slow links of the kernel, as root
    python jobs/benchmarks/verdicts.py --report --kept FILE FILE ...

Each training runs scaleray's own loop on two gloo processes that stay up; its compute is a timed sleep
(`scaleray.emulation`), so that two ranks fit two cores, and everything else is real. A fault is planted in one training
at a time, and the same training without it says what removing it really gives. What is emulated is said beside each
fault. Ranks mostly sleep; `chrt` keeps other work on the machine from waking them late. Finished trainings are kept in a
file; the command goes on where it was, and writes the report when all are there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import harness
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from scaleray.callbacks import Callback
from scaleray.checkpoints.catalog import Catalog
from scaleray.config import load_config
from scaleray.data import TRAIN, Split
from scaleray.data.loading import as_source
from scaleray.emulation import EmulatedLayer, EmulatedLink, Timing
from scaleray.launch.workers.gloo import GlooProcesses, UserCode, gloo_processes
from scaleray.profiling.run_profile import run_profile
from scaleray.profiling.verdict.findings import Limit, Verdict
from scaleray.profiling.verdict.judge import judge
from scaleray.profiling.verdict.of_run import FIRST_STEPS, signals_of
from scaleray.profiling.verdict.signals import Facts
from scaleray.records.phases import Phase
from scaleray.records.profile import RunProfile
from scaleray.records.run import WorkerSummary
from scaleray.scaling.recipe.derive import derive
from scaleray.scaling.recipe.values import DataSize
from scaleray.strategies import ddp
from scaleray.training import loop
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.place import Place
from scaleray.training.state.checkpointing import Checkpointing

WIDTH, BATCH, STEPS, EVERY = 32, 8, 36, 5
LAYER_PARAMETERS = 2**12
ROW_BYTES = 4 * WIDTH + 8
CHECKPOINT_S = 0.03
"""What a checkpoint takes without a fault, about."""
STRATEGIES = ("ddp", "fsdp", "zero1")
FORWARD_S = 0.02
"""Of the whole model; a backward pass takes twice as long."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that makes a training slower, and what a verdict should say of it.

    limit: the class. phase: of a straggler. more: other classes, one of which may be the second finding.
    """

    name: str
    limit: Limit
    planted: str
    phase: Phase | None = None
    has_bucket: bool = False
    names_rank: bool = False
    more: tuple[Limit, ...] = ()


FAULTS = (
    Fault("healthy", Limit.COMPUTE, "nothing"),
    Fault("slow reader", Limit.INPUT, "reading the rows of a batch sleeps longer than a step takes"),
    Fault("slow decode on one rank", Limit.INPUT, "the same, on one rank", names_rank=True),
    Fault("python overhead", Limit.HOST, "a callback sleeps after every step"),
    Fault(
        "device synchronisation",
        Limit.HOST,
        "emulated: a callback stands still after every step as long as a device would need to run dry and start again",
    ),
    Fault(
        "pauses of the garbage collector",
        Limit.HOST,
        "emulated: real collections every 5 steps, made longer by sleeping",
    ),
    Fault(
        "slow link, emulated",
        Limit.COMMUNICATION,
        "emulated: each collective of the step ends that much later on all ranks",
    ),
    Fault(
        "slow link, tc", Limit.COMMUNICATION, "real: the kernel's token bucket (`tc tbf`) on the link between the ranks"
    ),
    Fault("straggler in forward", Limit.STRAGGLER, "a layer's forward pass sleeps on one rank", Phase.FORWARD),
    Fault(
        "straggler in backward",
        Limit.STRAGGLER,
        "a layer's backward pass sleeps on one rank",
        Phase.BACKWARD,
        has_bucket=True,
    ),
    Fault("straggler in optimizer", Limit.STRAGGLER, "the optimizer's step sleeps on one rank", Phase.OPTIMIZER),
    Fault(
        "synchronous checkpoint",
        Limit.CHECKPOINT,
        "checkpoint.is_asynchronous false every 5 steps, and sleeping as on a slow disk",
    ),
    Fault("heavy evaluation", Limit.EVALUATION, "an evaluation every 5 steps"),
    Fault(
        "memory retries",
        Limit.MEMORY,
        "emulated: every 5th step sleeps in its backward pass, and the allocator's statistics are made up to match",
    ),
    Fault(
        "two at once",
        Limit.STRAGGLER,
        "a straggler in forward, and lighter evaluations",
        Phase.FORWARD,
        more=(Limit.EVALUATION,),
    ),
)
IMPACTS = (0.2, 0.08, -1.0)
"""Measured shares by which a fault makes steps longer, from which on trainings are told together. Planted ones are
sizes of delays, of which a part may hide; the smallest are below what a verdict tells of."""
REAL_LINK, IN_NAMESPACE = "slow link, tc", "VERDICTS_IN_NAMESPACE"
BY_NAME = {fault.name: fault for fault in FAULTS}


class Delay(torch.autograd.Function):
    """Identity that sleeps in its forward or its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Callable[[], None], backward: Callable[[], None]) -> torch.Tensor:
        ctx.backward_delay = backward
        forward()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.backward_delay()
        return gradients[0], None, None


class Delayed(nn.Module):
    """An emulated layer and delays of its passes. The delay of a backward pass comes before the layer's gradient."""

    def __init__(self, layer: nn.Module, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        super().__init__()
        self.layer, self._forward, self._backward = layer, forward, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Delay.apply(self.layer(x), self._forward, self._backward)
        return found


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Made-up rows, of which each takes so long to read."""

    def __init__(self, count: int, row_s: float) -> None:
        self.x = np.random.default_rng(0).normal(size=(count, WIDTH)).astype(np.float32)
        self.row_s, self.jitter = row_s, random.Random()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.row_s:
            time.sleep(self.row_s * self.jitter.uniform(0.5, 1.5))
        return {"x": self.x[index], "y": int(self.x[index].argmax() % 2)}


class Planted:
    """A stack of emulated layers with a fault. settings: see `cases`."""

    def __init__(self, settings: dict[str, Any], rank: int) -> None:
        self.settings, self.rank = settings, rank
        self.name, self.delay_s = settings["fault"], settings["size"] * settings["step_s"]
        self.is_culprit = rank == settings["rank"]
        self.evaluation_every = 2 * EVERY if self.name == "two at once" else EVERY
        self.number = 0

    def sleeps(
        self, where: str, *, every: int = 1, on: bool = True, share: float = 1.0, less_s: float = 0.0
    ) -> Callable[[], None]:
        """What sleeps in this place: only where the fault is planted there, and in steps that it hits."""
        if self.name != where or not on:
            return lambda: None
        calls = 0

        def sleep() -> None:
            nonlocal calls
            calls += 1
            if calls % every == 0:
                time.sleep(max(0.0, share * every * self.delay_s - less_s))

        return sleep

    def build_model(self) -> nn.Module:
        settings, culprit = self.settings, self.is_culprit
        count = settings["layers"]
        layers = []
        for index in range(count):
            timing = Timing(forward_s=FORWARD_S / count, jitter=0.1, seed=settings["seed"])
            layer: nn.Module = EmulatedLayer(
                WIDTH, timing, num_parameters=LAYER_PARAMETERS, index=index, rank=self.rank
            )
            is_hit = index == settings["layer"]
            forward = "two at once" if self.name == "two at once" else "straggler in forward"
            backward = self.sleeps("straggler in backward", on=culprit and is_hit)
            if self.name == "memory retries":
                backward = self.sleeps("memory retries", every=EVERY, on=is_hit)
            layer = Delayed(layer, self.sleeps(forward, on=culprit and is_hit), backward)
            layers.append(layer)
        return nn.Sequential(*layers, nn.Linear(WIDTH, 2))

    def datasets(self) -> dict[str, Any]:
        reads_slowly = self.name == "slow reader" or (self.name == "slow decode on one rank" and self.is_culprit)
        # rows are read beside the training: the batch takes longer than the whole step by the planted share
        row_s = (self.settings["step_s"] + self.delay_s) / (BATCH // 2) if reads_slowly else 0.0
        found: dict[str, Any] = {TRAIN: Rows(4096, row_s)}
        if self.name in ("heavy evaluation", "two at once"):
            share = 0.4 if self.name == "two at once" else 1.0
            # an evaluation is that many forward passes
            passes = max(1, round(share * self.evaluation_every * self.delay_s / FORWARD_S))
            found["val"] = Rows(passes * BATCH, 0.0)
        return found

    def loss(self, model: nn.Module, batch: Any) -> Any:
        if self.name == "pauses of the garbage collector" and torch.is_grad_enabled():
            self.number += 1
            if self.number % EVERY == 0:
                gc.collect(0)
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])

    def callbacks(self) -> list[Callback]:
        return [Waits(self)]


class Waits(Callback):
    """What sleeps between two steps."""

    def __init__(self, planted: Planted) -> None:
        self.after_step = [planted.sleeps(name) for name in ("python overhead", "device synchronisation")]
        self.saving = planted.sleeps("synchronous checkpoint", share=EVERY, less_s=CHECKPOINT_S)

    def on_step(self, run: Any) -> None:
        for sleep in self.after_step:
            sleep()

    def on_checkpoint(self, run: Any) -> None:
        self.saving()


def training(place: Place, settings: dict[str, Any]) -> dict[str, Any]:
    """One training; what all ranks measured of it, on rank 0."""
    torch.set_num_threads(1)
    planted = Planted(settings, place.rank)
    flags = {
        "workload.name": "verdicts:Planted",
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


@contextlib.contextmanager
def planted_around(planted: Planted, place: Place) -> Iterator[None]:
    """What is planted outside the model: in every optimizer, in the garbage collector, in DDP's link."""
    undo: list[Callable[[], None]] = []
    if planted.name == "straggler in optimizer":
        sleep = planted.sleeps(planted.name, on=planted.is_culprit)
        hook = register_optimizer_step_pre_hook(lambda *_: sleep())
        undo.append(hook.remove)
    if planted.name == "pauses of the garbage collector":
        longer = planted.sleeps(planted.name, every=1, share=EVERY)

        def pause(phase: str, info: dict[str, int]) -> None:
            if phase == "stop" and info["generation"] == 0 and planted.number % EVERY == 0 and planted.number:
                longer()

        gc.callbacks.insert(0, pause)  # before whoever measures the end of a collection
        gc.disable()  # those that are planted are the only ones
        undo += [lambda: gc.callbacks.remove(pause), gc.enable]
    if planted.name == "slow link, emulated":
        real = ddp._wrapped
        # a bucket that takes no longer than a layer's backward pass is hidden behind it, but for the last one
        count = planted.settings["layers"]
        hidden_s = 2 * FORWARD_S / count
        bucket_s = min(planted.delay_s, (planted.delay_s + (count - 1) * hidden_s) / count)
        link = EmulatedLink(bytes_per_s=1e12, latency_s=max(bucket_s, min(planted.delay_s, hidden_s)))

        def wrapped(*arguments: Any) -> Any:
            model = real(*arguments)
            model.register_comm_hook(None, link.reduce)
            return model

        ddp._wrapped = wrapped
        undo += [link.close, lambda: setattr(ddp, "_wrapped", real)]
    try:
        yield
    finally:
        for each in undo:
            each()


# which trainings there are

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
    return judge(signals_of(profile), facts)


# what came of it


def row_of(result: dict[str, Any], healthy_s: dict[tuple[str, bool], float]) -> dict[str, Any]:
    """A finished training beside what should have been said of it."""
    settings, fault = result["settings"], BY_NAME[result["settings"]["fault"]]
    verdict = verdict_on(result)
    step_s = step_time(result)
    base_s = healthy_s[kind_of(settings)]
    one = verdict.primary
    row = {
        **settings,
        "found": str(one.limit),
        "phase": one.phase,
        "class_right": one.limit is fault.limit and (fault.phase is None or one.phase == fault.phase),
        "impact": step_s / base_s - 1,
        "gain": step_s / base_s,
        "what_if": gain_of(verdict, fault),
        "share": one.share,
        "confidence": verdict.confidence,
        "sentence": verdict.sentence,
        "others": [str(other.limit) for other in verdict.others],
    }
    if fault.limit is Limit.STRAGGLER or fault.names_rank:
        row["rank_right"] = one.ranks == (settings["rank"],)
    if fault.has_bucket:
        row["bucket_off"] = layers_off(one.layers, settings["layer"])
    if fault.more:
        row["second_right"] = bool(set(fault.more) & {other.limit for other in verdict.others})
    return row


def layers_off(named: str, planted: int) -> int | None:
    """How many layers, of which each has a bucket, the named ones (`2-3`) are away from the planted one."""
    numbers = [int(number) for number in re.findall(r"\d+", named)]
    return max(0, min(numbers) - planted, planted - max(numbers)) if numbers else None


def gain_of(verdict: Verdict, fault: Fault) -> float | None:
    """What the verdict says that removing the fault gives: with two at once, both."""
    wanted = {fault.limit, *fault.more}
    found = [one for one in (verdict.primary, *verdict.others) if one.limit in wanted and one.share is not None]
    return 1 / (1 - sum(one.share or 0.0 for one in found)) if found else None


def step_time(result: dict[str, Any]) -> float:
    """Mean time of a step in steady state, with its part of evaluations and checkpoints."""
    series = [rank["step"]["series"] for rank in result["profile"]["ranks"]]
    return statistics.fmean(statistics.fmean(one[FIRST_STEPS:]) for one in series)


def describe(results: Sequence[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """The tables, and a row for each training."""
    healthy: dict[tuple[str, bool], list[float]] = {}
    for result in results:
        if result["settings"]["fault"] == "healthy":
            healthy.setdefault(kind_of(result["settings"]), []).append(step_time(result))
    healthy_s = {kind: statistics.median(times) for kind, times in healthy.items()}
    rows = [row_of(r, healthy_s) for r in results if kind_of(r["settings"]) in healthy_s]
    texts = [_summary(rows), _by_fault(rows), _confusion(rows)]
    planted = [[fault.name, str(fault.limit), fault.planted] for fault in FAULTS]
    texts.append("## What is planted\n\n" + harness.table(["fault", "class", "how"], planted))
    return "\n\n".join(texts), rows


def compact(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures of each fault, strategy and size, by seed."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["fault"], row["strategy"], row["size"]), []).append(row)
    lists = ("seed", "found", "class_right", "rank_right", "bucket_off", "impact", "what_if")
    found = []
    for (fault, strategy, size), here in groups.items():
        columns = {name: [_short(row.get(name)) for row in here] for name in lists}
        known = {name: values for name, values in columns.items() if any(value is not None for value in values)}
        found.append({"fault": fault, "strategy": strategy, "size": size, **known})
    return found


def _short(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


def _share(values: Sequence[bool]) -> str:
    return f"{sum(values)}/{len(values)} ({sum(values) / len(values):.1%})" if values else "-"


def _summary(rows: Sequence[dict[str, Any]]) -> str:
    healthy = [row for row in rows if row["fault"] == "healthy"]
    lines = [f"False alarms: {sum(not row['class_right'] for row in healthy)} in {len(healthy)} healthy trainings."]
    faulty = [row for row in rows if row["fault"] != "healthy"]
    for low, high in zip(IMPACTS, (float("inf"), *IMPACTS), strict=False):
        here = [row for row in faulty if low <= row["impact"] < high]
        if here:
            lines.append(
                _line(
                    f"Measured impact of {low:.0%} and more" if high > 1 else f"{max(0.0, low):.0%} to {high:.0%}", here
                )
            )
    return "\n".join(f"- {line}" for line in lines)


def _line(title: str, rows: Sequence[dict[str, Any]]) -> str:
    what_if = [row["what_if"] / row["gain"] for row in rows if row["what_if"] and row["class_right"]]
    ranks = [row["rank_right"] for row in rows if "rank_right" in row and row["class_right"]]
    buckets = [row["bucket_off"] for row in rows if row.get("bucket_off") is not None]
    return (
        f"{title}: class right {_share([row['class_right'] for row in rows])}, rank right {_share(ranks)}, bucket "
        f"within 1 {_share([off <= 1 for off in buckets])}, what-if within 10 % "
        f"{_share([abs(ratio - 1) <= 0.1 for ratio in what_if])}."
    )


def _by_fault(rows: Sequence[dict[str, Any]]) -> str:
    table = []
    for fault in FAULTS:
        for strategy in STRATEGIES:
            for size in sorted({row["size"] for row in rows if row["fault"] == fault.name}, reverse=True):
                here = [r for r in rows if (r["fault"], r["strategy"], r["size"]) == (fault.name, strategy, size)]
                if here:
                    ratios = [r["what_if"] / r["gain"] for r in here if r["what_if"]]
                    table.append(
                        [
                            fault.name,
                            strategy,
                            f"{size:.0%}",
                            _share([r["class_right"] for r in here]),
                            _share([r["rank_right"] for r in here if "rank_right" in r]),
                            _share([r["bucket_off"] <= 1 for r in here if r.get("bucket_off") is not None]),
                            harness.show([100 * r["impact"] for r in here]),
                            harness.show(ratios, "{:.2f}"),
                        ]
                    )
    header = [
        "fault",
        "strategy",
        "planted",
        "class right",
        "rank right",
        "bucket within 1",
        "impact, %",
        "what-if / gain",
    ]
    return "## By fault\n\n" + harness.table(header, table)


def _confusion(rows: Sequence[dict[str, Any]]) -> str:
    texts = []
    for size in sorted({row["size"] for row in rows if row["size"]}, reverse=True):
        of_size = [row for row in rows if row["size"] in (size, 0.0)]
        columns = list(dict.fromkeys([*(str(f.limit) for f in FAULTS), *(row["found"] for row in of_size)]))
        counts = Counter((row["fault"], row["found"]) for row in of_size)
        table = [[f.name, *(str(counts[f.name, column] or "") for column in columns)] for f in FAULTS]
        texts.append(f"## What was found, planted {size:.0%}\n\n" + harness.table(["planted", *columns], table))
    return "\n\n".join(texts)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--sizes", default="0.25,0.1", help="planted delays, as shares of a healthy step")
    parser.add_argument("--tc", action="store_true", help="a real slow link instead, in a network namespace; as root")
    parser.add_argument("--report", action="store_true", help="train nothing: the report of what is kept")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--only", default="", help="trainings whose name contains this")
    parser.add_argument("--minutes", type=float, default=13.0, help="stop after so long, and go on with the next call")
    parser.add_argument("--kept", type=Path, nargs="+", default=[Path(tempfile.gettempdir()) / "verdicts.jsonl"])
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="folder for the report")
    arguments = parser.parse_args()
    if arguments.tc:
        enter_namespace()
    sizes = [float(size) for size in arguments.sizes.split(",")]
    conditions = harness.conditions(["torch", "numpy"])
    make = real_link_cases if arguments.tc else cases
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    todo = [s for s in make(arguments.strategies.split(","), sizes, seeds) if arguments.only in key_of(s)]
    is_complete = arguments.report or run_all(todo, arguments.kept[0], arguments.minutes)
    results = [json.loads(line) for kept in arguments.kept for line in kept.read_text().splitlines()]
    text, rows = describe(results)
    if not is_complete:
        print(text)
        sys.exit("not all trainings are done: run the command again")
    record = {"conditions": conditions, "arguments": harness.arguments_of(arguments), "trainings": compact(rows)}
    harness.write_report(
        "verdicts", title="Verdicts on planted faults", text=text, record=record, folder=arguments.results
    )


if __name__ == "__main__":
    main()
