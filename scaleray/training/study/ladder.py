"""A throughput ladder inside one group of workers: its rungs are nested groups, taken in turns and in random order.

One placement, one environment and interleaved turns, so that a machine that drifts does not bend the curve: it slows
every rung alike. Runs under plain gloo processes and inside Ray Train; results go to a callable.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from scaleray.errors import ConfigError
from scaleray.records.run import EvaluationRecord, StepRecord, WorkerMessage
from scaleray.records.study import NoiseCourse, ToTarget, Turn
from scaleray.training import loop
from scaleray.training.setup.job import OpenStream, TrainJob
from scaleray.training.setup.place import Place
from scaleray.training.study.noise_course import course_of, measure_noise
from scaleray.training.study.subgroups import LOOPBACK, SubGroups
from scaleray.training.study.turn import shortened, take_turn

REHEARSAL_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class Rung:
    """A training on the first `workers` workers. name: unique, for people. period: steps after which the
    training's steps repeat."""

    name: str
    workers: int
    job: TrainJob
    num_turns: int
    """Number of turns still to be taken."""
    period: int = 1
    trains_to_target: bool = False
    measures_noise: bool = False
    """Whether noise is measured: in the training to the target where there is one, else over a turn's number of
    steps that are not timed."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Length of a turn: at least so many steps and so many seconds, at most `most_steps` steps."""

    steps: int = 40
    seconds: float = 3.0
    most_steps: int = 2000

    def num_steps(self, step_time_s: float, period: int) -> int:
        """Number of steps of a turn, given how long one takes: whole periods, so that rare events count as often as
        they happen."""
        wanted = max(self.steps, math.ceil(self.seconds / step_time_s)) if step_time_s > 0 else self.most_steps
        return math.ceil(min(wanted, max(self.most_steps, self.steps)) / period) * period


@dataclass(frozen=True)
class Measured:
    """Message of the first worker about a rung: a turn, a training to the target, its noise, or something said on the
    way."""

    rung: str
    turn: Turn | None = None
    to_target: ToTarget | None = None
    noise: NoiseCourse | None = None
    placement: dict[str, int] = dataclasses.field(default_factory=dict)
    """Number of workers on each node."""
    said: str = ""


Tell = Callable[[Measured], None]


@dataclass(frozen=True, kw_only=True)
class Ascent:
    """Measurements that a group of workers is asked for. seed: seed of the order of turns."""

    rungs: tuple[Rung, ...]
    effort: Effort
    seed: int = 0


def order_of_turns(rungs: Sequence[Rung], seed: int) -> list[tuple[int, Rung]]:
    """(round, rung) of every turn: each round has every rung that still wants turns once, in an order of its own."""
    rounds = []
    for number in range(max((rung.num_turns for rung in rungs), default=0)):
        now = [rung for rung in rungs if rung.num_turns > number]
        random.Random(f"{seed}/{number}").shuffle(now)
        rounds.append([(number, rung) for rung in now])
    return list(itertools.chain.from_iterable(rounds))


def climb(place: Place, ascent: Ascent, *, open_stream: OpenStream, tell: Tell, host: str = LOOPBACK) -> None:
    """Take all turns. Collective: every worker of the group calls it with the same ascent, and its default
    process group is gone afterwards. tell: called on the first worker, as soon as there is something to tell.
    host: this worker's address."""
    groups = SubGroups(place, timeout_s=ascent.rungs[0].job.config.scale.collective_timeout_s, host=host)
    _Ladder(groups, ascent, open_stream, tell).climb()
    groups.close()


class _Ladder:
    def __init__(self, groups: SubGroups, ascent: Ascent, open_stream: OpenStream, tell: Tell) -> None:
        self.groups, self.ascent, self.open_stream = groups, ascent, open_stream
        self.tell: Tell = tell if groups.is_first else lambda measured: None

    def climb(self) -> None:
        rungs = self.ascent.rungs
        # the largest first: what does not run at all should say so before hours are spent on the others
        wanted = sorted(
            (r for r in rungs if r.num_turns or (r.measures_noise and not r.trains_to_target)), key=lambda r: -r.workers
        )
        num_steps = {rung.name: self._rehearse(rung) for rung in wanted}
        for number, rung in order_of_turns(rungs, self.ascent.seed):
            with self.groups.of(rung.workers) as place:
                if place is not None:
                    turn = take_turn(
                        rung.job,
                        place,
                        num_steps=num_steps[rung.name],
                        open_stream=self.open_stream,
                        say=partial(self._say, rung),
                        is_alone_first=number % 2 == 1,
                    )
                    turn = dataclasses.replace(turn, round=number)
                    self.tell(Measured(rung.name, turn=turn, placement=self.groups.placement(rung.workers)))
        for rung in rungs:
            if rung.trains_to_target or rung.measures_noise:
                with self.groups.of(rung.workers) as place:
                    if place is not None:
                        self.tell(self._train(rung, place, num_steps.get(rung.name, 0)))

    def _train(self, rung: Rung, place: Place, num_steps: int) -> Measured:
        """Train to the target, or for so many steps to measure the noise."""
        if rung.trains_to_target:
            result, noise = train_to_target(rung.job, place, self.open_stream)
            return Measured(rung.name, to_target=result, noise=noise)
        say = partial(self._say, rung)
        noise = measure_noise(rung.job, place, num_steps=num_steps, open_stream=self.open_stream, say=say)
        return Measured(rung.name, noise=noise)

    def _rehearse(self, rung: Rung) -> int:
        """Number of steps of this rung's turns, from a few steps that are not counted, which also warm caches,
        compilers and readers."""
        step_time_s = 0.0
        length = max(REHEARSAL_STEPS, 2 * rung.period)
        with self.groups.of(rung.workers) as place:
            if place is not None:
                times: list[float] = []

                def emit(message: WorkerMessage) -> None:
                    if isinstance(message, StepRecord):
                        times.append(message.step_time_s)

                loop.run(shortened(rung.job, length), place, open_stream=self.open_stream, emit=emit)
                step_time_s = statistics.median(times[length // 2 :]) if times else 0.0
        return self.ascent.effort.num_steps(float(self.groups.share(repr(step_time_s))), rung.period)

    def _say(self, rung: Rung, text: str) -> None:
        self.tell(Measured(rung.name, said=text))


def train_to_target(job: TrainJob, place: Place, open_stream: OpenStream) -> tuple[ToTarget, NoiseCourse | None]:
    """Train until the config's target is reached, or to the end. Collective; rank 0's result is the group's.

    The noise is None where the config does not measure it.
    """
    target = job.config.stop.at
    if target is None:
        raise ConfigError("stop.at", None, "there is no target to train to", "for example --stop.at 'val/loss <= 1.0'")
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

    job = dataclasses.replace(job.without_files(), started_at=time.time())
    summary = loop.run(job, place, open_stream=open_stream, emit=emit)
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
    return result, course_of(summary.noise, covers="the training to the target")
