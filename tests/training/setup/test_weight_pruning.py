"""Pruning: exact choices whatever the layout, one mask for all ranks, weights that stay zero, and masks in checkpoints."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from small_runs import (
    Classify,
    RankContext,
    largest_difference,
    make_job,
    relative_differences,
    same_generators,
    train,
    train_alone,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from scaleray.common.metric_names import SPARSITY
from scaleray.config.averaging_pruning_fine_tuning import PruningSettings
from scaleray.errors import ConfigError, WorkloadError
from scaleray.strategies.contract.parallel import full
from scaleray.training.setup import pruning
from scaleray.training.setup.model_setup import prepare

pytestmark = pytest.mark.combination  # a feature that few commits touch: its tests take turns

# the schedule


def test_the_schedule_is_that_of_zhu_and_gupta():
    settings = PruningSettings(method="magnitude", sparsity=0.8, start_step=10, end_step=110, every_steps=20)
    assert [step for step in range(130) if pruning.is_due(settings, step)] == [10, 30, 50, 70, 90, 110]
    assert [pruning.sparsity_at(settings, step) for step in (0, 10, 110, 500)] == [0, 0, 0.8, 0.8]
    # their equation 1 with s_i = 0, t_0 = 10, n = 5 and delta t = 20
    assert pruning.sparsity_at(settings, 50) == pytest.approx(0.8 + (0 - 0.8) * (1 - 40 / (5 * 20)) ** 3)


def test_the_last_pruning_comes_even_off_the_beat_and_one_step_is_enough():
    settings = PruningSettings(method="magnitude", start_step=2, end_step=9, every_steps=5)
    assert [step for step in range(20) if pruning.is_due(settings, step)] == [2, 7, 9]
    settings = PruningSettings(method="magnitude", start_step=3)
    assert [step for step in range(20) if pruning.is_due(settings, step)] == [3]


# what is taken out


def tensors(kind, dtype):
    draw = np.random.default_rng(0)
    shapes = [(5, 8), (3, 4, 2), (7, 4)]
    if kind == "distinct":
        values = [draw.normal(size=shape) for shape in shapes]
    elif kind == "ties":  # most of them equal
        values = [draw.integers(-2, 3, size=shape) / 4 for shape in shapes]
    else:
        values = [np.zeros(shape) for shape in shapes]
    return [torch.from_numpy(v).to(dtype) for v in values]


def smallest_in_numpy(values, num):
    flat = np.concatenate([v.double().abs().numpy().ravel() for v in values])
    mask = np.zeros(len(flat), dtype=bool)
    mask[np.argsort(flat, kind="stable")[:num]] = True
    return np.split(mask, np.cumsum([v.numel() for v in values])[:-1])


def masks_of(place, kind, dtype, nums, placement):
    values = tensors(kind, dtype)
    if place.world_size > 1:
        mesh = init_device_mesh("cpu", (place.world_size,))
        # one stays whole: a model may be sharded in part
        values = [distribute_tensor(v, mesh, [Shard(placement)]) for v in values[:2]] + values[2:]
    masks = [torch.zeros_like(v, dtype=torch.bool) for v in values]
    for num in nums:
        pruning.take_out_smallest(values, masks, num)
    return [full(mask).numpy() for mask in masks]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("ties", torch.bfloat16),
        pytest.param("distinct", torch.float64, marks=pytest.mark.combination),
        pytest.param("zeros", torch.float32, marks=pytest.mark.combination),
        *(
            pytest.param(kind, dtype, marks=pytest.mark.slow)
            for kind, dtype in [
                ("distinct", torch.float32),
                ("distinct", torch.bfloat16),
                ("ties", torch.float64),
                ("ties", torch.float32),
                ("zeros", torch.float64),
                ("zeros", torch.bfloat16),
            ]
        ),
    ],
)
def test_exactly_the_smallest_weights_go_whatever_the_layout(gloo, kind, dtype):
    total = sum(v.numel() for v in tensors(kind, dtype))
    for num in (0, 1, 31, 58, total - 1, total):
        expected = smallest_in_numpy(tensors(kind, dtype), num)
        layouts = [(1, 0), (2, 0), (4, 0), (3, 1)] if num == 31 else [(1, 0), (4, 0)]
        for world_size, placement in layouts:
            outcomes = gloo.run(world_size, masks_of, kind, dtype, [num], placement)
            for masks in outcomes:
                assert sum(mask.sum() for mask in masks) == num
                for mask, there in zip(masks, expected, strict=True):
                    assert np.array_equal(mask.ravel(), there)


def test_what_is_out_stays_out_while_the_share_grows(gloo):
    for world_size in (1, 2):
        few = gloo.run(world_size, masks_of, "ties", torch.float32, [20], 0)[0]
        more = gloo.run(world_size, masks_of, "ties", torch.float32, [20, 50, 10], 0)[0]
        assert sum(mask.sum() for mask in more) == 50
        assert all((later[earlier]).all() for earlier, later in zip(few, more, strict=True))


def masks_of_two_axes(place, num):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    draw = np.random.default_rng(4)
    values = [torch.from_numpy(draw.integers(-2, 3, size=shape) / 4) for shape in ((8, 6), (6, 8))]
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)).double()
    with torch.no_grad():
        model[0].weight.copy_(values[0])
        model[1].weight.copy_(values[1])
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    parameters = list(model.parameters())
    masks = [torch.zeros_like(p, dtype=torch.bool, requires_grad=False) for p in parameters]
    rows = [mask.clone() for mask in masks]
    with torch.no_grad():
        pruning.take_out_smallest(parameters, masks, num)
        pruning.take_out_rows(parameters, rows, 0.5)
    return values, [full(mask).numpy() for mask in masks], [full(mask) for mask in rows]


def test_shards_along_two_axes_are_chosen_from_alike(gloo):
    for values, masks, rows in gloo.run(4, masks_of_two_axes, 37):
        for mask, expected in zip(masks, smallest_in_numpy(values, 37), strict=True):
            assert np.array_equal(mask.ravel(), expected)
        for value, mask in zip(values, rows, strict=True):
            order = np.argsort((value * value).sum(dim=1).numpy(), kind="stable")
            assert sorted(mask.all(dim=1).nonzero().flatten().tolist()) == sorted(order[: len(value) // 2].tolist())


def rows_of(place, share, placement):
    values = [tensors("distinct", torch.float64)[0], tensors("ties", torch.float64)[2]]
    if place.world_size > 1:
        mesh = init_device_mesh("cpu", (place.world_size,))
        values = [distribute_tensor(values[0], mesh, [Shard(placement)]), values[1]]
    masks = [torch.zeros_like(v, dtype=torch.bool) for v in values]
    for part in (share / 2, share):
        pruning.take_out_rows(values, masks, part)
    return [full(mask) for mask in masks]


@pytest.mark.parametrize(("world_size", "placement"), [(1, 0), (2, 0), (4, 0), (2, 1)])
def test_structured_pruning_takes_whole_rows_of_smallest_norm(gloo, world_size, placement):
    values = [tensors("distinct", torch.float64)[0], tensors("ties", torch.float64)[2]]
    for masks in gloo.run(world_size, rows_of, 0.5, placement):
        for value, mask in zip(values, masks, strict=True):
            out = mask.all(dim=1)
            assert torch.equal(out, mask.any(dim=1)) and out.sum() == len(value) // 2
            assert value[out].norm(dim=1).max() <= value[~out].norm(dim=1).min()


@pytest.mark.parametrize("kind", ["distinct", "ties", "zeros"])
def test_two_smallest_of_each_four_inputs_go(kind):
    value = tensors(kind, torch.float32)[0]
    mask = torch.zeros_like(value, dtype=torch.bool)
    pruning.take_out_two_of_four(value, mask)
    groups, out = value.abs().reshape(-1, 4), mask.reshape(-1, 4)
    for sizes, gone in zip(groups, out, strict=True):
        assert gone.nonzero().flatten().tolist() == sorted(np.argsort(sizes.numpy(), kind="stable")[:2].tolist())
    again = mask.clone()
    pruning.take_out_two_of_four(value.flip(1).masked_fill(mask, 0), again)
    assert torch.equal(again, mask)


# from a config


class Layers(Classify):
    """Two linear layers whose widths are multiples of four, a norm and a head."""

    def build_model(self):
        return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3))


GRADUAL = {"pruning.method": "magnitude", "pruning.sparsity": 0.7, "pruning.start_step": 1, "pruning.end_step": 6, "pruning.every_steps": 3}  # fmt: skip
METHODS = {
    "magnitude": {"pruning.method": "magnitude", "pruning.sparsity": 0.6},
    "gradual": GRADUAL,
    "structured": {"pruning.method": "structured", "pruning.sparsity": 0.5, "pruning.start_step": 2},
    "2:4": {"pruning.method": "2:4", "pruning.start_step": 1, "pruning.exclude": ["0."]},
}
FLAGS = {"optimizer.name": "adamw", "optimizer.learning_rate": 0.02, "optimizer.weight_decay": 0.1, "stop.after": "10 steps"}  # fmt: skip


def sparsities(finished):
    return [step.more[SPARSITY.name] for step in finished.steps]


def test_the_metrics_follow_the_schedule_and_the_weights_follow_the_metrics():
    finished = train_alone(Layers(), {**FLAGS, **GRADUAL})
    weights = [w for name, w in finished.weights.items() if name.endswith("weight") and w.ndim == 2]
    total = sum(w.numel() for w in weights)
    settings = PruningSettings(**{key.partition(".")[2]: value for key, value in GRADUAL.items()})
    last, expected = 0.0, []
    for step in range(1, 11):
        last = round(pruning.sparsity_at(settings, step) * total) / total if pruning.is_due(settings, step) else last
        expected.append(last)
    assert sparsities(finished) == expected
    assert sum(int((w == 0).sum()) for w in weights) == round(0.7 * total)
    assert all((w != 0).all() for name, w in finished.weights.items() if w.ndim == 1 and "bias" in name)


@pytest.mark.parametrize("optimizer", [{"optimizer.name": "sgd", "optimizer.momentum": 0.9, "optimizer.nesterov": True}, {"optimizer.name": "adamw"}, {"optimizer.name": "lars"}, {"optimizer.name": "lamb"}])  # fmt: skip
def test_a_weight_that_is_out_stays_exactly_zero_and_so_does_its_state(optimizer):
    job, _ = make_job(Layers(), {**FLAGS, **optimizer, "pruning.method": "magnitude", "pruning.start_step": 3})
    with same_generators():
        setup = prepare(job.workload, job.config, job.recipe, RankContext())
        weight = setup.parallel.module[3].weight
        for step in range(1, 8):
            total, count = job.workload.loss(
                setup.parallel.model, {"x": torch.randn(8, 6).double(), "y": torch.arange(8) % 3}
            )
            setup.optimizer.zero_grad()
            (total / count).backward()
            setup.pruning.mask_gradients()
            setup.optimizer.step()
            if step == 3:
                setup.pruning.prune(step)
                mask = setup.pruning.masks["3.weight"].clone()
                assert 0 < mask.sum() < mask.numel()
            if step >= 3:  # without a further `apply`: the optimizer alone must not revive it
                assert not weight[mask].any()
                for value in setup.optimizer.state[weight].values():
                    assert value.ndim == 0 or not value[mask].any()
                assert weight[~mask].all()


@pytest.mark.parametrize("clip_norm", [None, 0.2])
def test_pruned_training_is_that_of_plain_torch_with_masks(clip_norm):
    flags = {**FLAGS, **GRADUAL, "optimizer.clip_norm": clip_norm}
    finished = train_alone(Layers(), flags)
    job, sources = make_job(Layers(), flags)
    settings, plan = job.config.pruning, job.train_plan()
    losses, norms = [], []
    with same_generators():
        model = prepare(job.workload, job.config, job.recipe, RankContext()).parallel.module  # for its initial values
        optimizer = torch.optim.AdamW(model.parameters(), 0.02, weight_decay=0.1)
        matrices = [p for p in model.parameters() if p.ndim == 2]
        masks = [torch.zeros(p.shape, dtype=torch.bool) for p in matrices]
        for step in range(1, 11):
            batch = {n: torch.from_numpy(v) for n, v in sources["train"].read(plan.global_indices(step - 1)).items()}
            optimizer.zero_grad()
            total, count = job.workload.loss(model, {**batch, "x": batch["x"].double()})
            (total / count).backward()
            for p, mask in zip(matrices, masks, strict=True):
                p.grad[mask] = 0
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip_norm or math.inf).item())
            losses.append((total / count).item())
            optimizer.step()
            if pruning.is_due(settings, step):
                num = round(pruning.sparsity_at(settings, step) * sum(p.numel() for p in matrices))
                values = [p.detach().masked_fill(mask, 0) for p, mask in zip(matrices, masks, strict=True)]
                found = smallest_in_numpy(values, num)
                masks = [torch.from_numpy(m).view(p.shape) for m, p in zip(found, matrices, strict=True)]
            with torch.no_grad():
                for p, mask in zip(matrices, masks, strict=True):
                    p[mask] = 0
                    for value in optimizer.state[p].values():
                        if value.ndim:
                            value[mask] = 0
    assert max(relative_differences(losses, finished.losses)) < 1e-12
    assert max(relative_differences(norms, finished.grad_norms)) < 1e-12
    plain = {name: value.detach() for name, value in model.state_dict().items()}
    assert largest_difference(plain, finished.weights) < 1e-12


class Revives(Layers):
    """An optimizer that moves what has no gradient, and keeps no state that could be cleared."""

    def optimizer(self, model, settings):
        class Drift(torch.optim.SGD):
            @torch.no_grad()
            def step(self, closure=None):
                for group in self.param_groups:
                    for p in group["params"]:
                        p.add_(0.01)

        return Drift(model.parameters(), 0.1)


def test_a_weight_that_is_out_stays_zero_whatever_the_optimizer_does():
    finished = train_alone(Revives(), {**FLAGS, **METHODS["magnitude"]})
    weights = [w for w in finished.weights.values() if w.ndim == 2]
    assert sum(int((w == 0).sum()) for w in weights) == round(0.6 * sum(w.numel() for w in weights))


@pytest.mark.each_value
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("strategy", "world_size"), [("ddp", 2), ("fsdp", 2), ("fsdp", 4)])
def test_pruned_training_is_the_same_on_any_number_of_workers(gloo, method, strategy, world_size):
    flags = {**FLAGS, **METHODS[method], "optimizer.clip_norm": 0.5}
    alone = train_alone(Layers(), flags)
    finished = gloo.run(world_size, train, Layers(), {**flags, "strategy.name": strategy})[0]
    assert sparsities(finished) == sparsities(alone)
    for name, weight in alone.weights.items():
        assert torch.equal(weight == 0, finished.weights[name] == 0)
    assert max(relative_differences(alone.losses, finished.losses)) < 1e-9
    assert max(relative_differences(alone.grad_norms, finished.grad_norms)) < 1e-9
    assert largest_difference(alone.weights, finished.weights) < 1e-9


def masks_after(place, strategy, method):
    job, _ = make_job(Layers(), {**FLAGS, **METHODS[method], "strategy.name": strategy}, world_size=place.world_size)
    setup = prepare(job.workload, job.config, job.recipe, place)
    with torch.no_grad():  # replicas that have drifted apart, as they never should
        for parameter in setup.parallel.module.parameters():
            if not isinstance(parameter, DTensor):
                parameter += 0.3 * place.rank * torch.randn_like(parameter)
        for mask in setup.pruning.masks.values():
            mask.zero_()
    setup.pruning.prune(6)
    masks = {name: full(mask).clone() for name, mask in setup.pruning.masks.items()}
    setup.parallel.close()
    return masks, setup.pruning.sparsity


@pytest.mark.each_value
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_have_one_mask(gloo, strategy, method):
    first, *others = gloo.run(4, masks_after, strategy, method)
    assert first[1] > 0.3
    for masks, sparsity in others:
        assert sparsity == first[1] and masks.keys() == first[0].keys()
        assert all(torch.equal(masks[name], first[0][name]) for name in masks)


def test_two_of_four_holds_at_the_end_of_a_sharded_training(gloo):
    flags = {**FLAGS, **METHODS["2:4"], "strategy.name": "fsdp"}
    weights = gloo.run(4, train, Layers(), flags)[0].weights
    for name in ("3.weight", "5.weight"):
        assert ((weights[name].reshape(-1, 4) == 0).sum(dim=1) == 2).all()
    assert (weights["0.weight"] != 0).all()  # left out


def killed(place, flags, folder, kill_at):
    return train(place, Layers(num_rows=40), flags, folder=folder, kill_at=kill_at)


@pytest.mark.each_value
@pytest.mark.parametrize("method", ["gradual", "structured"])
@pytest.mark.parametrize(
    ("strategy", "before", "after"),
    [("ddp", 2, 2), ("fsdp", 2, 2), pytest.param("fsdp", 4, 2, marks=pytest.mark.slow), ("fsdp", 2, 1), ("ddp", 1, 2)],
)
def test_masks_survive_a_checkpoint_and_another_number_of_workers(gloo, tmp_path, method, strategy, before, after):
    flags = {
        **FLAGS,
        **METHODS[method],
        "strategy.name": strategy,
        "checkpoint.every": "2 steps",
        "deterministic": True,
    }
    whole = gloo.run(before, killed, flags, None, None)[0]
    gloo.run(before, killed, flags, str(tmp_path), 5)  # between two prunings
    resumed = gloo.run(after, killed, flags, str(tmp_path), None)[0]
    assert resumed.steps[0].step == 5
    assert sparsities(resumed) == sparsities(whole)[4:]
    for name, weight in whole.weights.items():
        assert torch.equal(weight == 0, resumed.weights[name] == 0), name
    bound = 0 if before == after else 1e-11
    assert largest_difference(whole.weights, resumed.weights) <= bound
    assert max(relative_differences(whole.losses[4:], resumed.losses)) <= bound


# which parameters, and what is refused


def test_embeddings_norms_biases_and_frozen_parameters_are_left_alone():
    model = nn.Sequential(
        nn.Embedding(8, 4), nn.LayerNorm((3, 4)), nn.Linear(4, 4), nn.Conv1d(3, 3, 2), nn.Linear(4, 8), nn.Linear(4, 4)
    )
    model[4].weight = model[0].weight
    model[5].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def names(method, *exclude):
        settings = PruningSettings(method=method, exclude=exclude)
        return sorted(pruning.build(model, optimizer, settings, None).masks)

    assert names("magnitude") == ["2.weight", "3.weight"] == names("structured")
    assert names("2:4") == ["2.weight"]
    assert names("magnitude", "2.") == ["3.weight"]
    with pytest.raises(WorkloadError, match="no trained parameter"):
        names("magnitude", "weight")


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ({"pruning.method": "magnitude", "strategy.name": "local_sgd", "scale.workers": 2}, "pruning.method"),
        ({"pruning.method": "magnitude", "strategy.name": "gossip", "scale.workers": 2}, "pruning.method"),
        ({"pruning.method": "magnitude", "pruning.start_step": 99}, "pruning.start_step"),
        ({"pruning.method": "magnitude", "pruning.end_step": 99}, "pruning.end_step"),
        ({"pruning.method": "magnitude", "pruning.every_steps": 3}, "pruning.every_steps"),
        ({"pruning.sparsity": 0.7}, "pruning.sparsity"),
        ({"pruning.method": "2:4", "pruning.sparsity": 0.7}, "pruning"),
        ({"pruning.method": "magnitude", "pruning.start_step": 5, "pruning.end_step": 5}, "pruning"),
    ],
)
def test_settings_that_make_no_sense_are_refused(flags, key):
    with pytest.raises(ConfigError) as raised:
        make_job(Classify(), flags)
    assert raised.value.key.startswith(key)


def test_a_layer_that_has_no_groups_of_four_is_named():
    with pytest.raises(WorkloadError, match=r"0\.weight has 6 inputs"):
        train_alone(Layers(), {**FLAGS, "pruning.method": "2:4"})


@pytest.mark.gpu
def test_semi_structured_kernels_compute_the_dense_product():
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("2:4 kernels need compute capability 8.0")
    weight = torch.randn(128, 256, device="cuda", dtype=torch.float16)
    mask = torch.zeros_like(weight, dtype=torch.bool)
    pruning.take_out_two_of_four(weight, mask)
    weight, inputs = weight.masked_fill(mask, 0), torch.randn(64, 256, device="cuda", dtype=torch.float16)
    sparse = torch.mm(torch.sparse.to_sparse_semi_structured(weight), inputs.T.contiguous()).T
    dense = inputs @ weight.T
    assert (sparse - dense).abs().max() / dense.abs().max() < 1e-2  # both round to fp16


def test_weights_of_two_precisions_are_compared_in_the_wider_one():
    values = [torch.tensor([1.0, 1.0 - 1e-12], dtype=torch.float64), torch.tensor([2.0, 3.0])]
    masks = [torch.zeros_like(v, dtype=torch.bool) for v in values]
    pruning.take_out_smallest(values, masks, 1)
    assert [mask.tolist() for mask in masks] == [[False, True], [False, False]]
