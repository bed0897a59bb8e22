"""The same recipe under every way to communicate less: bytes, step time, and the loss after equal samples and equal time.

    python jobs/communication_lab.py -c jobs/digits.yaml --steps 200 --slow-link 100

Trains in gloo processes on this machine, without Ray and MLflow. Methods take turns and each turn has its own seed, the
same for all of them; figures are medians over the turns. Other words, such as `--batch.global-size 128`, change the
recipe of all methods; those of `compression` reach the methods that have such a setting.

`--slow-link` emulates a link: after each step, a worker sleeps as long as the bytes of the step would take there. The
bytes are what bandwidth-optimal collectives send from each worker. Nothing overlaps with that sleep, and messages cost
no latency: methods that hide their traffic behind the backward pass look slower here than on a real link of that speed,
and those with many small messages faster. What a method sends between steps, in threads of its own, is not delayed.
Adaptive compression is told the link's time when it measures.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import html
import io
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from scaleray.config import RunConfig, load_config
from scaleray.config.compression import OWNERS
from scaleray.config.recipe.derive import derive
from scaleray.data import Split, load_sources
from scaleray.data.source_interface import Source
from scaleray.errors import ConfigError, ScaleRayError
from scaleray.launch.workers.gloo import UserCode, gloo_processes
from scaleray.records.run_record import EvaluationRecord, StepRecord, WorkerMessage
from scaleray.strategies import STRATEGIES
from scaleray.strategies.compression import adaptive as adaptive_compression
from scaleray.training import loop
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.rank_context import RankContext

BASELINE = "all-reduce"
METHODS: dict[str, dict[str, Any]] = {
    BASELINE: {"strategy.name": "ddp"},
    "bf16": {"strategy.name": "ddp", "compression.name": "bf16"},
    "powersgd": {"strategy.name": "ddp", "compression.name": "powersgd"},
    "int8": {"strategy.name": "ddp", "compression.name": "int8"},
    "topk": {"strategy.name": "ddp", "compression.name": "topk"},
    "adaptive": {"strategy.name": "ddp", "compression.name": "adaptive"},
    "local_sgd": {"strategy.name": "local_sgd"},
    "diloco": {"strategy.name": "diloco"},
    "gossip": {"strategy.name": "gossip"},
}
POINT_TO_POINT = ("gossip", "async_sgd")  # what they send passes the link once, and is what they count
NUM_EVALUATIONS = 10
WARM_SHARE = 0.2  # of the steps: DDP lays out its buckets, caches fill
EQUAL = 0.02  # losses closer than this, relative, are taken for the same


@dataclass(frozen=True)
class Turn:
    """One training. losses: (samples, seconds of training so far, loss) of each evaluation; bytes and times a step."""

    losses: list[tuple[int, float, float]]
    sent_bytes: float
    link_bytes: float
    step_time_s: float


@dataclass(frozen=True)
class Result:
    """A method's turns, and the loss that each had after the time that the fastest method took in the same turn."""

    method: str
    turns: list[Turn]
    at_equal_time: list[float]

    @property
    def final_losses(self) -> list[float]:
        """After equal samples."""
        return [turn.losses[-1][2] for turn in self.turns]

    def median(self, figure: Callable[[Turn], float]) -> float:
        """Over the turns."""
        return statistics.median(figure(turn) for turn in self.turns)


def main(words: Sequence[str]) -> int:
    """Run the lab; 0 when every method that is available finished."""
    options, overrides = _parse(words)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    try:
        asked = options.methods.split(",") if options.methods else list(METHODS)
        unknown = [name for name in asked if name not in METHODS]
        if unknown:
            raise ConfigError("--methods", unknown[0], f"there are: {', '.join(METHODS)}")
        available = [name for name in asked if METHODS[name]["strategy.name"] in STRATEGIES]
        if not available:
            raise ConfigError("--methods", options.methods, "none of them is available here")
        for name in sorted(set(asked) - set(available)):
            console.print(f"not available: {name}")
        turns = run(available, options, overrides, lambda text: console.print(text, markup=False))
    except ScaleRayError as exc:
        console.print(f"{type(exc).__name__}: {exc}", markup=False)
        return exc.exit_code
    results = [Result(name, turns[name], losses_at_equal_time(turns)[name]) for name in available]
    title = f"{options.config.name}: {options.steps} steps on {options.workers} workers, {options.repeats} turns" + (
        f", a link of {options.slow_link:g} Mbit/s (emulated)" if options.slow_link else ""
    )
    console.print(as_table(results, title))
    console.print(advice(results), markup=False)
    options.out.write_text(as_page(results, title, [n for n in asked if n not in available]))
    console.print(f"page: {options.out}", markup=False)
    return 0


def run(
    methods: Sequence[str], options: argparse.Namespace, overrides: list[str], say: Callable[[str], None]
) -> dict[str, list[Turn]]:
    """All turns of all methods, which take turns. Raises UsageError for a recipe that does not fit."""
    config = _config(methods[0], options, overrides, seed=0)
    code = UserCode(config.workload.name, config.workload.args, options.config.resolve().parent)
    workload = code.load()
    sources = load_sources(workload)
    turns: dict[str, list[Turn]] = {name: [] for name in methods}
    with gloo_processes(options.workers, code, timeout_s=config.scale.collective_timeout_s) as processes:
        for turn in range(options.repeats):
            for name in methods:
                config = _config(name, options, overrides, seed=turn)
                splits = {split: Split.of(split, source) for split, source in sources.items()}
                job = TrainJob(config, derive(config, splits["train"].size), workload, splits, time.time())
                done = processes.run(options.workers, train, job, sources, options.slow_link, workload=workload)
                turns[name].append(done)
                say(
                    f"turn {turn + 1}/{options.repeats}  {name:<10}  loss {done.losses[-1][2]:.4f}  {done.step_time_s * 1e3:.1f} ms/step"
                )
    return turns


def train(place: RankContext, job: TrainJob, sources: Mapping[str, Source], slow_link: float | None) -> Turn:
    """One worker's part of one training. slow_link: Mbit/s."""
    torch.set_num_threads(1)
    messages: list[WorkerMessage] = []
    traffic = Traffic(place, job.config, slow_link * 1e6 / 8 if slow_link else None)
    with traffic.listening():
        loop.run(job, place, sources=sources, emit=messages.append, probe=traffic)
    return Turn(_curve(messages, job), *_figures(messages, traffic)) if place.rank == 0 else Turn([], 0, 0, 0)


class Traffic:
    """A probe that adds up what the collectives of a step send over this worker's link, and may wait as long as that lasts."""

    def __init__(self, place: RankContext, config: RunConfig, bytes_per_s: float | None) -> None:
        self.place, self.bytes_per_s = place, bytes_per_s
        self.has_hook = config.compression.name != "none"
        self.is_point_to_point = config.strategy.name in POINT_TO_POINT
        self.step_bytes, self.lock = 0.0, threading.Lock()
        self.of_steps: list[float] = []

    def on_setup(self, setup: Any) -> None:
        self.counted = setup.parallel.bytes_sent
        model = setup.parallel.model
        if isinstance(model, DistributedDataParallel) and not self.has_hook:
            # DDP's own all-reduce happens in C++, where nobody can listen; this hook does the same
            model.register_comm_hook(None, lambda state, bucket: allreduce_hook(state, bucket))

    def on_batch(self, batch: Any) -> None:
        self.step_bytes, self.counted_before = 0.0, self.counted()  # evaluations lie between steps

    def on_gradients(self, correction: float) -> None: ...

    def on_step(self, result: Any, learning_rate: float) -> None:
        if self.is_point_to_point:
            self.step_bytes += self.counted() - self.counted_before
        self.of_steps.append(self.step_bytes)
        if self.bytes_per_s is not None:
            time.sleep(self.step_bytes / self.bytes_per_s)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Context in which collectives called from Python are heard."""
        with contextlib.ExitStack() as stack:
            for name, (position, factor) in LINK_FACTORS.items():
                if hasattr(dist, name):
                    stack.enter_context(
                        mock.patch.object(dist, name, self._heard(getattr(dist, name), position, factor))
                    )
            stack.enter_context(
                mock.patch.object(adaptive_compression, "time_s", self._slowed(adaptive_compression.time_s))
            )
            yield

    def _slowed(self, measure: Callable[..., float]) -> Callable[..., float]:
        def call(*args: Any) -> float:
            before = self.step_bytes
            seconds = measure(*args)
            return seconds + ((self.step_bytes - before) / self.bytes_per_s if self.bytes_per_s else 0.0)

        return call

    def _heard(self, function: Callable[..., Any], position: int, factor: Callable[[int], float]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            payload = args[position] if len(args) > position else next(iter(kwargs.values()))
            size = dist.get_world_size(kwargs.get("group"))
            if isinstance(payload, torch.Tensor) and size > 0:
                with self.lock:  # compressed gradients are sent from a thread of their own
                    self.step_bytes += payload.numel() * payload.element_size() * factor(size)
            return function(*args, **kwargs)

        return call


LINK_FACTORS: dict[str, tuple[int, Callable[[int], float]]] = {
    "all_reduce": (0, lambda size: 2 * (size - 1) / size),
    "all_gather": (1, lambda size: size - 1),
    "all_gather_into_tensor": (1, lambda size: size - 1),
    "all_gather_single": (1, lambda size: size - 1),
    "reduce_scatter_tensor": (1, lambda size: (size - 1) / size),
    "all_to_all_single": (1, lambda size: (size - 1) / size),
    "broadcast": (0, lambda size: 1.0),
}
"""Collectives: where their payload stands, and how often it passes a worker's link in n workers, optimal algorithms."""


def losses_at_equal_time(turns: Mapping[str, Sequence[Turn]]) -> dict[str, list[float]]:
    """By method and turn: the loss at the time at which the fastest method of that turn had its last evaluation."""
    num_turns = min(len(found) for found in turns.values())
    ends = [min(found[turn].losses[-1][1] for found in turns.values()) for turn in range(num_turns)]
    return {
        name: [_at_time(found[turn].losses, ends[turn]) for turn in range(num_turns)] for name, found in turns.items()
    }


def _at_time(losses: Sequence[tuple[int, float, float]], end_s: float) -> float:
    """The loss at a time, on the line between the evaluations before and after it."""
    before = losses[0]
    for after in losses:
        if after[1] >= end_s:
            span = after[1] - before[1]
            share = (end_s - before[1]) / span if span > 0 else 1.0
            return before[2] + max(0.0, share) * (after[2] - before[2])
        before = after
    return losses[-1][2]


def advice(results: Sequence[Result]) -> str:
    """One sentence: what to use on this link, judged by the loss after equal time, and at what price in samples."""
    best = min(results, key=lambda result: statistics.median(result.at_equal_time))
    baseline = next((result for result in results if result.method == BASELINE), None)
    if baseline is None:
        return f"Of these, {best.method} has the lowest loss after equal time; all-reduce was not measured."
    ours, theirs = statistics.median(best.at_equal_time), statistics.median(baseline.at_equal_time)
    # the ranges of few turns that do not even touch are no accident of one of them
    is_apart = max(best.at_equal_time) < min(baseline.at_equal_time)
    if best is baseline or not is_apart or theirs - ours <= EQUAL * abs(theirs):
        return "Keep all-reduce: after equal time nothing has a loss that is lower by more than the turns differ."
    samples = statistics.median(best.final_losses) - statistics.median(baseline.final_losses)
    price = f"{samples:.3g} higher" if samples > EQUAL * abs(statistics.median(baseline.final_losses)) else "no worse"
    return (
        f"Use {best.method} here: after equal time its loss is {ours:.4g} instead of {theirs:.4g}; after equal samples it "
        f"is {price} than with all-reduce."
    )


COLUMNS = ("method", "sent a step", "over the link", "step time", "loss, equal samples", "loss, equal time")


def as_table(results: Sequence[Result], title: str) -> Table:
    """The figures for a terminal."""
    table = Table(*COLUMNS, title=title)
    for row in _rows(results):
        table.add_row(*row)
    return table


def as_page(results: Sequence[Result], title: str, missing: Sequence[str]) -> str:
    """One HTML page that needs no other file."""
    rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in _rows(results))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in COLUMNS)
    plot = _plot(results)
    image = (
        f'<img alt="loss by samples and by time" src="data:image/png;base64,{plot}">'
        if plot
        else "<p>No plot: matplotlib is not installed.</p>"
    )
    absent = f"<p>Not available: {html.escape(', '.join(missing))}.</p>" if missing else ""
    return (
        f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title>"
        "<style>body{font-family:sans-serif;margin:2em;max-width:70em}td,th{padding:.3em 1em;text-align:right}"
        "td:first-child,th:first-child{text-align:left}img{max-width:100%}</style>"
        f"<h1>{html.escape(title)}</h1><p><b>{html.escape(advice(results))}</b></p><table><tr>{head}</tr>{rows}</table>"
        f"{absent}{image}<pre>{html.escape(__doc__ or '')}</pre>"
    )


def _rows(results: Sequence[Result]) -> Iterator[tuple[str, ...]]:
    for result in results:
        yield (
            result.method,
            f"{result.median(lambda turn: turn.sent_bytes) / 1024:.1f} KiB",
            f"{result.median(lambda turn: turn.link_bytes) / 1024:.1f} KiB",
            f"{result.median(lambda turn: turn.step_time_s) * 1e3:.2f} ms",
            _with_spread(result.final_losses),
            _with_spread(result.at_equal_time),
        )


def _with_spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.4f} ({min(values):.4f} to {max(values):.4f})"


def _plot(results: Sequence[Result]) -> str | None:
    """Loss by samples and by time, as a PNG in base64; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(11, 4))
    axes = figure.subplots(1, 2, sharey=True)
    for result in results:
        for axis, place in zip(axes, (0, 1), strict=True):
            points = result.turns[0].losses
            axis.plot([point[place] for point in points], [point[2] for point in points], label=result.method)
    axes[0].set(xlabel="samples", ylabel="loss (first turn)")
    axes[1].set(xlabel="training time in s")
    axes[1].legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", bbox_inches="tight")
    return base64.b64encode(picture.getvalue()).decode()


def _curve(messages: Sequence[WorkerMessage], job: TrainJob) -> list[tuple[int, float, float]]:
    """(samples, seconds, loss) of each evaluation of the first split, or of the training loss where there is none."""
    steps = [message for message in messages if isinstance(message, StepRecord)]
    times, samples, seconds, seen = {0: 0.0}, {0: 0}, 0.0, 0
    for step in steps:
        seconds, seen = seconds + step.step_time_s, seen + step.num_samples
        times[step.step], samples[step.step] = seconds, seen
    splits = [split.name for split in job.evaluation_splits()]
    if splits:
        found = [m for m in messages if isinstance(m, EvaluationRecord)]
        return [(samples[m.step], times[m.step], m.metrics[f"{splits[0]}/loss"]) for m in found]
    every = max(1, len(steps) // NUM_EVALUATIONS)
    parts = [steps[start : start + every] for start in range(0, len(steps), every)]
    return [(samples[p[-1].step], times[p[-1].step], statistics.mean(s.loss for s in p)) for p in parts]


def _figures(messages: Sequence[WorkerMessage], traffic: Traffic) -> tuple[float, float, float]:
    """(bytes sent, bytes over the link, seconds) of a step: means, as some methods only talk now and then."""
    steps = [message for message in messages if isinstance(message, StepRecord)]
    first = min(len(steps) - 1, int(WARM_SHARE * len(steps)))
    return (
        statistics.mean(step.sent_bytes for step in steps[first:]),
        statistics.mean(traffic.of_steps[first:]),
        statistics.mean(step.step_time_s for step in steps[first:]),
    )


def _config(method: str, options: argparse.Namespace, overrides: list[str], *, seed: int) -> RunConfig:
    """The recipe under a method: no files, and some evaluations on the way."""
    wanted = METHODS[method]
    compression = str(wanted.get("compression.name", "none"))
    words = {
        "scale.workers": options.workers,
        "stop.after": f"{options.steps} steps",
        "seed": seed,
        "evaluation.every": f"{max(1, options.steps // NUM_EVALUATIONS)} steps",
        "checkpoint.save_final": False,
        "checkpoint.every_minutes": "null",
        "tracking.system_metrics": False,
        **wanted,
    }
    flags = [f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in words.items()]
    return load_config(options.config, flags=[*flags, *(w for w in overrides if _concerns(w, compression))])


def _concerns(word: str, compression: str) -> bool:
    """Whether an override is for this method: settings of `compression` are refused by methods that lack them."""
    key = word[2:].partition("=")[0].replace("-", "_")
    if not key.startswith("compression."):
        return True
    owner = OWNERS.get(key.partition(".")[2])
    return compression != "none" and (owner in (None, compression) or compression == "adaptive")


def _parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-c", "--config", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--methods", default="", help=f"with commas, of: {', '.join(METHODS)}")
    parser.add_argument("--slow-link", type=float, default=None, metavar="MBIT", help="megabits a second, emulated")
    parser.add_argument("--out", type=Path, default=Path("communication_lab.html"))
    options, rest = parser.parse_known_args(words)
    if min(options.steps, options.repeats) < 1 or options.workers < 2 or (options.slow_link or 1.0) <= 0:
        parser.error("at least 1 step and 1 turn, 2 workers, and a link faster than 0")
    joined: list[str] = []  # `--key value` as `--key=value`, so that each word stands for itself
    for word in rest:
        if word.startswith("--") or not joined or "=" in joined[-1]:
            joined.append(word)
        else:
            joined[-1] += f"={word}"
    return options, joined


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
