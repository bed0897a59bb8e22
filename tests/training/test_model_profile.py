"""What is counted of a model: against formulas, against a model that is really computed, and against its own blocks."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_runs import Classify, WithBatchNorm, rows
from small_transformer import LENGTH, VOCABULARY, SmallTransformer
from torch import nn

from scaleray.config.precision import PrecisionSettings
from scaleray.errors import WorkloadError
from scaleray.records.workload_profile import ImpossibleUtilisation, Product, WorkloadProfile, mfu
from scaleray.training.flop_counter import profile_workload

FP32 = PrecisionSettings()


def profile(workload, **settings):
    return profile_workload(workload, workload.datasets()["train"], PrecisionSettings(**settings))


def test_a_network_of_two_layers_costs_what_its_products_cost():
    found = profile(Classify())
    first, second = 2 * 6 * 8, 2 * 8 * 3
    assert found.forward_flops == first + second
    assert found.backward_flops == first + 2 * second  # the inputs of the first layer need no gradient
    assert found.num_parameters == found.num_trained_parameters == 6 * 8 + 8 + 8 * 3 + 3
    assert found.parameter_bytes == 4 * found.num_parameters
    assert found.activation_bytes == 4 * (8 + 3)  # tanh and the logarithms of the probabilities
    assert found.count_per_sample == 1 and found.blocks == []
    assert [(p.rows, p.inner, p.columns) for p in found.parts[-1].products] == [(1, 6, 8), (1, 8, 3)]


@pytest.mark.always("False")
@pytest.mark.parametrize("tie_head", [True, False])
def test_a_transformer_costs_six_flops_a_parameter_and_token_and_its_attention(tie_head):
    workload = SmallTransformer(tie_head=tie_head)
    found, width, blocks = profile(workload), 16, 4
    model = workload.build_model()
    products = sum(p.numel() for p in model.blocks.parameters() if p.ndim == 2) + VOCABULARY * width
    forward = LENGTH * (2 * products + 4 * blocks * width * LENGTH)
    assert (found.forward_flops, found.backward_flops) == (forward, 2 * forward)
    assert found.num_parameters == sum(p.numel() for p in model.parameters())
    assert found.count_per_sample == LENGTH
    assert [b.name for b in found.blocks] == [f"blocks.{n}" for n in range(blocks)]
    before, after = found.parts[0], found.parts[-1]
    assert before.forward_flops == 0 and after.products == [Product(rows=LENGTH, inner=width, columns=VOCABULARY)]
    assert {part.output_bytes for part in (before, *found.blocks)} == {4 * LENGTH * width}
    assert before.num_parameters == VOCABULARY * width  # a head that is the table itself has no parameters of its own
    assert after.num_parameters == width + (0 if tie_head else VOCABULARY * width)
    shapes = {(p.rows, p.inner, p.columns) for p in found.blocks[0].products}
    assert shapes == {(LENGTH, width, width), (LENGTH, width, 32), (LENGTH, 32, width)}
    assert {b.attention_flops for b in found.blocks} == {4 * width * LENGTH**2}
    assert {b.num_parameters for b in found.blocks} == {sum(p.numel() for p in model.blocks[0].parameters())}
    assert 0 < sum(b.activation_bytes for b in found.blocks) < found.activation_bytes
    assert len({(b.traffic_bytes, b.num_operations) for b in found.blocks}) == 1
    assert not found.is_computed


class LooksAtValues(SmallTransformer):
    def loss(self, model, batch):
        total, count = super().loss(model, batch)
        assert total.item() > 0
        return total, count


@pytest.mark.always("fp32")
@pytest.mark.parametrize("dtype", ["bf16", *(pytest.param(d, marks=pytest.mark.combination) for d in ("fp32", "fp64"))])
def test_counting_without_values_finds_what_computing_does(dtype):
    counted, computed = profile(SmallTransformer(), dtype=dtype), profile(LooksAtValues(), dtype=dtype)
    assert computed.is_computed and not counted.is_computed
    assert {**computed.to_dict(), "is_computed": False} == counted.to_dict()


@pytest.mark.combination
def test_narrow_types_halve_activations_and_keep_copies_of_weights():
    wide, narrow = profile(SmallTransformer()), profile(SmallTransformer(), dtype="bf16")
    assert narrow.forward_flops == wide.forward_flops
    assert 0.4 * wide.activation_bytes < narrow.activation_bytes < wide.activation_bytes
    matrices = sum(p.numel() for p in SmallTransformer().build_model().parameters() if p.ndim == 2)
    assert narrow.fixed_activation_bytes - wide.fixed_activation_bytes == 2 * matrices  # a head and its table are one


def test_batch_statistics_can_be_counted_and_a_frozen_part_costs_no_gradient():
    assert profile(WithBatchNorm()).forward_flops == profile(Classify()).forward_flops

    class Frozen(Classify):
        def build_model(self):
            model = super().build_model()
            model[0].requires_grad_(False)
            return model

    found = profile(Frozen())
    assert found.num_trained_parameters == 27
    assert found.backward_flops == 2 * 8 * 3  # the weight of the last layer


def test_nothing_that_is_drawn_later_changes():
    before = torch.get_rng_state()
    profile(LooksAtValues())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loss_that_fails_is_shown_as_the_users():
    class Wrong(Classify):
        def loss(self, model, batch):
            return F.cross_entropy(model(batch["x"][:, :3]), batch["y"], reduction="sum"), len(batch["y"])

    with pytest.raises(WorkloadError, match="shapes cannot be multiplied"):
        profile(Wrong())


def test_a_tuple_of_columns_and_too_few_rows_are_enough():
    class Pairs(Classify):
        def loss(self, model, batch):
            x, y = batch
            return F.cross_entropy(model(x), y, reduction="sum"), len(y)

    given = rows(1)
    found = profile_workload(Pairs(), {"0": given["x"], "1": given["y"]}, FP32, gives_tuples=True)
    assert found.forward_flops == profile(Classify()).forward_flops


@pytest.mark.parametrize(
    ("kernel", "stride", "side", "is_small"), [(3, 1, 5, True), (3, 2, 3, False), (1, 1, 5, False)]
)
def test_convolutions_are_counted_and_small_filters_told_apart(kernel, stride, side, is_small):
    class Images(Classify):
        def build_model(self):
            conv = nn.Conv2d(1, 4, kernel, padding=kernel // 2, stride=stride)
            return nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(4 * side**2, 3))

        def datasets(self):
            return {"train": {"x": np.zeros((4, 1, 5, 5), np.float32), "y": np.zeros(4, np.int64)}}

    found, conv = profile(Images()), 2 * side**2 * 4 * kernel**2
    assert found.forward_flops == conv + 2 * 4 * side**2 * 3
    assert sum(part.convolution_flops for part in found.parts) == conv
    assert sum(part.winograd_flops for part in found.parts) == (conv if is_small else 0)


@pytest.mark.combination
def test_a_profile_is_the_same_after_writing_and_reading():
    found = profile(SmallTransformer())
    assert WorkloadProfile.from_json(found.to_json()) == found


def test_utilisation_is_a_share_of_all_devices_and_never_more_than_all():
    assert mfu(4e12, time_s=2.0, peak_flops_per_s=1e12, num_devices=8) == 0.25
    assert mfu(1e12, time_s=1.0, peak_flops_per_s=1e12) == 1.0
    with pytest.raises(ImpossibleUtilisation, match=r"MFU of 150\.0 %"):
        mfu(3e12, time_s=2.0, peak_flops_per_s=1e12)
