"""A mixture of experts: its arithmetic, what a capacity drops, and how workers divide the experts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from small_runs import make_job, train
from small_transformer import SmallTransformer
from torch.distributed.tensor import DTensor

from scaleray.errors import ConfigError, WorkloadError
from scaleray.parallel import MixtureOfExperts, balance_loss, expert_metrics
from scaleray.parallel.experts import Experts
from scaleray.training.setup.model_setup import prepare

RECIPE = {"optimizer.learning_rate": 0.01, "stop.after": "2 steps"}


def made(**options):
    torch.manual_seed(0)
    layer = MixtureOfExperts(8, 16, 4, **options).double()
    return layer, torch.randn(3, 10, 8, dtype=torch.float64)


def token_by_token(layer, rows, limit=None):
    """The layer's output, its balance and dropped choices, computed one token after the other."""
    output, balance, dropped = torch.zeros_like(rows), 0.0, 0
    experts = layer.experts
    for row, tokens in enumerate(rows):
        taken, shares, means = [0] * 4, torch.zeros(4), torch.zeros(4, dtype=torch.float64)
        for place, token in enumerate(tokens):
            odds = layer.router(token).softmax(0)
            weights, chosen = odds.topk(layer.top_k)
            means += odds / len(tokens)
            for weight, number in zip(weights / weights.sum(), chosen.tolist(), strict=True):
                shares[number] += 1 / (layer.top_k * len(tokens))
                if limit is not None and taken[number] >= limit:
                    dropped += 1
                    continue
                taken[number] += 1
                inner = F.silu(token @ experts.gate[number]) * (token @ experts.up[number])
                output[row, place] += weight * (inner @ experts.down[number])
        balance += len(tokens) * 4 * float((shares * means.detach()).sum())
    return output, balance, dropped


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_each_token_is_the_weighted_sum_of_its_experts(top_k):
    layer, rows = made(top_k=top_k)
    output, balance, _ = token_by_token(layer, rows)
    assert torch.allclose(layer(rows), output, atol=1e-13)
    assert balance_loss(layer).item() == pytest.approx(balance, rel=1e-6)
    assert expert_metrics(layer, 30).keys() == {"expert_balance"}


def test_a_capacity_drops_the_later_tokens_of_each_sequence():
    layer, rows = made(top_k=2, capacity=0.6)
    output, _, dropped = token_by_token(layer, rows, limit=3)  # 0.6 x 10 tokens x 2 / 4
    assert torch.allclose(layer(rows), output, atol=1e-13)
    assert 0 < dropped < 60
    assert [float(n) for n in expert_metrics(layer, 30)["expert_dropped"]] == [dropped, 60]
    alone = torch.cat([layer(row[None]) for row in rows])
    assert torch.allclose(alone, layer(rows), atol=1e-13)  # a row's result does not depend on the rows next to it


def test_even_probabilities_have_a_balance_of_one_for_each_token():
    layer, rows = made()
    torch.nn.init.zeros_(layer.router.weight)
    layer(rows)
    assert balance_loss(layer).item() == pytest.approx(30)


def held(place, workload, flags):
    """Experts, sums of whole weights and shapes of this worker's part, of each layer of experts."""
    job, _ = make_job(workload, {**RECIPE, **flags}, world_size=place.world_size)
    from dataclasses import replace

    setup = prepare(workload, job.config, job.recipe, replace(place, degrees=job.degrees))
    found = []
    for module in setup.parallel.module.modules():
        if isinstance(module, Experts):
            assert isinstance(module.gate, DTensor)
            found.append((tuple(module.gate.to_local().shape), float(module.gate.full_tensor().double().sum())))
    setup.close()
    assert not any(isinstance(p, DTensor) for p in setup.parallel.module.parameters())
    return found


def test_each_worker_holds_its_part_of_its_experts_until_close(gloo):
    workload = SmallTransformer(num_experts=4)  # 4 layers, of 4 experts from 16 to 32
    whole = [m.gate.double().sum().item() for m in _built(workload).modules() if isinstance(m, Experts)]
    for shape, flags in (
        ((1, 16, 32), {"parallel.shard": 4, "parallel.expert": 4}),
        ((2, 8, 32), {"parallel.shard": 4, "parallel.expert": 2}),
        ((2, 16, 32), {"parallel.shard": 2, "parallel.expert": 2}),
        ((2, 16, 16), {"parallel.shard": 2, "parallel.expert": 2, "parallel.tensor": 2}),
    ):
        for found in gloo.run(4, held, workload, flags):
            assert [each for each, _ in found] == [shape] * 4
            assert [total for _, total in found] == pytest.approx(whole)


def _built(workload):
    from scaleray.common.seeding import seed_everything, stream_seed

    seed_everything(stream_seed(0, "model"))
    return workload.build_model()


REFUSED = {
    "no experts": (SmallTransformer(), {"parallel.expert": 2, "parallel.shard": 2}, "but the model has none"),
    "number": (
        SmallTransformer(num_experts=3),
        {"parallel.expert": 2, "parallel.shard": 2},
        "parallel.expert is 2: it must divide the 3 experts of a layer.*possible: 1, 3",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_experts_that_cannot_be_divided_are_refused(gloo, case):
    workload, flags, says = REFUSED[case]
    with pytest.raises(WorkloadError, match=f"(?s){says}"):
        gloo.run(2, train, workload, {**RECIPE, **flags})


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"parallel.expert": 4, "parallel.shard": 2}, "parallel.expert is 4: it must divide shard x context"),
        ({"parallel.expert": 2, "strategy.name": "ddp"}, "parallel.expert is 2: it must divide shard x context"),
        (
            {"parallel.expert": 2, "parallel.pipeline": 2, "parallel.shard": 2},
            "parallel.expert is 2: the replicas of a pipeline stage order their micro-batches independently",
        ),
        (
            {"parallel.expert": 2, "strategy.name": "diloco", "parallel.replicate": 2, "parallel.shard": 2},
            "strategy.name is diloco, which does not divide experts",
        ),
        ({"parallel.expert": 2, "noise_scale.measure": True}, "under parallel.expert a worker's gradients have the"),
    ],
)
def test_degrees_of_experts_that_do_not_fit_are_refused_before_workers_start(flags, says):
    with pytest.raises(ConfigError, match=says):
        make_job(SmallTransformer(num_experts=4), {**RECIPE, **flags}, world_size=4)


def test_a_mixture_needs_as_many_experts_as_a_token_uses():
    with pytest.raises(ConfigError, match="top_k is 3: it must be between 1 and the number of experts, 2"):
        MixtureOfExperts(8, 16, 2, top_k=3)
    with pytest.raises(ConfigError, match="capacity is 0"):
        MixtureOfExperts(8, 16, 2, capacity=0)
