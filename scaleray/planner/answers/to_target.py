"""Training time to a target for each batch size and number of GPUs, and the best trade-offs. A larger batch makes good
use of more GPUs but needs more samples for the same progress. The caller provides the number of samples, derived from
the gradient noise (`training.noise.statistical_efficiency`). Interruptions and checkpoints lengthen the wall time
(`checkpoint_stalls`)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from scaleray.config.hardware.hardware_kinds import Cluster
from scaleray.errors import ConfigError
from scaleray.planner.answers.advise import Choice, best_of
from scaleray.planner.answers.outlook import kinds_of, sizes
from scaleray.planner.answers.plan_question import Question
from scaleray.planner.cost.checkpoint_stalls import checkpoint_cost, is_asked
from scaleray.records.study_record import Estimate

FACTORS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16)
"""Batch sizes to evaluate, as multiples of the question's."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A batch size on a number of GPUs, with its best layout. Times are for the whole training, with checkpoints and
    interruptions."""

    num_gpus: int
    batch_size: int
    choice: Choice
    samples: Estimate
    """Samples to the target."""
    hours: Estimate
    gpu_hours: float
    cost: float | None
    time_ratio: float
    is_trusted: bool
    """Whether the gradient noise was measured near this batch size; `choice` has a separate flag for the step time."""
    is_on_frontier: bool = False
    """Whether no other way takes both less time and fewer GPU hours."""

    @property
    def steps(self) -> float:
        """Optimizer steps to the target."""
        return self.samples.value / self.batch_size


@dataclass(frozen=True, kw_only=True)
class Target:
    """The target of a plan. `samples(batch)`: samples to the target; `is_trusted(batch)`: whether that number is
    reliable near this batch size.
    """

    samples: Callable[[int], Estimate]
    is_trusted: Callable[[int], bool]
    words: str
    """Source of the target, for the reader."""


def ways_to(
    target: Target,
    question: Question,
    *,
    interval_s: float | None = None,
    is_asynchronous: bool = True,
    all_sizes: bool = True,
) -> list[Way]:
    """Return the best layout of every batch size on the cluster and on smaller and larger clusters of its type, fastest
    first.

    Raises ConfigError if no batch size works on any of these clusters.
    """
    own = _ways(target, question, interval_s=interval_s, is_asynchronous=is_asynchronous)
    found = list(own)
    # other sizes are searched only for the types of parallelism that are best here, to limit the time
    kinds = kinds_of(question, min(own, key=_time).choice) if own else question.strategies
    for cluster in _others(question.cluster) if all_sizes else ():
        smaller = replace(question, cluster=cluster, strategies=kinds)
        found += _ways(target, smaller, interval_s=interval_s, is_asynchronous=is_asynchronous)
    if not found:
        raise ConfigError(
            "--global-batch",
            question.global_batch,
            f"no batch between a quarter and {FACTORS[-1]} times this size fits or divides evenly",
            "scaleray plan explain layouts lists the reasons",
        )
    return sorted(_marked(found), key=_time)


def best_way(ways: Iterable[Way], *, num_gpus: int) -> Way | None:
    """The fastest way on this number of GPUs, preferring those that certainly fit and those with reliable gradient
    noise."""
    own = [way for way in ways if way.num_gpus == num_gpus]
    own = [way for way in own if way.choice.fits == "fits"] or own
    return min([way for way in own if way.is_trusted] or own, key=_time, default=None)


def _others(cluster: Cluster) -> list[Cluster]:
    return [one for one in sizes(cluster) if one.num_gpus != cluster.num_gpus]


def _ways(target: Target, question: Question, *, interval_s: float | None, is_asynchronous: bool) -> list[Way]:
    found = []
    for batch in sorted({round(question.global_batch * factor) for factor in FACTORS} - {0}):
        best = best_of(replace(question, global_batch=batch))
        if best is not None:
            found.append(_way(target, question, best, batch, interval_s=interval_s, is_asynchronous=is_asynchronous))
    return found


def _way(
    target: Target, question: Question, choice: Choice, batch: int, *, interval_s: float | None, is_asynchronous: bool
) -> Way:
    cluster, samples = question.cluster, target.samples(batch)
    kept = checkpoint_cost(
        question.model, choice.layout, cluster, interval_s=interval_s, is_asynchronous=is_asynchronous
    )
    ratio = kept.time_ratio if is_asked(cluster, interval_s) else 1.0

    def hours(number: float, step_time_s: float) -> float:
        return number / batch * step_time_s / ratio / 3600 if ratio else float("inf")

    step = choice.step_time_s
    value = hours(samples.value, step.value)
    gpu_hours = value * cluster.num_gpus
    price = cluster.price_per_gpu_hour
    return Way(
        num_gpus=cluster.num_gpus,
        batch_size=batch,
        choice=choice,
        samples=samples,
        time_ratio=ratio,
        gpu_hours=gpu_hours,
        hours=Estimate(value, hours(samples.low, step.low), hours(samples.high, step.high)),
        cost=None if price is None else gpu_hours * price,
        is_trusted=target.is_trusted(batch),
    )


def _marked(ways: Sequence[Way]) -> list[Way]:
    """The ways sorted by time, marking the frontier of time and GPU hours: each way that needs fewer GPU hours than all
    faster ones."""
    made, least = [], float("inf")
    for way in sorted(ways, key=lambda one: (one.hours.value, one.gpu_hours)):
        made.append(replace(way, is_on_frontier=way.gpu_hours < least))
        least = min(least, way.gpu_hours)
    return made


def _time(way: Way) -> tuple[float, float]:
    return way.hours.value, way.gpu_hours
