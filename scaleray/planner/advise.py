"""Which layout to train with on a cluster: every sensible one is laid out, what does not fit is dropped with the reason, the rest ranked.

Predictions, not measurements: each has the interval that the planner's own misses on published measurements give (`uncertainty`), and choices
whose intervals overlap are not told apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from scaleray.errors import ConfigError
from scaleray.planner.constants import DEFAULT, Constants
from scaleray.planner.fits import HEADROOM, Verdict, verdict
from scaleray.planner.hardware import Cluster, Network
from scaleray.planner.layout import Checkpointing, Layout, Schedule, Sharding
from scaleray.planner.memory import GIB, MemoryEstimate, memory
from scaleray.planner.profile import ModelProfile
from scaleray.planner.step_time import Measured, StepTime, step_time
from scaleray.planner.uncertainty import Anchor, Reason, doubts, interval, is_trusted, reasons
from scaleray.study_records import Estimate

STRATEGIES = ("ddp", "zero1", "fsdp", "hsdp", "tp", "pp", "ep")
RANKINGS = ("throughput", "cost", "time", "time-to-target", "memory")
TIE = 1.02
"""Step times closer than this are the same to the planner; the plainer layout is put first."""
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be trained on what. `global_batch`: samples of an optimizer step, over all GPUs."""

    model: ModelProfile
    cluster: Cluster
    global_batch: int
    precision: str = "bf16"
    strategies: tuple[str, ...] = STRATEGIES
    optimizer_bytes: int = 8
    fused_attention: bool = True
    compiled: bool = False
    measured: Measured | None = None
    anchor: Anchor | None = None
    """The point that `measured` was calibrated on."""
    input_samples_per_s: float | None = None
    """What the input pipeline of one node delivers; None: enough."""
    rank_by: str = "throughput"
    """`throughput` (and with it cost and time), or `memory`. `time-to-target` compares batch sizes as well (`to_target`)."""

    def __post_init__(self) -> None:
        if self.rank_by not in RANKINGS:
            raise ConfigError("--rank", self.rank_by, f"it must be one of {', '.join(RANKINGS)}")
        if self.global_batch < 1:
            raise ConfigError("--global-batch", self.global_batch, "it must be at least 1 sample")
        unknown = [name for name in self.strategies if name not in STRATEGIES]
        if unknown:
            raise ConfigError("--strategies", ",".join(unknown), f"the planner knows {', '.join(STRATEGIES)}")
        if not self.model.has_flops and self.measured is None:
            raise ConfigError(
                "model",
                self.model.name,
                "only its size is known, not what it computes",
                "give a measured step: --step-time, --micro-batch",
            )


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A layout that fits, with what is predicted of it."""

    layout: Layout
    step: StepTime
    step_time_s: Estimate
    memory: MemoryEstimate
    fits: Verdict
    samples_per_s: float
    tokens_per_s: float
    mfu: float
    kind: str
    """The class of its interval."""
    reasons: tuple[Reason, ...] = ()
    """Why its interval is wider than the narrowest of the class."""
    is_trusted: bool
    doubts: tuple[str, ...] = ()
    """In what it is unlike the rows that its interval comes from."""
    cost_per_million_samples: float | None = None


@dataclass(frozen=True)
class Rejected:
    """A layout that was dropped, and why."""

    layout: Layout
    reason: str
    missing_gib: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The recommended choice, then all others in their ranking, and what was dropped."""

    question: Question
    choices: list[Choice]
    rejected: list[Rejected]
    num_layouts: int

    @property
    def best(self) -> Choice:
        """The recommended choice: the fastest (or smallest) whose memory surely fits, or the fastest where none surely does."""
        return self.choices[0]

    @property
    def faster(self) -> Choice | None:
        """The fastest choice that may not fit, where it is faster than the recommended one by more than a tie."""
        fastest = min(self.choices, key=lambda one: one.step_time_s.value)
        return fastest if fastest.step_time_s.value * TIE < self.best.step_time_s.value else None


def advise(question: Question, constants: Constants = DEFAULT) -> Advice:
    """Every layout of the question's strategies on all of its cluster's GPUs, ranked.

    Raises ConfigError where the batch cannot be divided at all, or nothing fits; the message says what would help.
    """
    advice = survey(question, constants)
    if not advice.num_layouts:
        raise ConfigError(
            "--global-batch",
            question.global_batch,
            f"no layout of {question.cluster.num_gpus} GPUs divides it",
            _nearest(question),
        )
    if not advice.choices:
        rejected = advice.rejected
        raise ConfigError(
            "model", question.model.name, _fits_nowhere(question, rejected), _what_would_fit(question, rejected)
        )
    return advice


def survey(question: Question, constants: Constants = DEFAULT) -> Advice:
    """As `advise`, but without a word where nothing fits: there are no choices then."""
    choices: list[Choice] = []
    rejected: list[Rejected] = []
    count = 0
    for layout in layouts(question):
        count += 1
        needed = memory(question.model, layout)
        card = question.cluster.gpu.memory_gib * GIB
        missing = HEADROOM * card - needed.spare_bytes(question.cluster.gpu)
        if missing > 0:
            reason = f"needs {needed.device_bytes / GIB:.1f} GiB of {card / GIB:.1f}, of which {100 * HEADROOM:.0f} % are kept free"
            rejected.append(Rejected(layout, reason, missing / GIB))
            continue
        choices.append(predict(question, layout, needed=needed, constants=constants))
    if question.rank_by == "memory":
        choices.sort(key=lambda one: one.memory.device_bytes)
    else:
        # on given GPUs the fastest is the cheapest and the soonest done as well
        choices.sort(key=lambda one: one.step_time_s.value)
    if choices:
        best = recommended(choices, is_by_time=question.rank_by != "memory")
        choices = [best, *(one for one in choices if one is not best)]
    return Advice(question=question, choices=choices, rejected=rejected, num_layouts=count)


def recommended(choices: Sequence[Choice], *, is_by_time: bool = True) -> Choice:
    """Of ranked choices the first that surely fits, or the first where none does; the plainest of those that are as fast."""
    safe = [one for one in choices if one.fits == "fits"] or list(choices)
    if not is_by_time:
        return safe[0]
    return min((one for one in safe if one.step_time_s.value <= TIE * safe[0].step_time_s.value), key=_plainness)


def predict(
    question: Question, layout: Layout, *, needed: MemoryEstimate | None = None, constants: Constants = DEFAULT
) -> Choice:
    """One layout of the question, whether it fits or not."""
    model, cluster = question.model, question.cluster
    needed = needed or memory(model, layout)
    step = step_time(
        model,
        layout,
        cluster,
        measured=question.measured,
        fused_attention=question.fused_attention,
        constants=constants,
    )
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
        layout=layout, step=step, step_time_s=interval(total, kind, widened=why_wide, doubted=bool(unlike)), memory=needed, fits=verdict(needed, cluster.gpu), samples_per_s=rate,
        tokens_per_s=rate * model.tokens_per_sample, mfu=model.train_flops * rate / peak, kind=kind, is_trusted=is_trusted(kind, widened=why_wide, doubted=bool(unlike)), reasons=why_wide,
        doubts=unlike,
        cost_per_million_samples=None if price is None else 1e6 / rate * price * layout.num_gpus / 3600,
    )  # fmt: skip


def layouts(question: Question) -> Iterator[Layout]:
    """Degrees that multiply to the GPUs, times micro-batches that divide the batch, times what is recomputed and how it is sharded."""
    num_gpus, model = question.cluster.num_gpus, question.model
    is_wide = question.precision in ("fp32", "tf32")
    base = Layout(
        precision=question.precision, is_mixed=not is_wide, gradient_bytes=4, optimizer_bytes=question.optimizer_bytes,
        compiled=question.compiled, sequence_parallel=True,
    )  # fmt: skip
    for tensor in _tensor_degrees(question):
        for pipeline in _pipeline_degrees(question, num_gpus // tensor):
            data = num_gpus // tensor // pipeline
            if question.global_batch % data:
                continue
            per_replica = question.global_batch // data
            for sharding, shard in _shardings(question, data, tensor, pipeline):
                for micro_batch in (size for size in MICRO_BATCHES if per_replica % size == 0):
                    passes = per_replica // micro_batch
                    if pipeline > 1 and passes < pipeline:
                        continue
                    for checkpointing in _checkpointings(model, question.fused_attention):
                        for schedule, chunks in _schedules(pipeline, passes, model.num_layers):
                            for expert in _expert_degrees(question, data * tensor):
                                yield replace(
                                    base, data=data, shard=shard, tensor=tensor, pipeline=pipeline, micro_batch=micro_batch, accumulation=passes,
                                    sharding=sharding, checkpointing=checkpointing, schedule=schedule, chunks=chunks, expert=expert,
                                    # the tensor strategy reduces once a step; plain FSDP is told to reduce each micro-batch's gradients
                                    accumulates_whole=sharding == "zero3" and tensor > 1,
                                )  # fmt: skip


def _tensor_degrees(question: Question) -> list[int]:
    limit = question.cluster.gpus_per_node if "tp" in question.strategies else 1
    heads = question.model.num_heads
    return [
        d for d in range(1, limit + 1) if question.cluster.num_gpus % d == 0 and (d == 1 or (heads and heads % d == 0))
    ]


def _pipeline_degrees(question: Question, rest: int) -> list[int]:
    limit = min(rest, question.model.num_layers, 64) if "pp" in question.strategies else 1
    return [d for d in range(1, max(1, limit) + 1) if rest % d == 0]


def _expert_degrees(question: Question, ranks: int) -> list[int]:
    """Whole on each rank, or spread over as many of a stage's ranks as divide both the experts and them, twice as many each time."""
    experts = question.model.num_experts
    if not experts or "ep" not in question.strategies:
        return [1]
    return [d for d in (2**power for power in range(11)) if experts % d == 0 and ranks % d == 0]


def _shardings(question: Question, data: int, tensor: int, pipeline: int) -> list[tuple[Sharding, int]]:
    wanted = question.strategies
    if data == 1:
        return [("none", 1)]
    found: list[tuple[Sharding, int]] = []
    # replicas of a pipeline have to be summed whatever was asked for, and share out its state where sharding was
    needs_sum = pipeline > 1 or not {"ddp", "zero1", "fsdp", "hsdp"} & set(wanted)
    if "ddp" in wanted or needs_sum:
        found.append(("none", 1))
    if "zero1" in wanted or (pipeline > 1 and {"fsdp", "hsdp"} & set(wanted)):
        found.append(("zero1", 1))
    if "fsdp" in wanted and pipeline == 1:
        found.append(("zero3", data))
    inside = max(1, question.cluster.gpus_per_node // tensor)
    if "hsdp" in wanted and pipeline == 1 and data > inside > 1 and data % inside == 0:
        found.append(("zero3", inside))
    return found


def _checkpointings(model: ModelProfile, fused_attention: bool) -> list[Checkpointing]:
    if model.kind != "transformer":
        return ["none", "full"]
    return ["none", "alternate", "full"] if fused_attention else ["none", "selective", "full"]


def _schedules(pipeline: int, passes: int, num_layers: int) -> list[tuple[Schedule, int]]:
    if pipeline == 1:
        return [("1f1b", 1)]
    found: list[tuple[Schedule, int]] = [("1f1b", 1)]
    if num_layers >= 2 * pipeline and passes % pipeline == 0:
        found.append(("interleaved", 2))
    return found


def _plainness(choice: Choice) -> tuple[float, ...]:
    """Fewer kinds of parallelism, less sharding, fewer passes, less memory: what has fewer ways to go wrong."""
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
    return f"{lower or gpus} or {(question.global_batch // gpus + 1) * gpus} can be divided"


def _fits_nowhere(question: Question, rejected: list[Rejected]) -> str:
    closest = min(rejected, key=lambda one: one.missing_gib)
    return (
        f"it fits on no layout of {question.cluster.num_gpus} x {question.cluster.gpu.name}: the closest, {closest.layout.describe()}, "
        f"{closest.reason}"
    )  # fmt: skip


def _what_would_fit(question: Question, rejected: list[Rejected]) -> str:
    """The smallest number of nodes on which the state and one micro-batch fit, or another card."""
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


_SOME_NETWORK = Network(name="8x400G", gb_per_s=400.0, num_adapters=8, source="assumed, to count memory alone")
