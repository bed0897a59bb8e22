"""Advice on a limit, with the config keys and commands to use.

Used for trainings and for the points of a scaling study: the same limit gets the same advice everywhere.
"""

from scaleray.config.strategy_traits import traits_of
from scaleray.profiling.verdict.findings import Advice, Limit
from scaleray.profiling.verdict.signals import Facts
from scaleray.records.phases import Phase


def advice_on(limit: Limit, facts: Facts, *, phase: str | None = None, cause: str = "") -> Advice:
    """Advice on a limit. phase: where a straggler falls behind. cause: see `Finding.cause`."""
    if limit is Limit.COMMUNICATION:
        return about_communication(facts)
    if limit is Limit.STRAGGLER:
        return _about_stragglers(facts, phase)
    if limit is Limit.HOST:
        return _about_the_host(facts, cause)
    if limit is Limit.INPUT:
        return about_input()
    return _OTHERS.get(limit, Advice(""))


_OTHERS = {
    Limit.COPY: Advice(
        "return fewer or narrower columns from the workload's transform or collate, in the dtype that the model uses"
    ),
    Limit.EVALUATION: Advice(
        "evaluate less often (evaluation.every), or in larger micro-batches (evaluation.micro_size)",
        ("evaluation.every", "evaluation.micro_size"),
    ),
    Limit.CHECKPOINT: Advice(
        "write during training (checkpoint.is_asynchronous), or less often (checkpoint.every)",
        ("checkpoint.is_asynchronous", "checkpoint.every"),
    ),
    Limit.MEMORY: Advice(
        "smaller micro-batches (batch.micro_size, or memory.find_micro_size), activations.checkpointing, "
        "or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against fragmentation",
        ("batch.micro_size", "memory.find_micro_size", "activations.checkpointing"),
    ),
    Limit.INCOMPLETE: Advice("measure more steps: scaleray profile --steps 50", (), ("scaleray profile",)),
}


def about_input() -> Advice:
    """Advice for steps that wait for their rows."""
    return Advice(
        "more cores for reading (data.reserved_cpus), larger chunks (data.chunk_mib), "
        "or a source that is already decoded",
        ("data.reserved_cpus", "data.chunk_mib"),
    )


def about_communication(facts: Facts) -> Advice:
    """Advice for steps that wait for collectives, by strategy."""
    if facts.strategy == "fsdp":
        first = "larger micro-batches (batch.micro_size), " if facts.accumulation_steps > 1 else ""
        keys = ("parallel.replicate", "fsdp.reshard_after_forward", "fsdp.prefetch")
        return Advice(
            f"{first}HSDP (parallel.replicate), gathering further ahead (fsdp.prefetch), "
            "or fsdp.reshard_after_forward false where memory allows",
            (*keys, "batch.micro_size") if first else keys,
        )
    if facts.strategy == "tensor":
        return Advice("a parallel.tensor that stays within a node, and replicas beyond it", ("parallel.tensor",))
    if facts.strategy == "pipeline":
        return Advice("more micro-batches in a step, or pipeline.schedule interleaved_1f1b", ("pipeline.schedule",))
    if facts.strategy and traits_of(facts.strategy).averages_now_and_then:
        return Advice("a larger local_sgd.sync_every", ("local_sgd.sync_every",))
    if facts.strategy and traits_of(facts.strategy).mixes_with_neighbours:
        return Advice("a larger global batch, or local_sgd, which synchronises less often", ("batch.global_size",))
    return Advice(
        "a larger global batch, larger buckets (strategy.bucket_size_mib), half the bytes (compression.name bf16), "
        "or averaging less than every step (local_sgd)",
        ("batch.global_size", "strategy.bucket_size_mib", "compression.name"),
    )


def about_contention(facts: Facts) -> Advice:
    """Advice for workers that slow each other down."""
    if facts.is_oversubscribed:
        return Advice("use at most one worker per core, to see how a cluster would scale")
    return Advice(
        "fewer workers per node, more cores per worker (scale.cpus_per_worker), "
        "or shares.by speed if one is always slow",
        ("scale.cpus_per_worker", "shares.by"),
    )


def about_little_work(facts: Facts) -> Advice:
    """Advice for workers with too little work."""
    share = max(1, facts.global_batch_size // facts.workers)
    samples = "sample" if share == 1 else "samples"
    return Advice(
        f"a larger global batch than {share} {samples} per worker, fewer workers, or compilation.what blocks",
        ("batch.global_size", "compilation.what"),
    )


def _about_stragglers(facts: Facts, phase: str | None) -> Advice:
    if phase in (Phase.HOST, Phase.OTHER):
        return Advice("trace what this rank does between steps: scaleray profile --trace", (), ("scaleray profile",))
    return Advice(
        "check that node (clocks, other processes, temperature) and exclude it (scale.label_selector), "
        "or give it fewer rows (shares.by speed)",
        ("scale.label_selector", "shares.by"),
    )


def _about_the_host(facts: Facts, cause: str) -> Advice:
    if cause == "garbage collection":
        return Advice("gc.freeze() once the model is built, or gc.disable() and gc.collect() at evaluations")
    fewer = " (batch.micro_size)" if facts.accumulation_steps > 1 else ""
    return Advice(
        f"fewer, larger launches: larger micro-batches{fewer}, compilation.what blocks, less in callbacks and logging; "
        "scaleray profile --trace shows which",
        ("compilation.what", *(["batch.micro_size"] if fewer else [])),
        ("scaleray profile",),
    )
