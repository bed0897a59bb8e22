"""What every strategy owes an interrupted run: resumed alike it is the same to the bit, elsewhere the same training."""

import pytest
import torch
from deep_net import Deep
from small_runs import Classify, TiedAndFrozen, Tokens, WithDropout, largest_difference, relative_differences, train
from small_transformer import SmallTransformer
from torch import nn

ADAMW = {"optimizer.name": "adamw", "optimizer.learning_rate": 0.01, "schedule.name": "cosine"}
SGD = {"optimizer.name": "sgd", "optimizer.momentum": 0.9, "optimizer.learning_rate": 0.01}
SAVED = {**ADAMW, "deterministic": True, "checkpoint.every": "3 steps", "stop.after": "11 steps"}
CLIPPED = {"optimizer.clip_norm": 0.3}
FP16 = {"precision.dtype": "fp16"}
FP32 = {"precision.dtype": "fp32"}
FSDP = {"strategy.name": "fsdp", **CLIPPED}
LOCAL = {"strategy.name": "local_sgd", "local_sgd.sync_every": 4, "local_sgd.warmup_steps": 1, **CLIPPED, **FP32}
DILOCO = {**LOCAL, "strategy.name": "diloco"}
SHARDS = {"parallel.replicate": 2, "parallel.shard": 2}
LAYERS = {"parallel.replicate": 2, "parallel.tensor": 2}
STAGES = {"parallel.replicate": 2, "parallel.pipeline": 2}
GOSSIP = {"strategy.name": "gossip", "gossip.meet_every": 5, "batch.drop_last": True, "batch.global_size": 12, **FP32}
LATE = {**GOSSIP, "gossip.is_asynchronous": True, "gossip.max_staleness": 2}
ASYNC_SGD = {**GOSSIP, "strategy.name": "async_sgd", "gossip.max_staleness": 2}
PIECES = {"batch.micro_size": 2}
IN_TURN = pytest.mark.combination


class TokensWithNorm(Tokens):
    """Counts differ from rank to rank, and there are statistics that the next forward pass changes."""

    def build_model(self):
        return nn.Sequential(
            nn.Embedding(self.vocabulary, 5), nn.BatchNorm1d(self.length), nn.Linear(5, self.vocabulary)
        )


def interrupted(place, workload, flags, folder, kill_at):
    whole = train(place, workload, flags)
    saved = train(place, workload, flags, folder=f"{folder}/whole")
    train(place, workload, flags, folder=f"{folder}/killed", kill_at=kill_at)
    resumed = train(place, workload, flags, folder=f"{folder}/killed")
    return whole, saved, resumed


@pytest.mark.always("local_sgd with dropout", "[gossip]")
@pytest.mark.parametrize(
    ("world_size", "workload", "flags", "kill_at"),
    [
        pytest.param(2, TiedAndFrozen(), {"strategy.name": "zero1", **CLIPPED, **FP16}, 5, id="zero1"),
        pytest.param(2, Deep(), {**FSDP, **FP32}, 8, id="fsdp"),
        pytest.param(
            2, Deep(), {**FSDP, **FP16, "fsdp.reshard_after_forward": False}, 5, id="fsdp, ZeRO-2, fp16", marks=IN_TURN
        ),
        pytest.param(2, WithDropout(), {"strategy.name": "tensor", **PIECES}, 5, id="tensor"),
        pytest.param(4, SmallTransformer(), {"strategy.name": "tensor", **PIECES}, 5, id="tensor x 4", marks=IN_TURN),
        pytest.param(2, SmallTransformer(), {"strategy.name": "pipeline", **PIECES}, 5, id="pipeline"),
        pytest.param(
            2, WithDropout(), {"strategy.name": "pipeline", **PIECES}, 8, id="pipeline with dropout", marks=IN_TURN
        ),
        # resumed after step 3 or 6: both between two averagings
        pytest.param(2, WithDropout(num_rows=33), LOCAL, 4, id="local_sgd with dropout"),
        pytest.param(2, TokensWithNorm(num_rows=33), LOCAL, 8, id="local_sgd with statistics", marks=IN_TURN),
        pytest.param(2, WithDropout(num_rows=33), DILOCO, 8, id="diloco with dropout", marks=IN_TURN),
        pytest.param(2, TokensWithNorm(num_rows=33), DILOCO, 4, id="diloco with statistics"),
        pytest.param(4, TokensWithNorm(num_rows=33), {**LOCAL, **SHARDS}, 8, id="local_sgd over shards"),
        pytest.param(4, WithDropout(num_rows=33), {**DILOCO, **SHARDS}, 8, id="diloco over shards"),
        pytest.param(4, SmallTransformer(num_rows=33), {**DILOCO, **LAYERS, **PIECES}, 8, id="diloco over layers"),
        pytest.param(4, WithDropout(num_rows=33), {**LOCAL, **STAGES, **PIECES}, 8, id="local_sgd over stages"),
        # with messages under way
        pytest.param(3, WithDropout(num_rows=72), GOSSIP, 8, id="gossip"),
        pytest.param(3, WithDropout(num_rows=72), LATE, 8, id="asynchronous gossip", marks=IN_TURN),
        pytest.param(3, WithDropout(num_rows=72), ASYNC_SGD, 8, id="async_sgd"),
    ],
)
def test_a_run_resumed_on_as_many_workers_is_bit_identical(gloo, tmp_path, world_size, workload, flags, kill_at):
    flags = {**SAVED, **flags}
    whole, saved, resumed = gloo.run(world_size, interrupted, workload, flags, str(tmp_path), kill_at)[0]
    first = kill_at // 3 * 3
    assert [step.step for step in resumed.steps] == list(range(first + 1, 12))
    # a checkpoint is a meeting: replicas that train apart record the losses of all there, as the run without any does not
    assert resumed.losses == saved.losses[first:]
    for other in (whole, saved):
        assert all(torch.equal(resumed.weights[name], other.weights[name]) for name in other.weights)


# in each, every layout is written and read
CHAINS = [
    pytest.param(ADAMW, SmallTransformer(), "tensor x 2, pipeline x 2, fsdp x 2, zero1 x 2, tensor x 2", id="in short"),
    # torch has other kernels for shards
    pytest.param(SGD, Deep(), "ddp x 1, fsdp x 2, ddp x 1", id="SGD"),
    pytest.param(
        ADAMW,
        SmallTransformer(),
        "pipeline x 2, ddp x 1, tensor x 4, fsdp x 2, pipeline x 4, ddp x 2, tensor x 2, pipeline x 2",
        id="a model in parts",
        marks=IN_TURN,
    ),
    pytest.param(
        ADAMW, Deep(), "fsdp x 2, ddp x 1, fsdp x 4, zero1 x 2, HSDP x 4, fsdp x 2", id="states in parts", marks=IN_TURN
    ),
]


def run_part(place, workload, flags, folder, kill_at):
    return train(place, workload, flags, folder=folder, kill_at=kill_at)


@pytest.mark.combination
@pytest.mark.parametrize(("optimizer", "workload", "chain"), CHAINS)
def test_a_run_goes_on_under_another_strategy_and_number_of_workers(gloo, tmp_path, optimizer, workload, chain):
    """Each leg trains three steps, the last of which is lost to the next one."""
    legs = chain.split(", ")
    flags = {
        **optimizer,
        **CLIPPED,
        **PIECES,
        "checkpoint.every": "2 steps",
        "stop.after": f"{2 * len(legs) + 1} steps",
    }
    whole = gloo.run(1, run_part, workload, flags, None, None)[0]
    for number, leg in enumerate(legs):
        name, _, workers = leg.split()
        strategy = {"HSDP": {"strategy.name": "fsdp", "parallel.replicate": 2}}.get(name, {"strategy.name": name})
        kill_at = None if number == len(legs) - 1 else 2 * number + 3
        run = gloo.run(int(workers), run_part, workload, {**flags, **strategy}, str(tmp_path), kill_at)[0]
        steps = slice(2 * number, 2 * number + 3)
        assert [s.step for s in run.steps] == [s.step for s in whole.steps[steps]], leg
        assert max(relative_differences(whole.losses[steps], run.losses)) < 1e-10, leg
    assert largest_difference(whole.weights, run.weights) < 1e-9


@pytest.mark.always("diloco")
@pytest.mark.parametrize("flags", [LOCAL, DILOCO, LATE, ASYNC_SGD], ids=lambda flags: flags["strategy.name"])
def test_replicas_on_another_number_of_workers_start_from_their_mean(gloo, tmp_path, flags):
    flags = {**SAVED, **flags, "batch.global_size": 12}
    gloo.run(3, run_part, Classify(num_rows=48), flags, str(tmp_path), 7)
    first = gloo.run(2, run_part, Classify(num_rows=48), flags, str(tmp_path), None)[0]
    assert [s.step for s in first.steps] == list(range(7, 12))
    assert any("instead of 3" in event and "mean" in event for event in first.events)
