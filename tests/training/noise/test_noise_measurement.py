"""What a run measures of its gradient noise: equal to plain torch, in all ways, without touching the training."""

import json
import math

import numpy as np
import pytest
import torch
from small_runs import Classify, RankContext, Stepper, Tokens, train, train_alone
from torch import nn

from scaleray.common.watchers import Guard
from scaleray.config.recipe.noise_source import noise_source
from scaleray.data import TRAIN
from scaleray.records.run_record import EventRecord
from scaleray.strategies.contract.parallel import full
from scaleray.training.noise.meter import NoiseMeter
from scaleray.training.noise.noise_scale import NoiseAverages, Parts, estimate

pytestmark = pytest.mark.combination

MEASURED = {"noise_scale.measure": True, "noise_scale.every_steps": 1}
FLAGS = {**MEASURED, "batch.global_size": 12, "stop.after": "6 steps"}
ADAM = {"optimizer.name": "adamw", "optimizer.learning_rate": 0.01}


def look_without_gradients(stepper):
    rows = stepper.sources[TRAIN].read(stepper.plan.rank_indices(0, stepper.place.rank, stepper.place.world_size, None))
    batch = {name: torch.from_numpy(values) for name, values in rows.items()}
    with torch.no_grad():
        batch = {n: v.double() if v.is_floating_point() else v for n, v in batch.items()}
        stepper.parallel.run_alone(lambda model: stepper.job.workload.loss(model, batch))


def source_of(config, recipe, place):
    return noise_source(
        config,
        recipe.strategy,
        data_parallel_size=place.data_parallel_size,
        accumulation_steps=recipe.accumulation_steps,
    ).name


def measured_and_expected(place, workload, flags, at_step, whose):
    """(averages after one measurement in step `at_step`, the same from plain torch, the source). whose: parts of the batch."""
    stepper = Stepper(place, workload, {**FLAGS, **flags})
    job, setup = stepper.job, stepper.setup
    place = stepper.place
    if setup.parallel.forward_is_collective:
        look_without_gradients(
            stepper
        )  # an evaluation leaves FSDP's root whole, which a meter that is made then must not mind
    meter = stepper.step.noise = NoiseMeter(job.config, setup, place, source_of(job.config, job.recipe, place), Guard())
    for number in range(1, at_step):
        stepper(number)
    meter.averages = NoiseAverages()
    named = dict(setup.parallel.module.named_parameters())
    weights = {name: full(p.detach()).clone() for name, p in named.items()}
    roots = _adam_roots(setup.optimizer, named) if job.config.noise_scale.preconditioned else {}
    hooks = [dict(p._post_accumulate_grad_hooks or {}) for p in named.values()]
    stepper(at_step, want_norm=False)  # the meter sees to what it needs
    left = [dict(p._post_accumulate_grad_hooks or {}) for p in named.values()]
    whole, parts = _rows(stepper, at_step - 1, whose)
    expected = _estimate_in_plain_torch(workload, weights, roots, stepper.sources[TRAIN], whole, parts)
    setup.close()
    assert left == hooks, "hooks stay on parameters"
    return (meter.averages.square, meter.averages.trace), (expected.square, expected.trace), meter.source_name


def _adam_roots(optimizer, named):
    found = {}
    for name, parameter in named.items():
        state, group = optimizer.state[parameter], optimizer.param_groups[0]
        second = full(state["exp_avg_sq"]).clone()
        found[name] = (second / (1 - group["betas"][1] ** float(state["step"]))).sqrt() + group["eps"]
    return found


def _rows(stepper, step, whose):
    """(rows of the whole batch, rows of each part)."""
    plan, place, job = stepper.plan, stepper.place, stepper.job
    size = place.data_parallel_size
    shares = job.recipe.worker_shares
    ranks = [plan.rank_indices(step, rank, size, shares) for rank in range(size)]
    micro = job.recipe.micro_batch_size
    if whose == "own first":
        return ranks[0], [ranks[0][:micro]]
    parts = {
        "workers": ranks,
        "micro-batches": [own[i : i + micro] for own in ranks for i in range(0, len(own), micro)],
        "first": [own[:micro] for own in ranks],
        "first of all": [np.concatenate([own[:micro] for own in ranks])],
    }[whose]
    return plan.global_indices(step), parts


def _estimate_in_plain_torch(workload, weights, roots, source, whole, parts):
    model = workload.build_model().double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])

    def gradient(rows):
        batch = {name: torch.from_numpy(values) for name, values in source.read(rows).items()}
        batch = {n: v.double() if v.is_floating_point() else v for n, v in batch.items()}
        total, count = workload.loss(model, batch)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        found = torch.autograd.grad(total / count, list(named.values()))
        square = sum((g / roots.get(n, 1.0)).square().sum() for n, g in zip(named, found, strict=True))
        return float(square), float(count)

    square, count = gradient(whole)
    per_count = len(whole) / count
    seen = Parts(0, 0, 0)
    for rows in parts:
        theirs, their_count = gradient(rows)
        seen += Parts.of(their_count * per_count, theirs)
    return estimate(seen, whole_square=square, whole_size=len(whole))


IN_PARTS = {"batch.micro_size": 2}
CASES = {
    "ddp": (2, Classify, {}, "workers"),
    "ddp, three workers": (3, Tokens, {}, "workers"),
    "ddp, accumulation and tokens": (2, Tokens, IN_PARTS, "workers"),
    "ddp, one bucket a tensor": (2, Classify, {"strategy.bucket_size_mib": 1e-6}, "workers"),
    "ddp, unequal shares": (2, Classify, {"shares.by": "given", "shares.speeds": [3, 1]}, "workers"),
    "ddp, clipping": (2, Classify, {"optimizer.clip_norm": 1e-3}, "workers"),
    "zero1": (2, Tokens, {"strategy.name": "zero1"}, "workers"),
    "fsdp": (2, Tokens, {"strategy.name": "fsdp"}, "workers"),
    "fsdp, clipping": (2, Tokens, {"strategy.name": "fsdp", "optimizer.clip_norm": 1e-3}, "workers"),
    "fsdp, three workers": (3, Classify, {"strategy.name": "fsdp"}, "workers"),
    "fsdp, whole accumulation": (2, Classify, {"strategy.name": "fsdp", **IN_PARTS}, "workers"),
    "fsdp, sharded accumulation": (
        2, Tokens, {"strategy.name": "fsdp", "fsdp.accumulate": "sharded", **IN_PARTS}, "micro-batches",
    ),
    "fsdp, replicas": (4, Classify, {"strategy.name": "fsdp", "parallel.replicate": 2}, "workers"),
    "single, accumulation": (1, Tokens, IN_PARTS, "first"),
    "local_sgd, accumulation": (
        2, Classify, {"strategy.name": "local_sgd", "local_sgd.sync_every": 4, "batch.micro_size": 3}, "own first",
    ),
    "tensor, accumulation": (2, Classify, {"strategy.name": "tensor", "parallel.tensor": 2, "batch.micro_size": 4}, "first"),
    "ddp, adam": (2, Tokens, {**ADAM, "noise_scale.preconditioned": True}, "workers"),
    "single, accumulation, adam": (1, Classify, {**ADAM, "noise_scale.preconditioned": True, **IN_PARTS}, "first"),
    "fsdp, sharded accumulation, adam": (
        2, Classify,
        {**ADAM, "noise_scale.preconditioned": True, "strategy.name": "fsdp", "fsdp.accumulate": "sharded", **IN_PARTS},
        "first of all",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("world_size", "case"), [(CASES[case][0], case) for case in CASES])
def test_every_source_measures_what_plain_torch_computes(gloo, world_size, case):
    _, workload, flags, whose = CASES[case]
    at_step = 7 if "noise_scale.preconditioned" in flags else 2
    if whose == "own first":
        at_step = 1  # later, replicas differ
    workload = workload(num_rows=96)
    outcomes = gloo.run(world_size, measured_and_expected, workload, flags, at_step, whose)
    measured, expected, _ = outcomes[0]
    # float64 throughout; differences of norms lose some digits
    assert measured == pytest.approx(expected, rel=1e-9, abs=1e-12)
    if whose != "own first":
        assert all(theirs[0] == measured for theirs in outcomes), "ranks disagree"


def test_two_steps_without_change_are_measured_as_one_batch_of_both(gloo):
    measured, expected, source = gloo.run(1, from_two_steps)[0]
    assert source == "consecutive steps"
    assert measured == pytest.approx(expected, rel=1e-9)


def from_two_steps(place):
    """With a learning rate of (nearly) 0 two steps are halves of one batch."""
    workload = Classify(num_rows=24)
    stepper = Stepper(place, workload, {**FLAGS, "optimizer.learning_rate": 1e-30})
    config, recipe = stepper.job.config, stepper.job.recipe
    meter = stepper.step.noise = NoiseMeter(config, stepper.setup, place, source_of(config, recipe, place), Guard())
    weights = stepper.weights
    for number in (1, 2):
        stepper(number)
    halves = [stepper.plan.global_indices(step) for step in (0, 1)]
    source = stepper.sources[TRAIN]
    expected = _estimate_in_plain_torch(workload, weights, {}, source, np.concatenate(halves), halves)
    assert meter.averages.num_samples == 1 and meter.averages.is_biased
    return (meter.averages.square, meter.averages.trace), (expected.square, expected.trace), meter.source_name


# measuring changes nothing


UNTOUCHED = {
    "one worker": (1, {}),
    "accumulation": (1, {"batch.micro_size": 4}),
    "ddp": (2, {"optimizer.clip_norm": 0.1}),
    "ddp, three workers, small buckets": (3, {"batch.micro_size": 2, "strategy.bucket_size_mib": 1e-4}),
    "fsdp": (2, {"strategy.name": "fsdp"}),
    "fp16": (2, {"precision.dtype": "fp16", "batch.micro_size": 3, "precision.initial_loss_scale": 2.0**21}),
    "compression": (2, {"compression.name": "bf16"}),
    "compiled": (2, {"compilation.what": "model", "compilation.backend": "eager"}),
    "adam": (2, {**ADAM, "noise_scale.preconditioned": True}),
}


def with_and_without(place, workload, flags):
    measured = train(place, workload, {**FLAGS, "precision.dtype": "fp32", "stop.after": "9 steps", **flags})
    kept = {k: v for k, v in flags.items() if not k.startswith("noise_scale.")}
    plain = {**FLAGS, "precision.dtype": "fp32", "stop.after": "9 steps", **kept, "noise_scale.measure": False}
    return measured, train(place, workload, {k: v for k, v in plain.items() if k != "noise_scale.every_steps"})


@pytest.mark.parametrize("case", UNTOUCHED)
def test_measuring_changes_no_bit_of_the_training(gloo, case):
    world_size, flags = UNTOUCHED[case]
    measured, plain = gloo.run(world_size, with_and_without, Classify(num_rows=60), flags)[0]
    assert measured.summary.noise["num_measurements"] >= 2 and not plain.summary.noise
    assert repr(measured.losses) == repr(plain.losses)
    assert repr(measured.grad_norms) == repr(plain.grad_norms)
    assert [s.sent_bytes for s in measured.steps] == [s.sent_bytes for s in plain.steps]
    for name, weight in plain.weights.items():
        assert torch.equal(measured.weights[name], weight), name


def test_an_overflow_of_fp16_is_left_out_of_the_averages(gloo):
    world_size, flags = UNTOUCHED["fp16"]
    measured, _ = gloo.run(world_size, with_and_without, Classify(num_rows=60), flags)[0]
    noise = measured.summary.noise
    assert noise["num_rejected"] >= 1 and noise["num_measurements"] + noise["num_rejected"] == 9
    assert math.isfinite(noise["grad_sq"]) and math.isfinite(noise["trace"])


@pytest.mark.parametrize(
    ("precision", "strategy"), [("fp32", "ddp"), ("fp16", "ddp"), ("bf16", "ddp"), ("fp32", "fsdp"), ("fp16", "fsdp")]
)
def test_the_loss_scale_is_taken_out(gloo, precision, strategy):
    flags = {"precision.dtype": precision, "strategy.name": strategy, "precision.initial_loss_scale": 1024.0}
    workload = Classify(num_rows=96)
    noise = gloo.run(2, with_and_without, workload, flags)[0][0].summary.noise
    exact = gloo.run(2, with_and_without, workload, {"precision.dtype": "fp64"})[0][0].summary.noise
    # half precision has 8 (bf16) to 11 bits, and the trace is a difference of norms
    assert (noise["grad_sq"], noise["trace"]) == pytest.approx((exact["grad_sq"], exact["trace"]), rel=0.03)


# over a training


def on_the_way(place, workload, flags):
    return train(place, workload, flags)


def test_workers_and_micro_batches_agree_over_a_training(gloo):
    flags = {**FLAGS, "batch.global_size": 128, "stop.after": "250 steps", "optimizer.learning_rate": 0.02}
    workload = Classify(num_rows=4000)
    by_workers = gloo.run(2, on_the_way, workload, flags)[0].summary.noise
    by_micro = gloo.run(1, on_the_way, workload, {**flags, "batch.micro_size": 16})[0].summary.noise
    assert (by_workers["way"], by_micro["way"]) == ("workers", "first micro-batch")
    # the same training measured twice: intervals of 95 % that do not touch would be a rare event
    assert by_workers["low"] <= by_micro["high"] and by_micro["low"] <= by_workers["high"]
    assert by_workers["trace"] == pytest.approx(by_micro["trace"], rel=0.1)
    assert by_workers["scale"] == pytest.approx(by_micro["scale"], rel=0.25)


def test_records_have_the_averages_from_the_first_measurement_on():
    flags = {**FLAGS, "batch.micro_size": 4, "noise_scale.every_steps": 3, "stop.after": "7 steps"}
    run = train_alone(Classify(num_rows=60), flags)
    named = [sorted(key for key in step.more if "noise" in key) for step in run.steps]
    assert named[:2] == [[], []] and all(
        {"train/noise_grad_sq", "train/noise_trace"} <= set(names) for names in named[2:]
    )
    assert run.steps[2].more == run.steps[4].more != run.steps[6].more
    assert any("from the first micro-batch" in text for text in run.events)
    noise = run.summary.noise
    assert [samples for samples, _ in noise["curve"]] == [24, 60]
    assert noise["small_batch_size"] == 4 and noise["batch_size"] == 12
    json.dumps(noise["curve"])


def test_a_run_that_cannot_measure_says_why():
    run = train_alone(Classify(num_rows=60), {**FLAGS, "noise_scale.measure": "auto"})
    assert not run.summary.noise
    assert any("not measured (one worker; no accumulation)" in text for text in run.events)


class PoisonedAt(Classify):
    """A loss of NaN for one batch."""

    def datasets(self):
        found = super().datasets()
        found[TRAIN]["bad"] = np.arange(self.num_rows) == 40
        return found

    def loss(self, model, batch):
        total, count = super().loss(model, batch)
        return total * torch.where(batch["bad"].any(), math.nan, 1.0), count


def test_a_step_that_is_not_finite_is_left_out_on_all_workers(gloo):
    flags = {**FLAGS, "on_nonfinite": "skip", "stop.after": "1 epoch"}
    outcomes = gloo.run(2, on_the_way, PoisonedAt(num_rows=60), flags)
    for outcome in outcomes:
        assert outcome.summary.noise["num_rejected"] == 1 and outcome.summary.noise["num_measurements"] == 4
        assert math.isfinite(outcome.summary.noise["trace"])


class TiedTwice(Classify):
    """A layer that is used twice, and one that is not used at all."""

    def build_model(self):
        return _Twice()


class _Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.same, self.head, self.idle = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(2, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.same(torch.tanh(self.same(x)))))


def test_layers_that_are_used_twice_or_not_at_all_are_measured(gloo):
    flags = {"strategy.find_unused_parameters": True}
    run = gloo.run(2, on_the_way, TiedTwice(num_rows=60), {**FLAGS, **flags})[0]
    alone = gloo.run(1, on_the_way, TiedTwice(num_rows=60), {**FLAGS, "batch.micro_size": 6})[0]
    # the first worker's rows are the first micro-batch; the sum over both parts differs from one of them
    assert run.summary.noise["num_measurements"] == alone.summary.noise["num_measurements"] == 6
    assert run.losses == pytest.approx(alone.losses)


# checkpoints


@pytest.mark.parametrize(
    ("world_size", "flags"), [(1, {"batch.micro_size": 4}), (2, {}), (2, {"strategy.name": "fsdp"})]
)
def test_averages_go_on_to_the_bit_after_an_interruption(gloo, tmp_path, world_size, flags):
    flags = {**FLAGS, "checkpoint.every": "3 steps", "stop.after": "14 steps", "noise_scale.every_steps": 2, **flags}
    whole, resumed = gloo.run(world_size, interrupted, flags, str(tmp_path))[0]
    assert resumed.summary.noise == whole.summary.noise
    # an epoch's last batch has one row, which has no parts
    assert resumed.summary.noise["num_measurements"] == 5 and resumed.summary.noise["num_rejected"] == 2
    assert [s.more for s in resumed.steps] == [s.more for s in whole.steps[6:]]


def interrupted(place, flags, folder):
    workload = Classify(num_rows=61)
    whole = train(place, workload, flags)
    train(place, workload, flags, folder=folder, kill_at=8)
    return whole, train(place, workload, flags, folder=folder)


def test_biased_averages_are_thrown_away_when_workers_come(gloo, tmp_path):
    flags = {**FLAGS, "checkpoint.every": "3 steps", "stop.after": "9 steps"}
    gloo.run(1, killed, flags, str(tmp_path))
    resumed = gloo.run(2, on_the_way_from, flags, str(tmp_path))[0]
    noise = resumed.summary.noise
    assert noise["way"] == "workers" and not noise["is_biased"]
    assert noise["num_measurements"] == 3, "only those after the change"


def killed(place, flags, folder):
    return train(place, Classify(num_rows=61), flags, folder=folder, kill_at=8)


def on_the_way_from(place, flags, folder):
    return train(place, Classify(num_rows=61), flags, folder=folder)


def test_events_name_the_source_once():
    run = train_alone(Classify(num_rows=60), FLAGS)
    texts = [m.text for m in run.messages if isinstance(m, EventRecord) and m.text.startswith("noise scale")]
    assert len(texts) == 1 and "consecutive steps" in texts[0] and RankContext().world_size == 1
