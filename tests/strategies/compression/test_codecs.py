"""Ways to send gradients in fewer bytes, against the mean that they stand for: bounds, laws, and what must not get lost."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from scaleray.strategies.compression.codecs import Cast, Int8, Layout, Part, PowerSGD, TopK, Whole, dequantise, quantise
from scaleray.strategies.traffic.collectives_log import GroupCollectives, Message, pack, unpack

SHAPES = {"embedding": (11, 5), "head": (3, 11), "bias": (7,)}
MAKE = {
    "whole": Whole,
    "fp16": lambda: Cast(torch.float16),
    "bf16": lambda: Cast(torch.bfloat16),
    "int8": lambda: Int8(block_size=8),
    "int8, one block": lambda: Int8(block_size=256),
    "powersgd": lambda: PowerSGD(rank=1),
    "topk": lambda: TopK(density=0.1),
}
WITH_FEEDBACK = ["int8", "int8, one block", "powersgd", "topk"]


def layout(dtype=torch.float64):
    parts, start = [], 0
    for name, shape in SHAPES.items():
        size = math.prod(shape)
        parts.append(Part(name, start, size, shape[0] if len(shape) > 1 else 1))
        start += size
    return Layout(tuple(parts), dtype.itemsize)


def gradient(rank, step=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    size = torch.randn(layout().size, generator=generator, dtype=torch.float64)
    return (size * torch.logspace(-3, 1, layout().size, dtype=torch.float64)).to(dtype)


def true_mean(world_size, step=0):
    return torch.stack([gradient(rank, step) for rank in range(world_size)]).mean(dim=0)


def send(place, name, dtype=torch.float64):
    """(the mean that arrived, what was not sent, bytes counted, bytes planned) of one bucket."""
    codec, collectives = MAKE[name](), GroupCollectives(dist.group.WORLD)
    values = gradient(place.rank, dtype=dtype)
    left = codec.mean_(values, collectives, layout(dtype))
    planned = sum(message.payload_bytes for message in codec.messages(layout(dtype), place.world_size))
    return values, left, collectives.sent_bytes, planned


@pytest.mark.combination
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", MAKE)
def test_every_rank_gets_the_same_bits_and_what_was_not_sent_makes_up_the_difference(gloo, name, world_size):
    outcomes = gloo.run(world_size, send, name)
    assert all(torch.equal(outcome[0], outcomes[0][0]) for outcome in outcomes)
    missing = torch.stack([left for _, left, _, _ in outcomes]).mean(dim=0)
    # 16-bit sums are rounded once more for each rank, which no rank can know
    tolerance = {"fp16": world_size * 2**-11, "bf16": world_size * 2**-8}.get(name, 1e-14)
    largest = max(gradient(rank).abs().max().item() for rank in range(world_size))
    assert (outcomes[0][0] + missing - true_mean(world_size)).abs().max() <= tolerance * largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MAKE)
def test_bytes_are_counted_as_planned_and_are_fewer_than_whole_gradients(gloo, name, dtype):
    for _, _, counted, planned in gloo.run(4, send, name, dtype):
        assert counted == planned
        assert name == "whole" or counted < layout(dtype).size * dtype.itemsize


@pytest.mark.parametrize("world_size", [2, 4])
def test_int8_errs_by_half_a_step_of_each_block_of_each_rank_and_of_the_mean(gloo, world_size):
    sent = gloo.run(world_size, send, "int8")[0][0]
    gradients = torch.stack([gradient(rank) for rank in range(world_size)])
    mean = gradients.mean(dim=0)
    # of a block only its largest value matters; without knowing where blocks begin, that of the neighbourhood
    near = torch.nn.functional.max_pool1d(gradients.abs()[None], 15, 1, 7)[0].mean(dim=0)
    near_mean = torch.nn.functional.max_pool1d((mean.abs() + near / 254)[None, None], 15, 1, 7)[0, 0]
    assert ((sent - mean).abs() <= (near + near_mean) / 254 * (1 + 1e-6)).all()
    assert (sent - mean).abs().max() > 0


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=40), st.integers(1, 9))
def test_a_quantised_value_is_at_most_half_a_step_off(values, block):
    padded = values + [0.0] * (-len(values) % block)
    rows = torch.tensor([padded], dtype=torch.float64)
    scales, codes = quantise(rows, block)
    found = dequantise(scales, codes, dtype=torch.float64)
    steps = scales.double().repeat_interleave(block, dim=1)
    smallest = torch.finfo(torch.float32).tiny  # below float32's range a scale is 0, and the value waits
    assert ((found - rows).abs() <= steps / 2 * (1 + 1e-5) + smallest * 127).all()
    assert torch.equal(quantise(-rows, block)[1], -codes)


def send_low_rank(place):
    codec, collectives = PowerSGD(rank=2), GroupCollectives(dist.group.WORLD)
    generator = torch.Generator().manual_seed(7)
    columns = torch.randn(12, 2, generator=generator, dtype=torch.float64)  # the same on every rank
    matrix = columns @ torch.randn(2, 9, generator=torch.Generator().manual_seed(place.rank), dtype=torch.float64)
    values, one = matrix.flatten(), Layout((Part("w", 0, 108, 12),), 8)
    codec.mean_(values, collectives, one)
    return values, matrix.flatten()


def test_powersgd_is_exact_for_matrices_of_its_rank(gloo):
    outcomes = gloo.run(3, send_low_rank)
    mean = torch.stack([matrix for _, matrix in outcomes]).mean(dim=0)
    assert (outcomes[0][0] - mean).abs().max() <= 1e-13


def send_the_same_matrix_often(place):
    codec, collectives = PowerSGD(rank=2), GroupCollectives(dist.group.WORLD)
    one, errors = Layout((Part("w", 0, 20 * 15, 20),), 8), []
    matrix = torch.randn(20 * 15, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for _ in range(40):
        values = matrix.clone()
        codec.mean_(values, collectives, one)
        errors.append((values - matrix).norm().item())
    singular = torch.linalg.svdvals(matrix.view(20, 15))
    return errors, singular[2:].norm().item()


def test_powersgd_starts_where_it_ended_and_so_comes_to_the_best_approximation(gloo):
    errors, best = gloo.run(2, send_the_same_matrix_often)[0]
    assert errors[0] > 1.1 * best
    assert errors[-1] <= 1.001 * best


# error feedback


def send_often(place, name, steps):
    codec, collectives, left = (
        MAKE[name](),
        GroupCollectives(dist.group.WORLD),
        torch.zeros(layout().size, dtype=torch.float64),
    )
    total, largest = torch.zeros_like(left), 0.0
    for step in range(steps):
        values = gradient(place.rank, step) + left
        left = codec.mean_(values, collectives, layout())
        total += values
        largest = max(largest, left.norm().item())
    return total, left, largest


@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_the_sum_of_what_was_sent_follows_the_sum_of_true_gradients(gloo, name):
    steps, world_size = 30, 4
    outcomes = gloo.run(world_size, send_often, name, steps)
    true = sum(true_mean(world_size, step) for step in range(steps))
    missing = torch.stack([left for _, left, _ in outcomes]).mean(dim=0)
    assert (outcomes[0][0] + missing - true).abs().max() <= 1e-12 * true.abs().max()
    assert missing.norm() > 0


def test_what_topk_leaves_over_stays_within_the_bound_of_its_density(gloo):
    largest = max(gradient(rank, step).norm().item() for rank in range(2) for step in range(100))
    density = math.ceil(0.1 * layout().size) / layout().size
    bound = 2 * math.sqrt(1 - density) / density * largest  # Karimireddy et al. 2019, lemma 3
    assert all(most <= bound for _, _, most in gloo.run(2, send_often, "topk", 100))


# what is not finite


def send_spoilt(place, name, value, at):
    codec, collectives = MAKE[name](), GroupCollectives(dist.group.WORLD)
    values = gradient(place.rank, dtype=torch.float32)
    if place.rank == 1:
        values[at] = value
    codec.mean_(values, collectives, layout(torch.float32))
    again = gradient(place.rank, 1, dtype=torch.float32)
    codec.mean_(again, collectives, layout(torch.float32))
    return bool(values.isfinite().all()), bool(again.isfinite().all())


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", MAKE)
def test_a_gradient_that_is_not_finite_on_one_rank_is_so_on_all_and_the_next_one_is_not(gloo, name, value):
    for at in (0, 30, layout().size - 1):  # its own part of the mean, another's, a vector
        assert gloo.run(3, send_spoilt, name, value, at) == [(False, True)] * 3


# messages


@given(st.sampled_from(["all_reduce", "all_gather", "all_to_all"]), st.integers(0, 10**9), st.integers(1, 512))
def test_link_bytes_are_none_alone_and_grow_with_the_ranks(kind, payload, world_size):
    message = Message(kind, payload)
    assert message.link_bytes(1) == 0
    assert message.link_bytes(world_size) <= message.link_bytes(world_size + 1)
    if kind != "all_gather":
        assert message.link_bytes(world_size) <= 2 * payload  # whatever the number of ranks


@given(st.integers(2, 300))
def test_int8_moves_about_a_quarter_of_float32_whatever_the_number_of_ranks(world_size):
    bucket = Layout((Part("w", 0, 10**7, 1),), 4)

    def moved(codec):
        return sum(message.link_bytes(world_size) for message in codec.messages(bucket, world_size))

    assert 0.25 <= moved(Int8(256)) / moved(Whole()) <= 0.27


def test_topk_moves_less_than_ddp_only_below_one_over_the_world_size():
    bucket = Layout((Part("w", 0, 10**6, 1),), 4)
    for world_size in (2, 8, 64):
        whole = Whole().messages(bucket, world_size)[0].link_bytes(world_size)
        for density, is_less in ((0.99 / world_size, True), (1.01 / world_size, False)):
            assert (TopK(density).messages(bucket, world_size)[0].link_bytes(world_size) < whole) is is_less


@given(st.integers(1, 5), st.integers(0, 9), st.integers(1, 9))
def test_what_is_packed_comes_out_again(rows, num_codes, num_scales):
    codes = torch.randint(-127, 128, (rows, num_codes), dtype=torch.int8)
    scales = torch.randn(rows, num_scales, dtype=torch.float64)
    found = unpack(pack(codes, scales), (torch.int8, num_codes), (torch.float64, num_scales))
    assert torch.equal(found[0], codes) and torch.equal(found[1], scales)


@pytest.mark.parametrize("size", [5, 8, 95])
def test_what_is_sent_of_values_in_8_bits_is_off_by_half_a_scale_of_their_own_block_at_most(size):
    values = gradient(0)[-size:]
    seen = Int8(block_size=8).seen(values, layout())
    assert seen.shape == values.shape and not torch.equal(seen, values)
    for start in range(0, size, 8):
        block = values[start : start + 8]
        assert (seen[start : start + 8] - block).abs().max() <= block.abs().max() / 127 / 2 * (1 + 1e-6)
