"""Candidate layouts of a question: all that divide its GPUs and its batch, even if they do not fit."""

from collections.abc import Iterator

from scaleray.planner.answers.plan_question import Question
from scaleray.planner.cost.layout import Checkpointing, Layout, Schedule, Sharding
from scaleray.planner.models.block_counts import ModelProfile

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def layouts(question: Question) -> Iterator[Layout]:
    """Yield all layouts of the question: every combination of degrees whose product is the number of GPUs,
    micro-batches that divide the batch, and types of recomputation and sharding."""
    num_gpus, model = question.cluster.num_gpus, question.model
    is_wide = question.precision in ("fp32", "tf32")
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
                                yield Layout(
                                    precision=question.precision,
                                    is_mixed=not is_wide,
                                    gradient_bytes=4,
                                    optimizer_bytes=question.optimizer_bytes,
                                    compiled=question.compiled,
                                    sequence_parallel=True,
                                    data=data,
                                    shard=shard,
                                    tensor=tensor,
                                    pipeline=pipeline,
                                    micro_batch=micro_batch,
                                    accumulation=passes,
                                    sharding=sharding,
                                    checkpointing=checkpointing,
                                    schedule=schedule,
                                    chunks=chunks,
                                    expert=expert,
                                    # the tensor strategy reduces once per step; plain FSDP is set to reduce after each
                                    # micro-batch
                                    accumulates_whole=sharding == "zero3" and tensor > 1,
                                )


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
    """Expert parallel degrees to try: 1, with all experts on each rank, and powers of two that divide both the experts
    and a stage's `ranks`."""
    experts = question.model.num_experts
    if not experts or "ep" not in question.strategies:
        return [1]
    return [d for d in (2**power for power in range(11)) if experts % d == 0 and ranks % d == 0]


def _shardings(question: Question, data: int, tensor: int, pipeline: int) -> list[tuple[Sharding, int]]:
    wanted = question.strategies
    if data == 1:
        return [("none", 1)]
    found: list[tuple[Sharding, int]] = []
    # gradients of a pipeline's replicas must be summed in any case; its state is sharded if the
    # strategies include sharding
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
