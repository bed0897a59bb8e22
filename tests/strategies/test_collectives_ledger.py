"""The ledger of collectives holds what was really sent: it is held against a count below torch's dispatcher."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from small_runs import Classify, WithBatchNorm, train
from torch import nn
from torch.utils._pytree import tree_leaves

from scaleray.strategies.sharding.counted_passes import Traffic

STEPS = 3
NUMBERS = (torch.float64, torch.int64)


class Payloads(Traffic):
    """Counts collectives but for those that no ledger has: a step's own numbers (one, two or four), which parameters
    were used, where the strategy's own code asks for that, and the pickled plan of a checkpoint, which torch gathers
    and whose length differs between runs."""

    def __init__(self, *, with_maps):
        super().__init__()
        self.dtypes = () if with_maps else (torch.int32,)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "c10d::gather_":
            return func(*args, **(kwargs or {}))
        if "c10d" in func.namespace and "reduce" in func._schema.name:
            tensors = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
            if all((t.dtype in NUMBERS and t.numel() in (1, 2, 4)) or t.dtype in self.dtypes for t in tensors):
                return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


class Chain(Classify):
    """Four parts, for pipelines."""

    def build_model(self):
        parts = [nn.Sequential(nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)]
        return nn.Sequential(nn.Linear(6, 8), *parts, nn.Linear(8, 3))


def sent_in(place, workload, flags, steps):
    """What this rank sent in a run of so many steps, by size of the group and operation: (as seen from below, as the
    ledger has it); each operation with its calls and bytes."""
    with Payloads(with_maps=flags.get("strategy.name") != "pipeline") as traffic:
        finished = train(place, workload, {**flags, "stop.after": f"{steps} steps"})
    seen, told = Counter(), Counter()
    for kind, (count, num_bytes) in traffic.found.items():
        seen[kind.group_size, kind.operation, "calls"] += count
        seen[kind.group_size, kind.operation, "bytes"] += num_bytes
    for row in finished.summary.profile.collectives:
        told[row.group_size, row.operation, "calls"] += row.count
        told[row.group_size, row.operation, "bytes"] += row.num_bytes
    return seen, told


APART = {"local_sgd.sync_every": 3, "local_sgd.warmup_steps": 2, "batch.drop_last": True}
BUCKETS = {"strategy.bucket_size_mib": 1e-4}
"""Two kilobytes fill several buckets."""


@pytest.mark.always("[ddp", "[fsdp", "[tensor")
@pytest.mark.parametrize(
    ("workload", "flags", "ranks", "operations"),
    [
        (Classify(64), BUCKETS, 2, {"all_reduce"}),
        (WithBatchNorm(64), BUCKETS, 2, {"all_reduce", "broadcast"}),
        (WithBatchNorm(64), {**BUCKETS, "strategy.find_unused_parameters": True}, 2, {"all_reduce", "broadcast"}),
        (Classify(64), {"strategy.name": "zero1", **BUCKETS}, 2, {"all_reduce", "broadcast"}),
        (Classify(64), {"strategy.name": "fsdp", "batch.micro_size": 2}, 2, {"all_gather", "reduce_scatter"}),
        (
            Classify(64),
            {"strategy.name": "fsdp", "parallel.replicate": 2},
            4,
            {"all_gather", "reduce_scatter", "all_reduce"},
        ),
        (Classify(64), {"strategy.name": "tensor"}, 2, {"all_reduce"}),
        (Chain(64), {"strategy.name": "pipeline"}, 2, {"send"}),
        (Chain(64), {"strategy.name": "pipeline"}, 4, {"send", "all_reduce"}),
        (WithBatchNorm(64), {"strategy.name": "local_sgd", **APART, **BUCKETS}, 2, {"all_reduce", "broadcast"}),
        (
            WithBatchNorm(64),
            {"strategy.name": "local_sgd", **APART, "parallel.shard": 2},
            4,
            {"all_gather", "reduce_scatter", "all_reduce", "broadcast"},
        ),
        (Classify(64), {"strategy.name": "diloco", **APART, "parallel.tensor": 2}, 4, {"all_reduce"}),
        (
            Classify(64),
            {"strategy.name": "diloco", **APART, "local_sgd.fragments": 3, "local_sgd.mixing": 0.5},
            2,
            {"all_reduce"},
        ),
        (Chain(64), {"strategy.name": "diloco", **APART, "parallel.pipeline": 2}, 4, {"send", "all_reduce"}),
        (
            Classify(64),
            {"strategy.name": "local_sgd", **APART, "local_sgd.node_sync_every": 1, "local_sgd.node_size": 2},
            4,
            {"all_reduce"},
        ),
        (Classify(64), {"strategy.name": "diloco", **APART}, 2, {"all_reduce"}),
        (
            WithBatchNorm(64),
            {"strategy.name": "gossip", "gossip.meet_every": 3},
            4,
            {"send", "all_reduce", "broadcast"},
        ),
        (Classify(64), {"strategy.name": "gossip", "gossip.is_asynchronous": True}, 2, {"send", "all_reduce"}),
        (Classify(64), {"strategy.name": "async_sgd", "gossip.meet_every": 3}, 2, {"all_reduce"}),
    ],
    ids=[
        "ddp",
        "ddp buffers",
        "ddp unused",
        "zero1",
        "fsdp",
        "hsdp",
        "tensor",
        "pipeline",
        "pipeline of replicas",
        "local_sgd",
        "local_sgd over shards",
        "diloco over layers",
        "diloco in fragments",
        "diloco over stages",
        "local_sgd by node",
        "diloco",
        "gossip",
        "gossip beside",
        "async_sgd",
    ],
)
def test_the_ledger_has_the_calls_and_bytes_that_were_really_sent(gloo, workload, flags, ranks, operations):
    flags = {"batch.global_size": 8, **flags}
    # the difference of two runs has neither what is sent before the first step nor after the last one
    few = gloo.run(ranks, sent_in, workload, flags, STEPS)
    more = gloo.run(ranks, sent_in, workload, flags, 2 * STEPS)
    for (seen_before, told_before), (seen, told) in zip(few, more, strict=True):
        assert told - told_before == seen - seen_before
        assert {operation for _, operation, _ in told} == operations
