"""Each strategy is the training of one process, or keeps what it promises: `scaleray verify` of our own code, with the
settings that what it does depends on. A mistake in a step, a checkpoint, an evaluation or the weights shows here."""

import pytest
from planted_edits import Planted
from planted_in_gradients import rows
from planted_mistakes import judge
from small_runs import Classify, Tokens, WithBatchNorm, WithDropout
from small_transformer import SmallTransformer

EVALUATED = {"num_val": 21}
ADAMW = {
    "optimizer.name": "adamw",
    "optimizer.learning_rate": 0.01,
    "optimizer.weight_decay": 0.1,
    "optimizer.momentum": 0.0,
}
CLIPPED, AVERAGED = {"optimizer.clip_norm": 0.3}, {"averaging.decay": 0.9}
NODES = {"local_sgd.sync_every": 4, "local_sgd.node_size": 2, "local_sgd.node_sync_every": 2}
SHARDS = {"parallel.replicate": 2, "parallel.shard": 2}
LAYERS = {"parallel.replicate": 2, "parallel.tensor": 2}
STAGES = {"parallel.replicate": 2, "parallel.pipeline": 2}
STREAMED = {"local_sgd.sync_every": 4, "local_sgd.fragments": 2, "local_sgd.overlap": 1, "local_sgd.mixing": 0.3}
LETTERS = {"gossip.max_staleness": 2, "gossip.meet_every": 5, "deterministic": True}
TRAININGS = [
    ("ddp", 2, rows(Classify, **EVALUATED), {**CLIPPED, **AVERAGED, "optimizer.weight_decay": 0.1}),
    ("ddp", 2, rows(WithBatchNorm, **EVALUATED), {}),
    ("ddp", 2, rows(WithDropout, **EVALUATED), {"compression.name": "topk", "compression.density": 0.2}),
    ("ddp", 2, rows(Tokens), {**CLIPPED, "pruning.method": "magnitude", "pruning.start_step": 2}),
    ("fsdp", 2, rows(Classify, **EVALUATED), {**ADAMW, **CLIPPED, **AVERAGED}),
    ("fsdp", 4, rows(WithBatchNorm, **EVALUATED), {"parallel.replicate": 2}),
    ("zero1", 2, rows(WithDropout, **EVALUATED), {**ADAMW, **CLIPPED, **AVERAGED}),
    ("tensor", 2, rows(WithDropout, **EVALUATED), CLIPPED),
    ("tensor", 2, rows(SmallTransformer), {**ADAMW, **AVERAGED}),
    ("pipeline", 2, rows(SmallTransformer), {**CLIPPED, **AVERAGED}),
    ("pipeline", 2, rows(WithDropout, **EVALUATED), ADAMW),
    ("local_sgd", 2, rows(Classify, **EVALUATED), {**ADAMW, **CLIPPED, "local_sgd.sync_every": 3, "local_sgd.warmup_steps": 2}),
    ("local_sgd", 2, rows(WithBatchNorm, **EVALUATED), {"local_sgd.sync_every": 3}),
    ("local_sgd", 4, rows(Classify), NODES),
    ("diloco", 2, rows(Classify, **EVALUATED), {**CLIPPED, "local_sgd.sync_every": 3}),
    ("local_sgd", 4, rows(WithBatchNorm, **EVALUATED), {**SHARDS, "strategy.name": "local_sgd", "local_sgd.sync_every": 3}),
    ("diloco", 4, rows(WithDropout, **EVALUATED), {**SHARDS, "strategy.name": "diloco", "local_sgd.sync_every": 3}),
    ("diloco", 4, rows(WithBatchNorm, **EVALUATED), {**LAYERS, "strategy.name": "diloco", "local_sgd.sync_every": 3}),
    ("local_sgd", 4, rows(SmallTransformer, num_val=6), {**STAGES, "strategy.name": "local_sgd", "local_sgd.sync_every": 3}),
    ("diloco", 2, rows(WithBatchNorm, **EVALUATED), STREAMED),
    ("diloco", 4, rows(Classify, **EVALUATED), {**STREAMED, **SHARDS, **CLIPPED, "strategy.name": "diloco"}),
    ("gossip", 4, rows(Classify, **EVALUATED), CLIPPED),
    ("gossip", 2, rows(Classify, **EVALUATED), {**LETTERS, "gossip.is_asynchronous": True}),
    ("async_sgd", 2, rows(Classify, **EVALUATED), {**LETTERS, **CLIPPED}),
]  # fmt: skip
"""Strategy, number of workers, workload, and what its config says."""
IDS = [f"{number}-{strategy}-{size}" for number, (strategy, size, _, _) in enumerate(TRAININGS)]


OFTEN = 4
"""Trainings that are always run, the first ones; the others in turn."""
LONG = [
    number
    for number, (_, size, workload, _) in enumerate(TRAININGS)
    if size > 2 or isinstance(workload(), SmallTransformer)
]
CASES = [
    pytest.param(n, marks=pytest.mark.combination if n in LONG or n >= OFTEN else (), id=IDS[n])
    for n in range(len(TRAININGS))
]


@pytest.mark.parametrize("number", CASES)
def test_several_workers_train_what_one_process_trains(gloo, number):
    outcomes = gloo.run(TRAININGS[number][1], judged, number)[0]
    assert {one.verdict for one in outcomes} <= {"equal", "as promised"}, outcomes


def judged(place, number):
    strategy, world_size, workload, flags = TRAININGS[number]
    training = Planted("", "", "", "", lambda: None, strategy, world_size, workload, flags)
    has_statistics = isinstance(workload(), WithBatchNorm)  # over micro-batches, which one process has to see as well
    return judge(place, training, steps=8, accumulation=[1] if has_statistics else [2])
