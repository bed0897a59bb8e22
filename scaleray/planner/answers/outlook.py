"""Best layouts on fewer and more GPUs: the curve, its limit, and whether the next doubling is worthwhile.

The global batch is constant (strong scaling), as in a run. Each size uses the best layout of the same strategies.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from scaleray.config.hardware.hardware_kinds import Cluster
from scaleray.planner.answers.advise import TIE, Advice, Choice, best_of, predict
from scaleray.planner.answers.layouts import layouts
from scaleray.planner.answers.plan_question import Question
from scaleray.records.study_record import Estimate

WORTH_IT = 1.6
"""Smallest gain in throughput that justifies twice the GPUs; below it, more than a fifth of the ideal is lost."""
ROUNDING = 1e-3
"""Largest difference between values that look equal when printed."""


@dataclass(frozen=True)
class CurvePoint:
    """The best choice for a number of GPUs. `efficiency`: throughput per GPU over that of a single GPU
    (`Outlook.alone`)."""

    num_gpus: int
    choice: Choice
    samples_per_s: Estimate
    efficiency: float


@dataclass(frozen=True)
class Outlook:
    """The curve up to twice the cluster, with explanations."""

    points: list[CurvePoint]
    alone: Choice
    """The fastest layout on one GPU with unlimited memory, to which efficiency refers. The smallest size that fits
    would not do: lack of memory may slow it down, so that larger sizes would exceed 100 %."""
    limit: str
    doubling: str
    doubling_gain: float | None
    remarks: tuple[str, ...] = ()
    """Remarks that explain values that look impossible, such as superlinear gains."""


def outlook(advice: Advice) -> Outlook:
    """Return the curve around an advice, omitting sizes on which no layout fits or the batch cannot be divided."""
    question = advice.question
    found: list[tuple[int, Choice]] = []
    for cluster in sizes(question.cluster):
        if cluster.num_gpus == question.cluster.num_gpus:
            found.append((cluster.num_gpus, advice.best))
            continue
        best = best_of(replace(question, cluster=cluster, strategies=kinds_of(question, advice.best)))
        if best is not None:
            found.append((cluster.num_gpus, best))
    lone = alone(question)
    points = []
    for gpus, choice in found:
        low, high = choice.step_time_s.low, choice.step_time_s.high
        batch = choice.layout.global_batch
        rate = Estimate(choice.samples_per_s, batch / high, batch / low)
        points.append(CurvePoint(gpus, choice, rate, choice.samples_per_s / gpus / lone.samples_per_s))
    gain = _doubling_gain(points, question.cluster.num_gpus)
    return Outlook(
        points, lone, limit_of(advice.best), _doubling_words(question, gain), gain, tuple(remarks_on(points, lone))
    )


def alone(question: Question) -> Choice:
    """The fastest layout of the question's batch on one of its GPUs, even if it does not fit."""
    one = replace(question.cluster, gpus_per_node=1, num_nodes=1, network=None)
    asked = replace(question, cluster=one, strategies=("ddp",))
    return min((predict(asked, layout) for layout in layouts(asked)), key=lambda choice: choice.step_time_s.value)


def sizes(cluster: Cluster) -> Iterator[Cluster]:
    """Clusters to predict: parts of a node, then nodes, doubling up to twice the cluster, and the cluster itself."""
    per_node = cluster.gpus_per_node
    gpus = 1
    while gpus < per_node and per_node % gpus == 0:
        yield replace(cluster, gpus_per_node=gpus, num_nodes=1, network=None)
        gpus *= 2
    nodes = 1
    while nodes <= 2 * cluster.num_nodes:
        if nodes == 1 or cluster.network is not None:
            yield replace(cluster, num_nodes=nodes)
        nodes *= 2
    if cluster.num_nodes & (cluster.num_nodes - 1):
        yield cluster
        if cluster.network is not None:
            yield replace(cluster, num_nodes=2 * cluster.num_nodes)


def limit_of(choice: Choice) -> str:
    """Description of the largest part of a step that is not useful arithmetic."""
    parts = {name: seconds for name, seconds in choice.step.parts().items() if name not in ("forward", "backward")}
    name = max(parts, key=lambda key: parts[key])
    share = parts[name] / choice.step.total_s
    words = {
        "recompute": "recomputing activations; more memory per GPU or a smaller micro-batch avoids it",
        "exchange comm": "tokens sent to experts, or keys and values of other ranks; "
        "a smaller degree, or one that stays inside the node",
        "tensor comm": "tensor parallel communication; a smaller degree or a faster link inside the node",
        "pipeline bubble": "the pipeline's bubble; more micro-batches, or fewer stages",
        "pipeline comm": "activations between pipeline stages; a faster network, or fewer stages",
        "data comm": "gradients and parameters between replicas; a larger batch per GPU, or a faster network",
        "optimizer": "the optimizer's update; sharding it (zero1, fsdp), or a larger batch per GPU",
        "stragglers": "waiting for the slowest rank",
        "overhead": "work outside forward and backward, such as the input; a larger batch per GPU",
    }
    useful = 1 - sum(parts.values()) / choice.step.total_s
    return (
        f"{100 * useful:.0f} % of the step is useful arithmetic; "
        f"the largest rest, {100 * share:.0f} %, is {words[name]}"
    )


def kinds_of(question: Question, best: Choice) -> tuple[str, ...]:
    """The question's strategies that a choice uses, to limit the search on another size."""
    uses = {
        "tp": best.layout.tensor > 1,
        "pp": best.layout.pipeline > 1,
        "ep": best.layout.expert > 1,
        "ddp": True,
        "zero1": best.layout.sharding == "zero1",
        "fsdp": best.layout.sharding == "zero3",
        "hsdp": best.layout.sharding == "zero3" and best.layout.shard < best.layout.data,
    }
    return tuple(name for name in question.strategies if uses[name]) or question.strategies


def _doubling_gain(points: list[CurvePoint], num_gpus: int) -> float | None:
    rates = {point.num_gpus: point.choice.samples_per_s for point in points}
    if num_gpus not in rates or 2 * num_gpus not in rates:
        return None
    return rates[2 * num_gpus] / rates[num_gpus]


def _doubling_words(question: Question, gain: float | None) -> str:
    gpus = question.cluster.num_gpus
    if gain is None:
        reason = (
            "no network between nodes is given"
            if question.cluster.network is None
            else f"the batch of {question.global_batch} does not divide further"
        )
        return f"{2 * gpus} GPUs: not predicted, {reason}"
    verdict = "worthwhile" if gain >= WORTH_IT else "not worthwhile at this batch"
    return f"{2 * gpus} GPUs: {gain:.2f} times the throughput at twice the cost, {verdict}"


def remarks_on(points: list[CurvePoint], lone: Choice) -> Iterator[str]:
    """Remarks on every size with an efficiency over 1, and on every step to a larger size that gains more than the
    added GPUs."""
    for point in points:
        if point.efficiency > 1 + ROUNDING:
            yield f"efficiency over 100 % on {point.num_gpus} GPUs: {_saved(lone, point.choice)}"
    for before, after in itertools.pairwise(points):
        if after.efficiency > TIE * before.efficiency:
            cause = _saved(before.choice, after.choice)
            yield f"from {before.num_gpus} to {after.num_gpus} GPUs throughput grows by more: {cause}"


def _saved(before: Choice, after: Choice) -> str:
    """Description of the part of a step that saves the most GPU seconds per sample from `before` to `after`."""

    def gpu_seconds(choice: Choice) -> dict[str, float]:
        parts = choice.step.parts()
        parts["passes"] = parts.pop("forward") + parts.pop("backward")
        return {
            name: seconds / choice.samples_per_s / choice.step.total_s * choice.layout.num_gpus
            for name, seconds in parts.items()
        }

    spent, needed = gpu_seconds(before), gpu_seconds(after)
    name = max(spent, key=lambda part: spent[part] - needed[part])
    words = {
        "recompute": "there is enough memory to recompute fewer activations",
        "passes": "micro-batches or experts are larger on each GPU, and kernels run better",
        "optimizer": "the optimizer's update is shared by more GPUs",
    }
    return words.get(name, f"more total memory allows a layout that spends less on {name}")
