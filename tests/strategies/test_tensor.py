"""Tensor parallelism, alone and under FSDP: the training of one process, in every split that the reference transformer has."""

import warnings
from dataclasses import replace

import pytest
import torch
from small_runs import Classify, largest_difference, make_job, relative_differences, train, train_in_plain_torch
from small_transformer import SmallTransformer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from scaleray.errors import ConfigError, WorkloadError
from scaleray.strategies.fsdp import total_norm
from scaleray.strategies.sharding.counted_passes import data_axis
from scaleray.training.setup.model_setup import prepare

TENSOR = {"strategy.name": "tensor"}
ADAMW = {"optimizer.name": "adamw", "optimizer.learning_rate": 0.01, "optimizer.clip_norm": 0.5, "batch.micro_size": 2}


def assert_same_training(finished, plain, *, within=1e-9):
    assert len(finished.losses) == len(plain.losses)
    assert max(relative_differences(plain.losses, finished.losses)) <= within
    assert max(relative_differences(plain.grad_norms, finished.grad_norms)) <= within
    assert list(finished.weights) == list(plain.weights)
    assert largest_difference(plain.weights, finished.weights) <= within


@pytest.mark.always("True-True-2")
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("tie_head", [True, False])
def test_a_transformer_equals_one_process(gloo, tie_head, sequence_parallel, world_size):
    workload = SmallTransformer(num_val=6, tie_head=tie_head, num_blocks=2)
    recipe = {**ADAMW, "stop.after": "1 epoch"}
    flags = {**recipe, **TENSOR, "tensor.sequence_parallel": sequence_parallel}
    finished = gloo.run(world_size, train, workload, flags)[0]
    assert_same_training(finished, train_in_plain_torch(workload, recipe))
    alone = gloo.run(1, train, workload, recipe)[0]
    assert finished.evaluations[-1].metrics == pytest.approx(alone.evaluations[-1].metrics, rel=1e-12)


@pytest.mark.combination
@pytest.mark.parametrize(("size", "num_kv_heads"), [pytest.param(4, 4, marks=pytest.mark.slow), (2, 2)])
def test_heads_that_share_keys(gloo, size, num_kv_heads):
    recipe = {**ADAMW, "stop.after": "3 steps"}
    workload = SmallTransformer(num_heads=4, num_kv_heads=num_kv_heads, width=32, num_blocks=1)
    finished = gloo.run(size, train, workload, {**recipe, **TENSOR, "parallel.tensor": size})[0]
    assert_same_training(finished, train_in_plain_torch(workload, recipe))


@pytest.mark.combination
def test_a_replica_with_a_row_less_takes_part_in_every_pass(gloo):
    # 27 rows in batches of 8: the last has 3, so 2 single rows for one replica and 1 for the other
    workload = SmallTransformer(num_rows=27, num_blocks=1)
    recipe = {**ADAMW, "batch.micro_size": 1, "stop.after": "1 epoch"}
    finished = gloo.run(4, train, workload, {**recipe, **TENSOR})[0]
    assert_same_training(finished, train_in_plain_torch(workload, recipe))


def warned_of(place, flags):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(place, SmallTransformer(num_blocks=1), flags)
    return {str(one.message).partition(")")[2][:40] for one in caught if "FSDP2" in str(one.message)}


def test_split_layers_under_fsdp_train_without_torchs_warning_of_views(gloo):
    recipe = {**ADAMW, "stop.after": "2 steps"}
    assert gloo.run(4, warned_of, {**recipe, **TENSOR}) == [set()] * 4


def axis_of_replicas_and_shards(place):
    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("replicate", "shard", "tp"))
    whole = mesh["replicate", "shard"]._flatten("dp")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return data_axis(mesh) is whole, data_axis(init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))).size()


def test_replicas_and_shards_are_one_axis_without_a_deprecated_name(gloo):
    assert gloo.run(1, axis_of_replicas_and_shards) == [(True, 1)]


# what lies where


def placements(place, flags):
    job, _ = make_job(SmallTransformer(), {**TENSOR, **flags}, world_size=place.world_size)
    setup = prepare(job.workload, job.config, job.recipe, replace(place, degrees=job.degrees))
    found = {n: (tuple(p.shape), tuple(p.to_local().shape)) for n, p in setup.parallel.module.named_parameters()}
    setup.parallel.close()
    plain = [type(p) for p in setup.parallel.module.parameters()]
    return found, plain


@pytest.mark.combination
def test_each_worker_holds_its_part_of_every_layer_until_close(gloo):
    for found, after in gloo.run(2, placements, {}):
        assert found["embedding.weight"] == ((32, 16), (16, 16))
        assert found["blocks.0.attention.query.weight"] == ((16, 16), (8, 16))
        assert found["blocks.0.attention.output.weight"] == ((16, 16), (16, 8))
        assert found["blocks.3.feed_forward.down.weight"] == ((16, 32), (16, 16))
        assert found["norm.weight"] == ((16,), (16,))
        assert set(after) == {nn.Parameter}
    for found, _ in gloo.run(4, placements, {}):
        assert found["blocks.0.attention.query.weight"] == ((16, 16), (4, 16))
        assert found["norm.weight"] == ((16,), (8,))


def norms(place):
    """Of plain, replicated and sharded gradients together, and of the whole tensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    whole = [torch.randn(7, 5, dtype=torch.float64) for _ in range(5)]
    parts = [
        whole[0],
        distribute_tensor(whole[1], mesh["tp"], [Replicate()]),
        distribute_tensor(whole[2], mesh["tp"], [Shard(1)]),
        distribute_tensor(whole[3], mesh, [Replicate(), Shard(0)]),
        distribute_tensor(whole[4], mesh, [Shard(1), Shard(0)]),
    ]
    assert isinstance(parts[4], DTensor)
    return total_norm(parts).item(), torch.nn.utils.get_total_norm(whole).item()


def test_the_norm_counts_every_element_once_whatever_it_lies_on(gloo):
    for ours, expected in gloo.run(4, norms):
        assert ours == pytest.approx(expected, rel=1e-14)


def test_bytes_are_what_the_plan_sends(gloo):
    # float64; 8 rows of 8 tokens of width 16, 4 blocks: forward, the embedding and two sums a block, and half of the logits;
    # backward, sums of the gradients at the inputs of query, key, value, gate, up in each block, and of the head
    activation = 8 * 8 * 16 * 8
    expected = (1 + 2 * 4) * activation + 8 * 8 * 16 * 8 + (5 * 4 + 1) * activation
    flags = {**TENSOR, "tensor.sequence_parallel": False, "stop.after": "3 steps"}
    finished = gloo.run(2, train, SmallTransformer(), flags)[0]
    assert [step.sent_bytes for step in finished.steps] == [expected] * 3


# what is refused


class NoPlan(Classify):
    tensor_plan = None


class Misspelt(Classify):
    def tensor_plan(self, model, *, size, sequence_parallel):
        return {"0": ColwiseParallel(), "3": RowwiseParallel()}


class LeavesOut(Classify):
    def tensor_plan(self, model, *, size, sequence_parallel):
        return {"0": ColwiseParallel(output_layouts=Replicate())}


class TiedApart(Classify):
    def build_model(self):
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        model[2].weight = model[0].weight
        return model


@pytest.mark.parametrize(
    ("workload", "says"),
    [
        (NoPlan(), "lacks tensor_plan"),
        (Misspelt(), "no such module"),
        (LeavesOut(), "lacks 2.weight"),
        (TiedApart(), "they are one parameter"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_with_the_reason(gloo, workload, says):
    with pytest.raises(WorkloadError, match=says):
        gloo.run(2, train, workload, TENSOR)


class SevenTokens(SmallTransformer):
    """Sequences of 7 tokens for a model that takes up to 8."""

    def datasets(self):
        return {split: {"tokens": rows["tokens"][:, :8]} for split, rows in super().datasets().items()}


def test_tokens_that_the_workers_do_not_divide_are_refused_before_a_collective_ends_the_process(gloo):
    with pytest.raises(
        WorkloadError,
        match=r"embedding has 7 entries along dimension 1: parallel.tensor with sequence parallelism cuts it into 2",
    ):
        gloo.run(2, train, SevenTokens(), TENSOR)
    whole = {**TENSOR, "tensor.sequence_parallel": False}
    assert_same_training(gloo.run(2, train, SevenTokens(), whole)[0], train_in_plain_torch(SevenTokens()))


def test_modules_that_a_plan_leaves_out_are_whole_on_every_worker_without_sequence_parallelism(gloo):
    finished = gloo.run(2, train, LeavesOut(), {**TENSOR, "tensor.sequence_parallel": False})[0]
    assert_same_training(finished, train_in_plain_torch(LeavesOut()))


@pytest.mark.combination
def test_a_setting_of_fsdp_that_has_no_effect_here_is_said(gloo):
    flags = {
        **TENSOR,
        "fsdp.cpu_offload": True,
        "fsdp.reshard_after_forward": False,
        "stop.after": "1 steps",
        "precision.dtype": "fp32",
    }
    flags["fsdp.parameter_dtype"] = "bf16"
    events = gloo.run(2, train, SmallTransformer(), flags)[0].events
    assert [event for event in events if "no effect" in event] == [
        "fsdp.cpu_offload has no effect with strategy tensor",
        "fsdp.parameter_dtype has no effect without sharded replicas",
    ]


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ({"num_heads": 1}, "must divide num_heads"),
        ({"num_heads": 2, "num_kv_heads": 1}, "must divide num_kv_heads"),
        ({"ffn_width": 31}, "must divide ffn_width"),
    ],
)
def test_a_transformer_that_cannot_be_split_so_is_refused(gloo, shape, says):
    with pytest.raises(ConfigError, match=says):
        gloo.run(2, train, SmallTransformer(**shape), TENSOR)
