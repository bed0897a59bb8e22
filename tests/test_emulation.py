"""Layers that sleep instead of computing: what is real about them, and the claims that are tested with them.

Nothing here measures speed: intervals are judged by their order, which program and causality decide, not the machine.
"""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections import namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_runs import Classify, largest_difference, relative_differences, train, train_in_plain_torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from scaleray.emulation import (
    BACKWARD,
    FORWARD,
    REDUCE,
    EmulatedLayer,
    EmulatedLink,
    Interval,
    Timeline,
    Timing,
    busy_s,
    emulate,
)
from scaleray.errors import ConfigError

PASSES = {"num_samples": 4, "layer": 2, "number": 7, "rank": 1}


# how long a pass takes


@given(
    jitter=st.floats(0, 0.99),
    seed=st.integers(0, 100),
    layer=st.integers(0, 50),
    number=st.integers(0, 10**6),
    rank=st.integers(0, 100),
    num_samples=st.integers(0, 1000),
)
def test_a_pass_takes_its_time_within_the_jitter(jitter, seed, layer, number, rank, num_samples):
    timing = Timing(forward_s=0.5, forward_s_per_sample=0.25, backward_factor=3.0, jitter=jitter, seed=seed)
    where = {"layer": layer, "number": number, "rank": rank, "num_samples": num_samples}
    mean = 0.5 + 0.25 * num_samples
    for direction, factor in ((FORWARD, 1), (BACKWARD, 3)):
        assert (1 - jitter) * mean * factor <= timing.duration_s(direction, **where) * (1 + 1e-12)
        assert timing.duration_s(direction, **where) <= (1 + jitter) * mean * factor * (1 + 1e-12)


def test_jitter_is_the_same_in_every_run_and_another_for_every_pass_layer_rank_and_seed():
    timing = Timing(forward_s=1.0, jitter=0.5)
    one = timing.duration_s(FORWARD, **PASSES)
    assert pickle.loads(pickle.dumps(timing)).duration_s(FORWARD, **PASSES) == one
    others = [timing.duration_s(FORWARD, **{**PASSES, name: 33}) for name in ("layer", "number", "rank")]
    others.append(Timing(forward_s=1.0, jitter=0.5, seed=1).duration_s(FORWARD, **PASSES))
    others.append(timing.duration_s(BACKWARD, **PASSES) / 2)
    assert len({one, *others}) == 6
    assert timing.duration_s(FORWARD, **{**PASSES, "num_samples": 99}) == one  # only what is given per sample scales


def test_a_slow_rank_is_slower_by_its_factor_and_no_other_is():
    fast, slow = Timing(forward_s_per_sample=1.0), Timing(forward_s_per_sample=1.0, slowdown={1: 2.5})
    assert slow.duration_s(FORWARD, **PASSES) == 2.5 * fast.duration_s(FORWARD, **PASSES)
    assert slow.duration_s(FORWARD, **{**PASSES, "rank": 0}) == fast.duration_s(FORWARD, **{**PASSES, "rank": 0})


@pytest.mark.parametrize(
    "values", [{"forward_s": -1}, {"jitter": 1.0}, {"backward_factor": float("nan")}, {"slowdown": {0: 0.0}}]
)
def test_times_that_cannot_be_slept_are_refused(values):
    with pytest.raises(ConfigError, match=f"Timing.{next(iter(values))}"):
        Timing(**values)


# what is real


def test_every_parameter_gets_the_gradient_of_the_formula():
    torch.manual_seed(0)
    layer = EmulatedLayer(4, Timing(), num_parameters=12).double()
    assert layer.weight.shape == (3, 4)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    found = torch.autograd.grad(layer(x).square().sum(), [x, layer.weight])
    expected = torch.autograd.grad((x + torch.tanh(x) * layer.weight.mean(dim=0)).square().sum(), [x, layer.weight])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert (found[1] != 0).all()


class Sleepy(Classify):
    """Two layers that sleep for a moment, between two that compute."""

    def build_model(self):
        timing = Timing(forward_s_per_sample=1e-5, jitter=0.5, slowdown={1: 2.0})
        middle = [EmulatedLayer(8, timing, index=i, num_parameters=32) for i in range(2)]
        return nn.Sequential(nn.Linear(6, 8), *middle, nn.Linear(8, 3))


@pytest.mark.parametrize("micro_size", [2, 4])
def test_a_model_of_emulated_layers_trains_on_two_workers_as_in_plain_torch(gloo, micro_size):
    flags = {"batch.micro_size": micro_size}
    finished, plain = gloo.run(2, train, Sleepy(), flags)[0], train_in_plain_torch(Sleepy())
    assert finished.summary.model["is_emulated"]
    assert max(relative_differences(plain.losses, finished.losses)) <= 1e-9
    assert largest_difference(plain.weights, finished.weights) <= 1e-9


def test_a_pass_sleeps_at_least_its_time_and_leaves_core_and_lock_free():
    timeline, ticks, is_over = Timeline(), [], threading.Event()
    layer = EmulatedLayer(4, Timing(forward_s=0.2, backward_factor=1.0), timeline=timeline)

    def tick():
        while not is_over.wait(0.002):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    cpu_before = time.thread_time()
    layer(torch.ones(1, 4)).sum().backward()
    cpu_s = time.thread_time() - cpu_before
    is_over.set()
    thread.join()
    passes = timeline.intervals(FORWARD, BACKWARD)
    assert [p.kind for p in passes] == [FORWARD, BACKWARD]
    assert all(p.end_s - p.start_s >= 0.2 for p in passes)  # a sleep is never shorter, however busy the machine
    assert all(
        any(p.start_s < t < p.end_s for t in ticks) for p in passes
    )  # another thread had Python's lock meanwhile
    assert cpu_s < 0.2  # of 0.4 s: the core was free


def test_layers_are_recorded_in_the_order_in_which_they_run():
    timeline = Timeline()
    model = nn.Sequential(*(EmulatedLayer(4, Timing(), index=i, timeline=timeline) for i in range(3)))
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
    seen = [(p.kind, p.index, p.number) for p in timeline.intervals()]
    once = lambda n: [*((FORWARD, i, n) for i in range(3)), *((BACKWARD, i, n) for i in (2, 1, 0))]
    assert seen == [*once(0), *once(1)]
    copied = copy.deepcopy(model)
    timeline.clear()
    with torch.no_grad():
        copied(torch.ones(1, 4))
    assert [(p.kind, p.number) for p in timeline.intervals()] == [
        (FORWARD, 2)
    ] * 3  # an evaluation has no backward pass


Pair = namedtuple("Pair", ["out", "extra"])


class GivesPair(nn.Linear):
    def forward(self, x):
        return Pair(super().forward(x), "extra")


def test_a_real_model_computes_the_same_while_it_is_slowed_and_is_itself_again_afterwards():
    torch.manual_seed(0)
    model, timeline, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), Timeline(), torch.randn(3, 4)
    pair = GivesPair(4, 2)
    losses = lambda: [model(x).square().sum(), pair(x).out.square().sum()]
    gradients = lambda: torch.autograd.grad(sum(losses()), [*model.parameters(), *pair.parameters()])
    before = gradients()
    undo = emulate([model[0], model[2], pair], Timing(forward_s=1e-4), timeline=timeline)
    during = gradients()
    assert sorted((p.kind, p.index) for p in timeline.intervals()) == sorted(
        (kind, i) for kind in (FORWARD, BACKWARD) for i in range(3)
    )
    assert isinstance(pair(x), Pair) and pair(x).extra == "extra"
    undo()
    timeline.clear()
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(before, during, gradients(), strict=True))
    assert timeline.intervals() == []


def test_a_module_whose_output_cannot_be_slowed_is_refused():
    class GivesDict(nn.Module):
        def forward(self, x):
            return {"x": x}

    model = GivesDict()
    emulate([model], Timing())
    with pytest.raises(ConfigError, match="the emulated GivesDict returned dict: it must return a tensor"):
        model(torch.ones(1))


# sums of intervals


def interval(start, end):
    return Interval(FORWARD, 0, 0, start, end)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted), max_size=10))
def test_busy_time_is_the_length_of_the_union(pairs):
    covered = {second for start, end in pairs for second in range(start, end)}
    assert busy_s(interval(a, b) for a, b in pairs) == len(covered)


# overlap of communication and computation, under DDP

NUM_LAYERS, WIDTH, PARAMETERS = 6, 16, 4096


def ddp_steps(place, bucket_mib, slowdown, has_link=True):
    """The intervals and gradients of the third of three steps: DDP lays its buckets out after the first."""
    torch.manual_seed(0)
    timeline = Timeline()
    timing = Timing(forward_s=0.002, backward_factor=5.0, slowdown=slowdown)
    layers = [
        EmulatedLayer(WIDTH, timing, num_parameters=PARAMETERS, index=i, timeline=timeline) for i in range(NUM_LAYERS)
    ]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=bucket_mib)
    link = EmulatedLink(bytes_per_s=4 * PARAMETERS / 0.003, timeline=timeline)  # a layer's gradient in 3 ms
    if has_link:
        model.register_comm_hook(None, link.reduce)
    for _ in range(3):
        timeline.clear()
        model(torch.full((2, WIDTH), 1.0 + place.rank)).square().sum().backward()
    link.close()
    return timeline.intervals(), [p.grad.clone() for p in model.parameters()]


def test_small_buckets_are_reduced_while_layers_still_compute_and_one_bucket_is_not(gloo):
    for bucket_mib, num_early in ((4 * PARAMETERS / 2**20, NUM_LAYERS - 1), (100, 0)):
        for found, _ in gloo.run(2, ddp_steps, bucket_mib, {}):
            backward = [i for i in found if i.kind == BACKWARD]
            reduces = [i for i in found if i.kind == REDUCE]
            assert [i.index for i in backward] == list(reversed(range(NUM_LAYERS)))
            assert len(reduces) == (NUM_LAYERS if num_early else 1)
            # a reduction begins before the last layer does: what decides is the order of the program, not the machine
            assert sum(reduce.start_s < backward[-1].start_s for reduce in reduces) == num_early
            overlap_s = busy_s(reduces) + busy_s(backward) - busy_s([*reduces, *backward])
            assert (overlap_s > 0) == (num_early > 0)


@pytest.mark.combination
def test_a_slow_link_reduces_to_the_same_gradients_as_none(gloo):
    for bucket_mib in (4 * PARAMETERS / 2**20, 100):
        (_, first), (_, second) = gloo.run(2, ddp_steps, bucket_mib, {})
        (_, plain), _ = gloo.run(2, ddp_steps, bucket_mib, {}, False)
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, second, plain, strict=True))
        assert all(gradient.abs().sum() > 0 for gradient in first)


def test_nobody_gets_its_gradients_before_the_straggler_has_computed_its_own(gloo):
    """Both processes read one clock, and no reduction can end before its last member has begun it."""
    (fast, _), (slow, _) = gloo.run(2, ddp_steps, 4 * PARAMETERS / 2**20, {1: 4.0})
    for bucket in range(NUM_LAYERS):
        ends = [i.end_s for i in fast if i.kind == REDUCE and i.index == bucket]
        begins = [i.start_s for i in slow if i.kind == REDUCE and i.index == bucket]
        assert len(ends) == len(begins) == 1 and ends[0] > begins[0]
    assert fast[-1].kind == slow[-1].kind == REDUCE
    last_of_the_slow = max(i.end_s for i in slow if i.kind == BACKWARD)
    assert max(i.end_s for i in fast if i.kind == REDUCE) > last_of_the_slow


# pipelines: the order of the passes, and the bubble that follows from it

NUM_STAGES, NUM_MICRO = 4, 8
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def pipeline_passes(place, schedule):
    """What a stage did in the second of two steps, as (kind, micro-batch)."""
    timeline = Timeline()
    layer = EmulatedLayer(4, Timing(forward_s=5e-4), index=place.rank, timeline=timeline)
    stage = PipelineStage(layer, place.rank, place.world_size, torch.device("cpu"))
    pipeline = SCHEDULES[schedule](stage, n_microbatches=NUM_MICRO, loss_fn=nn.functional.mse_loss)
    x = torch.ones(NUM_MICRO, 4)
    for _ in range(2):
        timeline.clear()
        if place.rank == 0:
            pipeline.step(x)
        elif place.rank == place.world_size - 1:
            pipeline.step(target=x, losses=[])
        else:
            pipeline.step()
    return [(i.kind, i.number % NUM_MICRO) for i in timeline.intervals()]


def bubble_of(orders, *, forward, backward):
    """Share of idle time when each stage does its passes in its order, as soon as their inputs exist."""
    done, clocks, places = {}, [0.0] * len(orders), [0] * len(orders)
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        before = sum(places)
        for stage, order in enumerate(orders):
            if places[stage] == len(order):
                continue
            kind, micro = order[places[stage]]
            if kind == FORWARD:
                needs = [(FORWARD, micro, stage - 1)] if stage else []
            else:
                needs = [(BACKWARD, micro, stage + 1)] if stage + 1 < len(orders) else [(FORWARD, micro, stage)]
            if all(need in done for need in needs):
                start = max([clocks[stage], *(done[need] for need in needs)])
                clocks[stage] = start + (forward if kind == FORWARD else backward)
                done[kind, micro, stage] = clocks[stage]
                places[stage] += 1
        assert sum(places) > before, "the orders of the stages wait for each other"
    return 1 - NUM_MICRO * (forward + backward) / max(clocks)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_order_of_the_passes_has_the_bubble_of_the_formula(gloo, schedule):
    """(p - 1) / (m + p - 1), Narayanan et al. 2021, arXiv:2104.04473, section 2.2; measured in jobs/benchmarks/emulated.py."""
    orders = gloo.run(NUM_STAGES, pipeline_passes, schedule)
    assert all(
        sorted(order) == sorted((k, m) for k in (FORWARD, BACKWARD) for m in range(NUM_MICRO)) for order in orders
    )
    expected = (NUM_STAGES - 1) / (NUM_MICRO + NUM_STAGES - 1)
    assert bubble_of(orders, forward=1.0, backward=2.0) == pytest.approx(expected, rel=1e-9)


def test_1f1b_keeps_fewer_micro_batches_alive_than_gpipe(gloo):
    def most_alive(order):
        alive = [sum(1 if kind == FORWARD else -1 for kind, _ in order[: n + 1]) for n in range(len(order))]
        return max(alive)

    assert [most_alive(order) for order in gloo.run(NUM_STAGES, pipeline_passes, "gpipe")] == [NUM_MICRO] * NUM_STAGES
    found = [most_alive(order) for order in gloo.run(NUM_STAGES, pipeline_passes, "1f1b")]
    assert found == [NUM_STAGES - stage for stage in range(NUM_STAGES)]
