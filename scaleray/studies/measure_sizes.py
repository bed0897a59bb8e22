"""Measure throughput of nested groups inside one group of workers, interleaved and in random order. With one placement
and environment, a drifting machine slows every size equally and does not distort the curve. Runs under plain gloo
processes and inside Ray Train; results go to a callable."""

import contextlib
import dataclasses
import gc
import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from scaleray.data import RaySources, Sources
from scaleray.errors import ConfigError, PeerLostError
from scaleray.records.published import RankSample
from scaleray.records.run_record import EvaluationRecord, Say, StepRecord, WorkerMessage
from scaleray.records.start import steady_time
from scaleray.records.study_record import Mode, NoiseHistory, Repeat, ToTarget
from scaleray.studies.repeat import AT_USUAL_SPEED, emit_to, take_repeat
from scaleray.training import loop
from scaleray.training.setup.job import WITHOUT_FILES, TrainJob
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.setup.stores import OwnedStore, open_store

LOOPBACK = "127.0.0.1"
LONGEST_TURN = timedelta(days=7)  # wait for the others; a lost one closes the store's connections or is ended, too


class SubGroups:
    """Sub-groups of the process group of `place`, which is replaced and ended. Collective: every worker creates one.

    Strategies communicate through torch's default group, so it is created again for each of them: a gloo group costs
    milliseconds; an NCCL group creates communicators with the first collective, during a warm-up.

    timeout_s: timeout of a collective in any of the groups. host: address at which the others reach this worker's
    machine. Close it at the end, after which there is no default group."""

    def __init__(self, place: RankContext, *, timeout_s: float, host: str = LOOPBACK) -> None:
        self.place, self.timeout_s = place, timeout_s
        self._number = 0
        self._order = [0]
        self._nodes = [place.node]
        self._store: Any = None
        self._owned: OwnedStore | None = None
        if place.world_size > 1:
            self._nodes = nodes = place.gathered(place.node)
            # ranks of a node are next to each other, in the order of each node's first rank
            self._order = sorted(range(len(nodes)), key=lambda rank: (nodes.index(nodes[rank]), rank))
            self._store = self._make_store(host)
            leave_group()

    def _make_store(self, host: str) -> Any:
        if self.place.rank == 0:
            self._owned = OwnedStore(host)
        everyone = self.place.gathered(self._owned.place if self._owned else None)
        return open_store(everyone[0])

    @property
    def is_first(self) -> bool:
        """Whether this worker is in every group, with rank 0."""
        return self.place.rank == self._order[0]

    @contextlib.contextmanager
    def of(self, size: int) -> Iterator[RankContext | None]:
        """Context of the first `size` workers, which get their place in a separate group; others get None and wait at
        the end. Collective over all workers. Raises PeerLostError if another worker failed."""
        self._number += 1
        name = f"group {self._number}"
        position = self._order.index(self.place.rank)
        is_in = position < size
        try:
            if is_in and size > 1:
                dist.init_process_group(
                    # gloo beside NCCL: collectives on CPU tensors need a backend of their own
                    "cpu:gloo,cuda:nccl" if self.place.device.type == "cuda" else "gloo",
                    store=dist.PrefixStore(name, self._store),
                    rank=position,
                    world_size=size,
                    timeout=timedelta(seconds=self.timeout_s),
                )
            yield self._place(position, size) if is_in else None
        except BaseException:
            if self._store is not None:
                self._store.set(f"{name} is over", "failed")
            raise
        leave_group()
        self._meet(name)

    def _place(self, position: int, size: int) -> RankContext:
        nodes = [self._nodes[rank] for rank in self._order[:size]]
        node = nodes[position]
        return dataclasses.replace(
            self.place,
            rank=position,
            world_size=size,
            local_rank=nodes[:position].count(node),
            local_world_size=nodes.count(node),
        )

    def _meet(self, name: str) -> None:
        if self._store is None:
            return
        if self._store.add(f"{name} has left", 1) == self.place.world_size:
            self._store.set(f"{name} is over", "done")
        self._store.wait([f"{name} is over"], LONGEST_TURN)
        if self._store.get(f"{name} is over") != b"done":
            raise PeerLostError("another worker failed in this measurement")

    def share(self, value: str) -> str:
        """Send the first worker's text to every worker. Collective."""
        if self._store is None:
            return value
        self._number += 1
        if self.is_first:
            self._store.set(f"value {self._number}", value)
        self._store.wait([f"value {self._number}"], LONGEST_TURN)
        return str(self._store.get(f"value {self._number}").decode())

    def close(self) -> None:
        """Leave the group. Collective, as the store's server must outlive its last client."""
        if self._store is not None:
            if self._store.add("closed", 1) == self.place.world_size:
                self._store.set("all closed", "1")
            if self.place.rank == 0:
                self._store.wait(["all closed"], timedelta(seconds=self.timeout_s))
            self._store = None
            if self._owned is not None:
                self._owned.close()


def leave_group() -> None:
    """End this process's default group, if it has one."""
    if not dist.is_initialized():
        return
    # torch's cache holds meshes, which compare equal to those of the next group and would lead to groups that are gone
    _clear_sharding_prop_cache()
    gc.collect()  # a wrapper of the last training may still hold the group
    dist.destroy_process_group()


# The noise scale of a size: over the first steps of its training, apart from the turns that are timed.
#
# Turns measure no noise: a measurement costs a part of a step, and a worker that does its share alone would measure
# by another method than the group. A training to the target measures as its config says.


def measure_noise(
    job: TrainJob, place: RankContext, *, num_steps: int, sources: Sources, say: Say
) -> NoiseHistory | None:
    """Train the first `num_steps` steps and measure the noise scale in each. Collective; rank 0 has the group's result.
    None if the training does not measure noise."""
    short = job.changed({"noise_scale.every_steps": 1}, first_steps=num_steps)  # its time does not count
    summary = loop.run(short, place, sources=sources, emit=emit_to([], say, place))
    return noise_history(summary.noise, covers="its first steps")


def noise_history(noise: Mapping[str, Any], *, covers: str) -> NoiseHistory | None:
    """History of the noise that a worker measured (`WorkerSummary.noise`); None if empty. covers:
    see `NoiseHistory.covers`."""
    if not noise:
        return None
    low, high = noise["low"], noise["high"]
    return NoiseHistory(
        scale=_finite(noise["scale"]),
        interval=None if low is None or not math.isfinite(low) else (low, _finite(high)),
        way=noise["way"],
        num_measurements=noise["num_measurements"],
        covers=covers,
        curve=[(samples, value) for samples, value in noise["curve"]],
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


REHEARSAL_STEPS = 8
MOST_STEPS = 2000
"""Largest number of steps of a measurement unless the user requests more."""


@dataclass(kw_only=True)
class StudySize:
    """One size of a study: a training on the first `workers` workers, and its results so far. name: unique.

    A measurement lasts at least `steps` steps and `seconds` seconds."""

    name: str
    workers: int
    job: TrainJob
    modes: list[Mode] = field(default_factory=list)
    """Curves that include it: the base can be in two."""
    num_turns: int
    steps: int = 40
    seconds: float = 3.0
    period: int = 1
    """Period of the training's rare events, in steps."""
    trains_to_target: bool = False
    measures_noise: bool = False
    """Whether noise is measured: during the training to the target if there is one, otherwise over as many untimed
    steps as a measurement has."""
    marks: list[str] = field(default_factory=list)
    """Marks to show with every value, on conditions of the measurement that are known in advance."""
    turns: list[Repeat] = field(default_factory=list)
    to_target: ToTarget | None = None
    noise: NoiseHistory | None = None

    @property
    def num_missing(self) -> int:
        """Number of missing measurements."""
        return max(0, self.num_turns - len(self.turns))

    @property
    def needs_noise(self) -> bool:
        """Whether its noise has not been measured yet."""
        return self.measures_noise and self.noise is None

    @property
    def needs_target(self) -> bool:
        """Whether it must still train to the target, which also measures its noise."""
        return self.trains_to_target and (self.to_target is None or self.needs_noise)

    @property
    def is_complete(self) -> bool:
        """Whether every requested result is known."""
        return not (self.num_missing or self.needs_noise or self.needs_target)

    def steps_of_a_repeat(self, step_time_s: float) -> int:
        """Number of steps of a measurement, given the time of one: whole periods, so that rare events count by their
        frequency."""
        wanted = max(self.steps, math.ceil(self.seconds / step_time_s)) if step_time_s > 0 else MOST_STEPS
        return math.ceil(min(wanted, max(MOST_STEPS, self.steps)) / self.period) * self.period


Result = Repeat | ToTarget | NoiseHistory | RankSample | str
"""Result of a measurement, a worker's sample during one, or a note."""
OnResult = Callable[[tuple[str, Result]], Any]
"""Function called with the name of a size and a result."""


def repeat_order(study_sizes: Sequence[StudySize], seed: int) -> list[tuple[int, StudySize]]:
    """(round, size) of every measurement: each round has every unfinished size once, in a random order."""
    rounds = []
    for number in range(max((size.num_missing for size in study_sizes), default=0)):
        now = [size for size in study_sizes if size.num_missing > number]
        random.Random(f"{seed}/{number}").shuffle(now)
        rounds.append([(number, size) for size in now])
    return list(itertools.chain.from_iterable(rounds))


def measure_sizes(
    place: RankContext, study_sizes: Sequence[StudySize], seed: int, tell: OnResult, sources: Sources
) -> None:
    """Take the missing measurements. Collective: every worker of the group calls it with the same sizes, and its
    default process group is destroyed. seed: for the order of measurements. tell: called on the first worker with each
    result, and by every worker after a measurement."""
    config = study_sizes[0].job.config
    if place.device.type == "cpu":
        torch.set_num_threads(max(1, int(config.scale.cpus_per_worker)))
    host = place.node if isinstance(sources, RaySources) else LOOPBACK
    groups = SubGroups(place, timeout_s=config.scale.collective_timeout_s, host=host)

    def report(size: StudySize, result: Result) -> None:
        if groups.is_first:
            tell((size.name, result))

    num_steps: dict[str, int] = {}
    # the largest first: what does not run at all should say so before hours are spent on the others
    for size in sorted(study_sizes, key=lambda size: -size.workers):
        if size.num_missing or (size.needs_noise and not size.needs_target):
            num_steps[size.name] = _rehearse(size, groups, sources)
    for number, size in repeat_order(study_sizes, seed):
        with groups.of(size.workers) as mine:
            if mine is not None:
                job, say = (size.job.changed(AT_USUAL_SPEED, first_steps=num_steps[size.name]), partial(report, size))
                samples: list[RankSample] = []
                turn = take_repeat(job, mine, round=number, sources=sources, say=say, samples=samples)
                for sample in samples[-1:]:  # after the turn, whose steps are timed; each worker's
                    tell((size.name, sample))
                report(size, turn)
    for size in study_sizes:
        if size.needs_target or size.needs_noise:
            with groups.of(size.workers) as mine:
                if mine is not None and size.needs_target:
                    for result in train_to_target(size.job, mine, sources):
                        report(size, result)
                elif mine is not None:
                    steps, say = num_steps[size.name], partial(report, size)
                    noise = measure_noise(size.job, mine, num_steps=steps, sources=sources, say=say)
                    if noise is not None:
                        report(size, noise)
    groups.close()


def _rehearse(size: StudySize, groups: SubGroups, sources: Sources) -> int:
    """Number of steps of this size's measurements, from a few uncounted steps that also warm up caches, compilers and
    readers."""
    step_time_s = 0.0
    length = max(REHEARSAL_STEPS, 2 * size.period)
    with groups.of(size.workers) as place:
        if place is not None:
            steps: list[StepRecord] = []
            emit = emit_to(steps, lambda text: None, place)
            loop.run(size.job.changed(AT_USUAL_SPEED, first_steps=length), place, sources=sources, emit=emit)
            times = [step.step_time_s for step in steps]
            step_time_s = statistics.median(times[length // 2 :]) if times else 0.0
    return size.steps_of_a_repeat(float(groups.share(repr(step_time_s))))


def train_to_target(job: TrainJob, place: RankContext, sources: Sources) -> list[ToTarget | NoiseHistory]:
    """Train until the config's target is reached, or to the end; return the cost, and the noise if the config measures
    it. Collective; rank 0 has the group's results."""
    target = job.config.stop.at
    if target is None:
        raise ConfigError("stop.at", None, "it sets the target to train to", "for example --stop.at 'val/loss <= 1.0'")
    samples, seconds, steps = 0, 0.0, 0
    curve: list[tuple[int, float, float]] = []
    recorded_at: list[float] = []

    def emit(message: WorkerMessage) -> None:
        nonlocal samples, seconds, steps
        if isinstance(message, StepRecord):
            samples, seconds, steps = samples + message.num_samples, seconds + message.step_time_s, message.step
        elif isinstance(message, EvaluationRecord) and target.metric in message.metrics:
            curve.append((samples, seconds, message.metrics[target.metric]))
            recorded_at.append(message.recorded_at)

    job = job.changed(WITHOUT_FILES, started_at=steady_time())
    summary = loop.run(job, place, sources=sources, emit=emit)
    value = curve[-1][2] if curve else math.nan
    is_reached = target.is_reached({target.metric: value}) if curve else False
    result = ToTarget(
        is_reached=is_reached,
        steps=steps,
        samples=samples,
        time_s=seconds,
        metric=target.metric,
        value=value,
        curve=curve,
        recorded_at=recorded_at,
    )
    noise = noise_history(summary.noise, covers="the training to the target")
    return [result] if noise is None else [result, noise]
