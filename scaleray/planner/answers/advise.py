"""Recommend a layout for training on a cluster: predict all sensible layouts, drop those that do not fit, with the
reason, and rank the rest.

The results are predictions, not measurements. Each has an interval from the planner's errors on published measurements
(`uncertainty`), and choices whose intervals overlap count as equal.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scaleray.config.hardware.hardware_kinds import Network
from scaleray.errors import ConfigError
from scaleray.planner.answers.layouts import layouts
from scaleray.planner.answers.plan_question import STRATEGIES, Question
from scaleray.planner.cost.layout import Layout
from scaleray.planner.cost.memory import HEADROOM, MemoryEstimate, Verdict, memory, verdict
from scaleray.planner.cost.step_time import StepTime, least_step_s, step_time
from scaleray.planner.cost.uncertainty import Reason, doubts, interval, is_trusted, reasons
from scaleray.records.study_record import Estimate
from scaleray.records.text.units import GIB

TIE = 1.02
"""Ratio of step times up to which two layouts count as equally fast; the simpler one then ranks first."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A layout with its predictions."""

    layout: Layout
    step: StepTime
    step_time_s: Estimate
    memory: MemoryEstimate
    fits: Verdict
    samples_per_s: float
    tokens_per_s: float
    mfu: float
    kind: str
    """Class of the interval, a key of `SPREADS`."""
    reasons: tuple[Reason, ...] = ()
    """Reasons why the interval is wider than the narrowest of its class."""
    is_trusted: bool
    doubts: tuple[str, ...] = ()
    """Differences between the layout and the measurements behind its interval."""
    cost_per_million_samples: float | None = None


@dataclass(frozen=True)
class Rejected:
    """A dropped layout, with the reason."""

    layout: Layout
    reason: str
    missing_gib: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Advice:
    """All choices as ranked, with the recommended one, and the dropped layouts."""

    question: Question
    choices: list[Choice]
    rejected: list[Rejected]
    num_layouts: int

    @property
    def best(self) -> Choice:
        """The recommended choice: the fastest (or smallest) one that certainly fits, or the fastest if none does."""
        return self.choices[0]

    @property
    def faster(self) -> Choice | None:
        """The fastest choice that may not fit, if it is significantly faster than the recommended one."""
        fastest = min(self.choices, key=lambda one: one.step_time_s.value)
        return fastest if fastest.step_time_s.value * TIE < self.best.step_time_s.value else None


def advise(question: Question) -> Advice:
    """Rank all layouts of the question's strategies on all GPUs of its cluster.

    Raises ConfigError, with a remedy, if the batch cannot be divided at all, or if no layout fits.
    """
    choices: list[Choice] = []
    rejected: list[Rejected] = []
    for layout in layouts(question):
        needed = memory(question.model, layout)
        if verdict(needed, question.cluster.gpu) == "does not fit":
            rejected.append(_rejected(question, layout, needed))
        else:
            choices.append(predict(question, layout, needed=needed))
    num_layouts = len(choices) + len(rejected)
    if not num_layouts:
        raise ConfigError(
            "--global-batch",
            question.global_batch,
            f"no layout of {question.cluster.num_gpus} GPUs divides it",
            _nearest(question),
        )
    if not choices:
        raise ConfigError(
            "model", question.model.name, _fits_nowhere(question, rejected), _what_would_fit(question, rejected)
        )
    if question.rank_by == "memory":
        choices.sort(key=lambda one: one.memory.device_bytes)
    else:
        # with a fixed number of GPUs, the fastest is also the cheapest and the first to finish
        choices.sort(key=lambda one: one.step_time_s.value)
    best = recommended(choices, is_by_time=question.rank_by != "memory")
    ranked = [best, *(one for one in choices if one is not best)]
    return Advice(question=question, choices=ranked, rejected=rejected, num_layouts=num_layouts)


def best_of(question: Question) -> Choice | None:
    """Return the choice that `advise` would recommend, or None if it would raise. Predicts layouts in the order of
    their lowest possible step times, until no other can be the best."""
    model, cluster = question.model, question.cluster
    found: dict[Verdict, list[tuple[Layout, MemoryEstimate]]] = defaultdict(list)
    for layout in layouts(question):
        needed = memory(model, layout)
        found[verdict(needed, cluster.gpu)].append((layout, needed))
    fitting = found["fits"] or found["may not fit"]
    if question.rank_by == "memory":
        fitting = [min(fitting, key=lambda one: one[1].device_bytes)] if fitting else []
    least = [
        least_step_s(model, layout, cluster, measured=question.measured, fused_attention=question.fused_attention)
        for layout, _ in fitting
    ]
    predicted: dict[int, Choice] = {}
    fastest = math.inf
    for index in sorted(range(len(fitting)), key=least.__getitem__):
        if least[index] > TIE * fastest:
            break
        layout, needed = fitting[index]
        predicted[index] = predict(question, layout, needed=needed)
        fastest = min(fastest, predicted[index].step_time_s.value)
    # ties keep the order of their layouts
    ranked = sorted((predicted[index] for index in sorted(predicted)), key=lambda one: one.step_time_s.value)
    return recommended(ranked) if ranked else None


def recommended(choices: Sequence[Choice], *, is_by_time: bool = True) -> Choice:
    """Return the first ranked choice that certainly fits, or else the first. is_by_time: prefer the simplest of equally
    fast choices."""
    safe = [one for one in choices if one.fits == "fits"] or list(choices)
    if not is_by_time:
        return safe[0]
    return min((one for one in safe if one.step_time_s.value <= TIE * safe[0].step_time_s.value), key=_plainness)


def predict(question: Question, layout: Layout, *, needed: MemoryEstimate | None = None) -> Choice:
    """Predict one layout of the question, even if it does not fit."""
    model, cluster = question.model, question.cluster
    needed = needed or memory(model, layout)
    step = step_time(model, layout, cluster, measured=question.measured, fused_attention=question.fused_attention)
    total = step.total_s
    if question.input_samples_per_s is not None:
        nodes = math.ceil(layout.num_gpus / cluster.gpus_per_node)
        waited = layout.global_batch / (question.input_samples_per_s * nodes) - total
        if waited > 0:
            step = replace(step, overhead_s=step.overhead_s + waited)
            total = step.total_s
    kind = "unmeasured" if question.anchor is None else "anchored"
    why_wide = reasons(question.anchor, layout, cluster, exposed_share=step.exposed_comm_s / total)
    unlike = doubts(layout, cluster, is_guessed=model.is_guessed)
    rate = layout.global_batch / total
    peak = cluster.gpu.peak_flops(layout.precision) * layout.num_gpus
    price = cluster.price_per_gpu_hour
    return Choice(
        layout=layout,
        step=step,
        step_time_s=interval(total, kind, widened=why_wide, doubted=bool(unlike)),
        memory=needed,
        fits=verdict(needed, cluster.gpu),
        samples_per_s=rate,
        tokens_per_s=rate * model.tokens_per_sample,
        mfu=model.train_flops * rate / peak,
        kind=kind,
        is_trusted=is_trusted(kind, widened=why_wide, doubted=bool(unlike)),
        reasons=why_wide,
        doubts=unlike,
        cost_per_million_samples=None if price is None else 1e6 / rate * price * layout.num_gpus / 3600,
    )


def _rejected(question: Question, layout: Layout, needed: MemoryEstimate) -> Rejected:
    card = question.cluster.gpu.memory_gib * GIB
    missing = HEADROOM * card - needed.spare_bytes(question.cluster.gpu)
    reason = (
        f"needs {needed.device_bytes / GIB:.1f} GiB of {card / GIB:.1f}, of which {100 * HEADROOM:.0f} % must stay free"
    )
    return Rejected(layout, reason, missing / GIB)


def _plainness(choice: Choice) -> tuple[float, ...]:
    """Sort key that puts simpler layouts first: fewer types of parallelism, less sharding, fewer chunks, no
    recomputation; then faster ones."""
    layout = choice.layout
    level = {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3}[layout.sharding] + (layout.shard not in (1, layout.data))
    return (
        layout.pipeline > 1,
        layout.tensor > 1,
        level,
        layout.chunks,
        layout.checkpointing != "none",
        choice.step_time_s.value,
    )


def _nearest(question: Question) -> str:
    gpus = question.cluster.num_gpus
    lower = question.global_batch // gpus * gpus
    return f"{lower or gpus} or {(question.global_batch // gpus + 1) * gpus} divide evenly"


def _fits_nowhere(question: Question, rejected: list[Rejected]) -> str:
    closest = min(rejected, key=lambda one: one.missing_gib)
    return (
        f"it fits on no layout of {question.cluster.num_gpus} x {question.cluster.gpu.name}: "
        f"the closest, {closest.layout.describe()}, {closest.reason}"
    )


def _what_would_fit(question: Question, rejected: list[Rejected]) -> str:
    """Advice on what would fit: the smallest number of nodes for the state and one micro-batch, or another GPU."""
    closest = min(rejected, key=lambda one: one.missing_gib)
    unused = [
        name for name in STRATEGIES if name not in question.strategies and (name != "ep" or question.model.num_experts)
    ]
    words = [f"{closest.missing_gib:.1f} GiB more per GPU"]
    if unused:
        words.append(f"or other strategies: --strategies {','.join((*question.strategies, *unused))}")
    for factor in (2, 4, 8, 16, 32, 64):
        larger = replace(
            question.cluster,
            num_nodes=question.cluster.num_nodes * factor,
            network=question.cluster.network or _SOME_NETWORK,
        )
        batch = max(question.global_batch, larger.num_gpus)
        trial = replace(question, cluster=larger, global_batch=batch - batch % larger.num_gpus)
        if any(
            memory(trial.model, layout).spare_bytes(larger.gpu) >= HEADROOM * larger.gpu.memory_gib * GIB
            for layout in layouts(trial)
        ):
            words.append(f"or {larger.num_nodes} nodes of {larger.gpus_per_node}")
            break
    return ", ".join(words)


_SOME_NETWORK = Network(name="8x400G", gb_per_s=400.0, num_adapters=8, source="assumed, to count only memory")
