"""Context parallelism: sequences shared by workers, their attention, and what cannot be shared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from small_runs import largest_difference, train, train_in_plain_torch
from small_transformer import SmallTransformer
from torch import nn

from scaleray import Workload
from scaleray.errors import ConfigError, WorkloadError
from scaleray.parallel import part, positions
from scaleray.parallel.context import Context, sequences_shared, whole_sequences

RECIPE = {"optimizer.learning_rate": 0.01, "stop.after": "3 steps"}
CONTEXT = {"parallel.context": 2}
RING = {**CONTEXT, "context.exchange": "ring"}


def differences(place, exchange, is_causal, key_heads, dtype):
    """Largest differences of a worker's output and gradients of queries, keys and values from those of one process."""
    torch.manual_seed(0)
    shapes = [(2, heads, 24, 8) for heads in (8, key_heads, key_heads)]
    whole = [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]
    gradient = torch.randn(shapes[0], dtype=torch.float64).to(dtype)
    options: Any = {"is_causal": is_causal, "enable_gqa": key_heads < 8, "scale": 0.3}
    output = F.scaled_dot_product_attention(*whole, **options)
    due = [output, *torch.autograd.grad(output, whole, gradient)]
    with sequences_shared(nn.Identity(), Context.over(dist.group.WORLD, exchange)):
        own = [part(tensor.detach(), 2).requires_grad_() for tensor in whole]
        output = F.scaled_dot_product_attention(*own, **options)
        found = [output, *torch.autograd.grad(output, own, part(gradient, 2))]
        return [float((f - part(d, 2)).abs().max()) for f, d in zip(found, due, strict=True)]


@pytest.mark.parametrize("key_heads", [4, 8])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("exchange", ["heads", "ring"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_attention_over_shared_sequences_is_that_of_whole_ones(gloo, world_size, exchange, is_causal, key_heads):
    for found in gloo.run(world_size, differences, exchange, is_causal, key_heads, torch.float64):
        assert max(found) <= 1e-14
    for found in gloo.run(world_size, differences, exchange, is_causal, key_heads, torch.bfloat16):
        assert max(found) <= 0.07  # two roundings of values around 4


def cut(place, exchange):
    with sequences_shared(nn.Identity(), Context.over(dist.group.WORLD, exchange)):
        own = part(torch.arange(16)[None]), positions(8), part(torch.zeros(3, 4, 16), dim=-1).shape
        with whole_sequences():
            assert part(torch.arange(5)[None]).shape == (1, 5)
    assert part(own[0]) is own[0]
    return own


def test_each_worker_has_its_tokens_and_their_positions(gloo):
    for number, (tokens, places, shape) in enumerate(gloo.run(2, cut, "heads")):
        assert tokens[0].tolist() == places.tolist() == list(range(8 * number, 8 * number + 8))
        assert shape == (3, 4, 8)
    early, late = gloo.run(2, cut, "ring")
    assert early[1].tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert late[0][0].tolist() == late[1].tolist() == list(range(4, 12))


class Encoder(Workload):
    """torch's own encoder, with attention that looks both ways, over rows of numbers."""

    def build_model(self) -> nn.Module:
        return nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, dropout=0.0, batch_first=True)

    def datasets(self) -> dict[str, Any]:
        rows = np.random.default_rng(0).normal(size=(24, 12, 8)).astype(np.float32)
        return {"train": {"rows": rows[:16]}, "val": {"rows": rows[16:]}}

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        return part(tensor, dim=1)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        found = model(self.cut(batch["rows"]))
        return (found - self.cut(batch["rows"].flip(1))).square().sum(), found.numel()


class Whole(Encoder):
    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class OddRows(Encoder):
    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return super().loss(model, {"rows": batch["rows"][:, :11]})


class Masked(Encoder):
    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        rows = part(batch["rows"], dim=1)
        found = model(rows, src_key_padding_mask=torch.zeros(rows.shape[:2], dtype=torch.bool))
        return found.square().sum(), found.numel()


class Dropping(Encoder):
    def build_model(self) -> nn.Module:
        return nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, dropout=0.5, batch_first=True)


class WithoutAttention(Encoder):
    def build_model(self) -> nn.Module:
        return nn.Linear(8, 8)


@pytest.mark.parametrize("exchange", ["heads", "ring"])
def test_an_encoder_of_torch_trains_and_is_evaluated_as_on_one_worker(gloo, exchange):
    flags = {**RECIPE, **CONTEXT, "context.exchange": exchange}
    finished, alone = gloo.run(2, train, Encoder(), flags)[0], gloo.run(1, train, Encoder(), RECIPE)[0]
    assert largest_difference(train_in_plain_torch(Encoder(), RECIPE).weights, finished.weights) <= 1e-9
    assert finished.evaluations[-1].metrics == pytest.approx(alone.evaluations[-1].metrics, rel=1e-12)


REFUSED = {
    "never cut": (Whole(), CONTEXT, "gives the model whole sequences.*scaleray.parallel.part"),
    "length": (OddRows(), CONTEXT, "11 tokens: parallel.context 2 cuts it into 2 equal pieces.*such as 12"),
    "length in a ring": (OddRows(), RING, "cuts it into 4 equal pieces"),
    "mask": (Masked(), CONTEXT, "has a mask, but each worker has only the part for its own tokens"),
    "dropout in a ring": (Dropping(), RING, "attention has dropout 0.5, which a ring does not support"),
    "no attention": (WithoutAttention(), CONTEXT, "called no scaled_dot_product_attention"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_cannot_be_shared_is_refused_on_several_workers_and_rehearsed_on_one(gloo, world_size, case):
    workload, flags, says = REFUSED[case]
    with pytest.raises(WorkloadError, match=f"(?s){says}"):
        gloo.run(world_size, train, workload, {**RECIPE, **flags})


def test_heads_that_the_workers_do_not_divide_need_a_ring(gloo):
    workload, flags = SmallTransformer(num_heads=2), {**RECIPE, "parallel.context": 4}
    with pytest.raises(WorkloadError, match=r"(?s)must divide the 2 query heads.*use --context.exchange ring"):
        gloo.run(4, train, workload, flags)
    gloo.run(4, train, SmallTransformer(), {**flags, "context.exchange": "ring"})


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"strategy.name": "diloco"}, "strategy.name is diloco, which has no such axis"),
        ({"shares.by": "speed"}, "shares.by is speed: under parallel.context it must be equal"),
        ({"compilation.what": "model"}, "compilation.what is model: under parallel.context it must be nothing"),
        ({"noise_scale.measure": True}, "under parallel.context workers have parts of the same samples"),
    ],
)
def test_settings_that_need_whole_samples_are_refused_before_workers_start(flags, says):
    from small_runs import make_job

    with pytest.raises(ConfigError, match=says):
        make_job(Encoder(), {**RECIPE, **CONTEXT, **flags}, world_size=2)
