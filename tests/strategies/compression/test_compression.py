"""The hook in a real training: exact where it claims so, nothing lost from step to step, and state like any other."""

import contextlib
import itertools
import math
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gloo_pool import Failure
from hypothesis import given
from hypothesis import strategies as st
from small_runs import (
    Classify,
    TiedAndFrozen,
    Tokens,
    largest_difference,
    make_job,
    relative_differences,
    train,
    train_in_plain_torch,
)
from test_ddp import SkipsParameters
from torch import nn

from scaleray.config import load_config
from scaleray.config.recipe.derive import derive
from scaleray.config.recipe.values import DataSize
from scaleray.data import RankBatch, as_source
from scaleray.errors import ConfigError, PeerLostError
from scaleray.strategies.compression import adaptive as adaptive_compression
from scaleray.strategies.compression.adaptive import Candidate, Link, choose
from scaleray.training.setup.model_setup import prepare
from scaleray.training.step.step import TrainStep
from scaleray.verification.variants import GUARANTEES, Assignment, verify_group
from scaleray.verification.verification_plan import make_plan
from scaleray.verification.verify_options import VerifyOptions

pytestmark = pytest.mark.combination  # a feature that few commits touch: its tests take turns

EVERYTHING = {"compression.name": "topk", "compression.density": 1.0}
SMALL_BUCKETS = {"strategy.bucket_size_mib": 1e-4}  # several, and other ones after the first step
METHODS = {
    "fp16": {},
    "bf16": {},
    "int8": {"compression.block_size": 16},
    "powersgd": {"compression.rank": 1},
    "topk": {"compression.density": 0.2},
}
WITH_FEEDBACK = ["int8", "powersgd", "topk"]


def using(method, **more):
    return {"compression.name": method, **METHODS[method], **more}


# exact where nothing is left out


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch.micro_size": 1},
        {"optimizer.clip_norm": 0.3},
        {"optimizer.name": "adamw", "optimizer.learning_rate": 0.01, "optimizer.clip_norm": 0.5},
        pytest.param({"strategy.gradient_as_bucket_view": False}, marks=pytest.mark.combination),
        pytest.param({"strategy.static_graph": True}, marks=pytest.mark.combination),
        {"strategy.find_unused_parameters": True},
        {"deterministic": True},
    ],
    ids=lambda options: ", ".join(options) or "plain",
)
def test_topk_of_everything_equals_one_process(gloo, options):
    for workload in (Classify, Tokens, TiedAndFrozen):
        finished = gloo.run(4, train, workload(), {**EVERYTHING, **SMALL_BUCKETS, **options})[0]
        plain = train_in_plain_torch(workload(), options)
        assert max(relative_differences(plain.losses, finished.losses)) <= 1e-9
        assert max(relative_differences(plain.grad_norms, finished.grad_norms)) <= 1e-9
        assert largest_difference(plain.weights, finished.weights) <= 1e-9


def test_unused_parameters_keep_no_gradient(gloo):
    flags = {"strategy.find_unused_parameters": True, "batch.micro_size": 2, **EVERYTHING}
    finished = gloo.run(2, train, SkipsParameters(), flags)[0]
    plain = train_in_plain_torch(SkipsParameters(), {"batch.micro_size": 2})
    assert largest_difference(plain.weights, finished.weights) <= 1e-9


@pytest.mark.parametrize("method", METHODS)
def test_whole_gradients_are_sent_before_the_start_step(gloo, method):
    flags = {**using(method), **SMALL_BUCKETS, "compression.start_step": 5, "stop.after": "8 steps"}
    finished = gloo.run(2, train, Classify(), flags)[0]
    plain = train_in_plain_torch(Classify(), {"stop.after": "8 steps"})
    differences = list(relative_differences(plain.losses, finished.losses))
    assert max(differences[:6]) <= 1e-9  # the sixth loss follows from five whole gradients
    assert max(differences[6:]) > 1e-9
    ratios = [step.more["compression/ratio"] for step in finished.steps]
    assert ratios[:5] == [1.0] * 5
    assert max(ratios[5:]) < 1


@pytest.mark.parametrize(("method", "within"), [("fp16", 2e-2), ("bf16", 5e-2), ("int8", 5e-2)])
def test_rounded_gradients_train_nearly_the_same(gloo, method, within):
    finished = gloo.run(4, train, Classify(), {**using(method), **SMALL_BUCKETS})[0]
    differences = list(relative_differences(train_in_plain_torch(Classify()).losses, finished.losses))
    assert 0 < max(differences) <= within


# error feedback in the loop


class Parts(nn.Module):
    """Layers that all see the input; the output is a sum of theirs, weighted by row and unit so that gradients have a full rank."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(6, 8), nn.Linear(6, 5), nn.Linear(6, 3, bias=False)])

    def forward(self, x):
        return sum(
            (part(x) * torch.cos(x[:, :1] * torch.arange(1, part.out_features + 1))).sum() for part in self.parts
        )


class Linear(Classify):
    """A loss that is linear in the parameters, so that no gradient depends on an earlier step.

    count: what every row counts, of which the loop knows nothing before its first step.
    """

    def __init__(self, count=1):
        super().__init__(num_rows=64)
        self.count = count

    def build_model(self):
        return Parts()

    def loss(self, model, batch):
        return self.count * model(batch["x"]), self.count * len(batch["y"])


def weights_and_left_over(place, workload, flags, num_steps, growth_interval=None):
    """(weights in the end, the mean of what the ranks have not sent by name, which steps were taken, loss scales)."""
    job, sources = make_job(workload, {"optimizer.momentum": 0.0, **flags}, world_size=place.world_size)
    setup = prepare(job.workload, job.config, job.recipe, place)
    if growth_interval is not None:
        setup.precision.scaler._growth_interval = growth_interval
    step = TrainStep(job.workload, setup, job.config, job.recipe, place, gives_tuples=False)
    plan, scales, taken = job.train_plan(), [], []
    for number in range(num_steps):
        rows = sources["train"].read(plan.rank_indices(number, place.rank, place.world_size))
        before = next(setup.parallel.module.parameters()).detach().clone()
        scales.append(setup.precision.scaler.get_scale())
        step(RankBatch(number, rows, len(rows["y"])), num_rows=plan.num_rows(number), want_norm=False)
        taken.append(not torch.equal(before, next(setup.parallel.module.parameters())))
    weights = {name: value.clone() for name, value in setup.parallel.module.state_dict().items()}
    left = {}
    for name, value in weights.items():
        values = setup.parallel.state().get(f"left.{name}")
        if values is not None:
            values = values.clone()
            dist.all_reduce(values)
            left[name] = values.view(value.shape) / place.world_size / setup.precision.scaler.get_scale()
    setup.parallel.close()
    return weights, left, taken, scales


def assert_only_late(compressed, whole, learning_rate, within):
    weights, left, taken, scales = compressed
    assert (taken, scales) == whole[2:]
    for name, value in whole[0].items():
        # what has not been sent yet is what the weights still lack
        assert (weights[name] - learning_rate * left[name] - value).abs().max() <= within * value.abs().max()
    assert max(value.abs().max().item() for value in left.values()) > 1e-3


@pytest.mark.each_value
@pytest.mark.parametrize("micro_size", [2, 1])
@pytest.mark.parametrize("count", [1, 1000])
@pytest.mark.parametrize("method", WITH_FEEDBACK)
def test_weights_lack_only_what_is_left_over(gloo, method, count, micro_size):
    # buckets change after the first step, and so does what the loop expects to count
    flags = {**SMALL_BUCKETS, "batch.micro_size": micro_size}
    whole = gloo.run(4, weights_and_left_over, Linear(count), flags, 7)[0]
    compressed = gloo.run(4, weights_and_left_over, Linear(count), {**flags, **using(method)}, 7)[0]
    assert_only_late(compressed, whole, 0.1, 1e-12)


@pytest.mark.parametrize("method", WITH_FEEDBACK)
def test_what_is_left_over_follows_the_loss_scale_and_survives_skipped_steps(gloo, method):
    flags = {**SMALL_BUCKETS, "precision.dtype": "fp16", "precision.initial_loss_scale": 4096.0}
    whole = gloo.run(2, weights_and_left_over, Linear(), flags, 16, 3)[0]
    compressed = gloo.run(2, weights_and_left_over, Linear(), {**flags, **using(method)}, 16, 3)[0]
    scales, taken = whole[3], whole[2]
    assert any(later > earlier for earlier, later in itertools.pairwise(scales))  # it grew
    assert False in taken[3:]  # until a step was skipped, with something left over
    assert_only_late(compressed, whole, 0.1, 2e-5)


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_scaler_sees_infinite_gradients_through_the_compression(gloo, method):
    flags = {"precision.dtype": "fp16", "precision.initial_loss_scale": 2.0**40, "optimizer.learning_rate": 0.01}
    flags = {**flags, **using(method), "stop.after": "10 epochs"}
    finished = gloo.run(2, train, Classify(), flags)[0]
    scales = [step.loss_scale for step in finished.steps]
    assert scales[-1] < 2.0**33
    assert all(math.isfinite(loss) for loss in finished.losses)
    assert all(value.isfinite().all() for value in finished.weights.values())
    assert min(finished.losses[-4:]) < finished.losses[0]


# bytes


@contextlib.contextmanager
def counted_collectives(sizes):
    """The payload bytes of every collective that the thread for gradients calls; the loop's own come from another."""

    def counting(function, position):
        def call(*args, **kwargs):
            if threading.current_thread().name == "scaleray-gradients":
                sizes.append(args[position].numel() * args[position].element_size())
            return function(*args, **kwargs)

        return call

    with (
        mock.patch.object(dist, "all_reduce", counting(dist.all_reduce, 0)),
        mock.patch.object(dist, "all_gather", counting(dist.all_gather, 1)),
        mock.patch.object(dist, "all_to_all_single", counting(dist.all_to_all_single, 1)),
    ):
        yield


def train_and_listen(place, flags):
    sizes = []
    with counted_collectives(sizes):
        finished = train(place, Classify(num_rows=24), {**flags, "precision.dtype": "fp32", "stop.after": "6 steps"})
    in_rows = sum(row.num_bytes for row in finished.summary.profile.collectives)
    return [step.sent_bytes for step in finished.steps], in_rows, sum(sizes)


@pytest.mark.each_value
@pytest.mark.parametrize("micro_size", [2, 1])
@pytest.mark.parametrize("method", METHODS)
def test_counted_bytes_are_those_given_to_collectives_once_a_step(gloo, method, micro_size):
    flags = {**using(method), **SMALL_BUCKETS, "batch.micro_size": micro_size}
    a_step, in_rows, in_all = gloo.run(4, train_and_listen, flags)[0]
    assert sum(a_step) == in_rows == in_all
    assert len(set(a_step[1:])) == 1
    whole = gloo.run(4, train_and_listen, {})[0][0][-1]
    assert 0 < a_step[-1] < whole


# state


@pytest.mark.parametrize("method", WITH_FEEDBACK)
def test_a_resumed_run_is_bit_identical(gloo, tmp_path, method):
    flags = {
        **using(method),
        **SMALL_BUCKETS,
        "deterministic": True,
        "checkpoint.every": "3 steps",
        "stop.after": "9 steps",
        "precision.dtype": "fp32",
    }
    whole = gloo.run(2, train, Classify(), flags)[0]
    gloo.run(2, in_folder, flags, str(tmp_path), 5)
    resumed = gloo.run(2, in_folder, flags, str(tmp_path), None)[0]
    assert [step.step for step in resumed.steps] == [4, 5, 6, 7, 8, 9]
    assert resumed.losses == whole.losses[3:]
    assert largest_difference(whole.weights, resumed.weights) == 0
    assert not [event for event in resumed.events if "starts from scratch" in event]


def in_folder(place, flags, folder, kill_at):
    return train(place, Classify(), flags, folder=folder, kill_at=kill_at)


def test_other_workers_start_without_a_left_over_and_say_so(gloo, tmp_path):
    flags = {**using("topk"), "checkpoint.every": "3 steps", "stop.after": "9 steps"}
    gloo.run(2, in_folder, flags, str(tmp_path), 5)
    resumed = gloo.run(4, in_folder, flags, str(tmp_path), None)[0]
    assert [step.step for step in resumed.steps] == [4, 5, 6, 7, 8, 9]
    assert [e for e in resumed.events if "values not sent by earlier steps are lost" in e]


# faults


class RaisesOnRank1(Classify):
    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        if dist.is_initialized() and dist.get_rank() == 1 and self.calls > 6:
            raise KeyError("on purpose")
        return super().loss(model, batch)


def test_a_lost_peer_is_known_as_such_from_inside_the_hook(gloo):
    first, second = gloo.attempt(2, train, RaisesOnRank1(), using("int8"))
    assert isinstance(first, Failure) and isinstance(second, Failure)
    assert "on purpose" in second.text
    assert isinstance(first.error, PeerLostError), first.text


# what is chosen

CANDIDATES = st.lists(
    st.builds(
        Candidate,
        name=st.sampled_from(["none", "bf16", "int8", "topk"]),
        num_messages=st.integers(1, 3),
        link_bytes=st.floats(0, 1e9),
        error=st.floats(0, 2) | st.just(math.inf),
        coding_s=st.floats(0, 1),
    ),
    max_size=6,
)
LINKS = st.builds(Link, latency_s=st.floats(0, 1), bytes_per_s=st.floats(1e3, 1e12))


@given(CANDIDATES, LINKS, st.floats(1e-9, 1))
def test_the_choice_keeps_the_bound_and_none_that_keeps_it_is_faster(candidates, link, max_error):
    chosen = choose(candidates, link, max_error=max_error)
    fit = [candidate for candidate in candidates if candidate.error <= max_error]
    assert (chosen is None) == (not fit)
    if chosen is not None:
        assert chosen.error <= max_error
        assert chosen.time_s(link) == min(candidate.time_s(link) for candidate in fit)


@given(CANDIDATES, LINKS, st.floats(1e-9, 1), st.randoms())
def test_the_choice_does_not_depend_on_the_order(candidates, link, max_error, shuffle):
    others = list(candidates)
    shuffle.shuffle(others)
    first, second = (choose(found, link, max_error=max_error) for found in (candidates, others))
    assert first == second or (first.name, first.error, first.time_s(link)) == (
        second.name,
        second.error,
        second.time_s(link),
    )


@given(CANDIDATES, LINKS, st.floats(1, 1e6))
def test_a_slower_link_never_makes_the_choice_send_more(candidates, link, factor):
    slower = Link(link.latency_s, link.bytes_per_s / factor)
    fast, slow = (choose(candidates, on, max_error=0.5) for on in (link, slower))
    if fast is not None:
        assert slow.link_bytes <= fast.link_bytes * (1 + 1e-9) + 1e-6


def test_nothing_that_is_not_a_number_is_chosen():
    assert choose([Candidate("topk", 1, 1.0, math.nan)], Link(0.0, 1.0), max_error=1.0) is None


def train_adaptively(place, flags):
    finished = train(place, Classify(), {"compression.name": "adaptive", **SMALL_BUCKETS, **flags})
    return finished, {step.step: step.more for step in finished.steps}


def test_adaptive_takes_what_it_is_allowed_and_says_so(gloo):
    flags = {"compression.allowed": ["int8"], "compression.max_error": 0.5}
    (finished, figures), *_ = gloo.run(4, train_adaptively, flags)
    assert all(more["compression/share_int8"] == 1 for more in figures.values())
    assert [e for e in finished.events if "int8 for" in e and "Mbit/s" in e]
    plain = train_in_plain_torch(Classify())
    assert 0 < max(relative_differences(plain.losses, finished.losses)) < 5e-2


def test_adaptive_sends_whole_gradients_where_all_that_is_allowed_errs_too_much(gloo):
    flags = {"compression.allowed": ["int8", "topk"], "compression.max_error": 1e-9, "compression.review_every": 3}
    (finished, figures), *_ = gloo.run(4, train_adaptively, flags)
    assert all(more["compression/share_none"] == 1 for more in figures.values())
    assert [e for e in finished.events if "too large errors" in e]
    assert max(relative_differences(train_in_plain_torch(Classify()).losses, finished.losses)) <= 1e-9


def train_on_a_link(place, latency_s, probe_s):
    times = itertools.cycle([latency_s] * 3 + [probe_s] * 3)
    with mock.patch.object(adaptive_compression, "time_s", lambda values, work: (work(), next(times))[1]):
        return train_adaptively(place, {"compression.allowed": ["none", "int8"], "compression.max_error": 0.5})[1].get(
            5
        )


def test_adaptive_compresses_on_a_slow_link_and_not_on_a_fast_one(gloo):
    assert gloo.run(4, train_on_a_link, 1e-3, 1.1e-3)[0]["compression/share_none"] == 1
    assert gloo.run(4, train_on_a_link, 1e-3, 1e4)[0]["compression/share_int8"] == 1


def test_adaptive_looks_again_after_a_step_that_could_not_be_judged(gloo):
    flags = {
        "compression.allowed": ["int8"],
        "compression.max_error": 0.5,
        "precision.dtype": "fp16",
        "precision.initial_loss_scale": 2.0**40,
        "stop.after": "10 epochs",
    }
    (finished, figures), *_ = gloo.run(2, train_adaptively, flags)
    assert figures[1]["compression/share_none"] == 1
    assert figures[len(finished.steps)]["compression/share_int8"] == 1


# verification


def judge(place, assignment, sources):
    return verify_group(place, assignment, {}, sources=sources)[0]


def test_verify_judges_what_compression_promises_and_the_single_process_has_none(gloo):
    workload, question = Classify(), VerifyOptions(("ddp",), (1, 2), (1, 2), steps=4)
    sources = {"train": as_source(workload.datasets()["train"], split="train")}
    plan = make_plan(config(compression__name="topk", compression__density=0.2), question, workload, sources)
    assert plan.refused == []
    outcomes = gloo.run(2, judge, Assignment(plan.reference, tuple(plan.groups[2]), 1e-9), sources)[0]
    assert [(outcome.verdict, outcome.words) for outcome in outcomes] == [
        ("as promised", GUARANTEES["compression"].words)
    ] * 2
    assert all(outcome.comparison.divergence is not None for outcome in outcomes)  # it is not equal, either


# what is refused


def config(**flags):
    words = {
        "workload.name": "small_runs:Classify",
        "batch.global_size": 8,
        "optimizer.name": "sgd",
        "optimizer.learning_rate": 0.1,
        "stop.after": "2 epochs",
        "scale.workers": 4,
    }
    return load_config(flags={**words, **{key.replace("__", "."): value for key, value in flags.items()}}, environ={})


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"scale__workers": 1}, "one worker sends no gradients"),
        ({"strategy__name": "fsdp"}, " is a hook of DDP, and the strategy is fsdp"),
        ({"strategy__name": "local_sgd"}, "the strategy is local_sgd"),
        ({"compression__name": "adaptive", "deterministic": True}, "by measured times"),
    ],
)
def test_what_makes_no_sense_is_refused_before_training(flags, says):
    with pytest.raises(ConfigError, match=says):
        derive(config(**{"compression__name": "int8", **flags}), DataSize(100))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"compression__name": "int8", "compression__density": 0.5}, "compression.density.*setting of topk"),
        ({"compression__rank": 2}, "compression.rank.*setting of powersgd"),
        ({"compression__start_step": 3}, "compression.start_step"),
        ({"compression__name": "adaptive", "compression__allowed": []}, "compression.allowed"),
        ({"compression__name": "adaptive", "compression__allowed": ["int8", "int8"]}, "compression.allowed"),
        ({"compression__name": "topk", "compression__density": 0}, "compression.density"),
    ],
)
def test_a_setting_without_effect_or_sense_is_refused(flags, says):
    with pytest.raises(ConfigError, match=says):
        config(**flags)


def test_the_resolved_config_can_be_read_again_and_an_elastic_run_may_shrink_to_one_worker():
    made = config(compression__name="topk", compression__density=0.1, scale__workers="1..4")
    assert type(made).model_validate(made.to_dict()) == made
    assert derive(made, DataSize(100), workers=1).strategy == "single"
