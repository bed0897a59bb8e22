"""Local SGD and DiLoCo: where they must equal DDP or each other, what they do between averagings, and what they save."""

import pytest
import torch
from small_runs import (
    Classify,
    Stepper,
    Tokens,
    WithBatchNorm,
    largest_difference,
    make_job,
    relative_differences,
    train,
    train_in_plain_torch,
)
from waiting import wait_until

from scaleray.common.metric_names import CONSENSUS_DISTANCE
from scaleray.errors import ConfigError, NonFiniteLossError
from scaleray.strategies.contract.parallel import known
from scaleray.training.health.live_memory import LiveTensors

LOCAL = {"strategy.name": "local_sgd", "local_sgd.sync_every": 4, "batch.drop_last": True}
DILOCO = {**LOCAL, "strategy.name": "diloco"}


def assert_same_training(finished, losses, weights, *, within=1e-9):
    assert len(finished.losses) == len(losses)
    assert max(relative_differences(losses, finished.losses)) <= within
    assert largest_difference(weights, finished.weights) <= within


# where it must equal something else


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    "more", [{"optimizer.momentum": 0.0}, {"batch.micro_size": 1}, {"optimizer.weight_decay": 0.05}], ids=str
)
def test_local_sgd_with_sync_every_1_is_ddp(gloo, more, world_size):
    flags = {**LOCAL, "local_sgd.sync_every": 1, **more}
    finished = gloo.run(world_size, train, Classify(), flags)[0]
    plain = train_in_plain_torch(Classify(), flags)
    assert_same_training(finished, plain.losses, plain.weights)


@pytest.mark.parametrize("strategy", ["local_sgd", "diloco"])
@pytest.mark.parametrize("workload", [Classify, Tokens])
def test_a_warm_up_of_the_whole_length_is_ddp_whatever_the_counts(gloo, workload, strategy):
    flags = {
        "strategy.name": strategy,
        "local_sgd.warmup_steps": 100,
        "optimizer.clip_norm": 0.3,
        "batch.micro_size": 1,
    }
    finished = gloo.run(2, train, workload(), flags)[0]
    plain = train_in_plain_torch(workload(), flags)
    assert_same_training(finished, plain.losses, plain.weights)
    assert max(relative_differences(plain.grad_norms, finished.grad_norms)) <= 1e-9


def test_after_the_warm_up_the_loss_of_the_first_local_step_is_still_that_of_ddp(gloo):
    flags = {**LOCAL, "local_sgd.warmup_steps": 2, "local_sgd.sync_every": 1, "stop.after": "6 steps"}
    finished = gloo.run(2, train, Classify(), flags)[0]
    plain = train_in_plain_torch(Classify(), flags)
    assert_same_training(finished, plain.losses, plain.weights)


@pytest.mark.parametrize("world_size", [2, 4])
def test_diloco_with_rate_1_and_no_momentum_is_local_sgd_without_average_momentum(gloo, world_size):
    flags = {"stop.after": "12 steps", "optimizer.name": "adamw", "optimizer.learning_rate": 0.01}
    local = gloo.run(world_size, train, Classify(), {**LOCAL, **flags, "local_sgd.average_momentum": False})[0]
    outer = {"local_sgd.outer_learning_rate": 1.0, "local_sgd.outer_momentum": 0.0}
    diloco = gloo.run(world_size, train, Classify(), {**DILOCO, **flags, **outer})[0]
    assert_same_training(diloco, local.losses, local.weights, within=1e-12)
    other = gloo.run(world_size, train, Classify(), {**DILOCO, **flags})[0]
    assert largest_difference(other.weights, local.weights) > 1e-3  # else the settings did nothing


def local_training(model, rows_of_rank, job, source, optimizer):
    """Plain torch: the local steps of one replica on given rows."""
    for rows in rows_of_rank:
        batch = {n: torch.from_numpy(v) for n, v in source.read(rows).items()}
        total, count = job.workload.loss(model, {**batch, "x": batch["x"].double()})
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()


def diloco_in_plain_torch(workload, flags, *, world_size, every, rounds):
    """Replicas one after the other, and torch's own SGD with Nesterov momentum as the outer optimizer."""
    job, sources = make_job(workload, {**flags, "strategy.name": "single"})
    plan = job.train_plan()
    torch.manual_seed(0)
    start = train_in_plain_torch(
        workload, {**flags, "strategy.name": "single", "optimizer.learning_rate": 1e-300}
    ).weights
    anchor = workload.build_model().double()
    anchor.load_state_dict(start)
    outer = torch.optim.SGD(anchor.parameters(), 0.7, momentum=0.9, nesterov=True)
    replicas = [workload.build_model().double() for _ in range(world_size)]
    inner = [torch.optim.AdamW(r.parameters(), 0.01, weight_decay=0.0) for r in replicas]
    for number in range(rounds):
        moved = [torch.zeros_like(p) for p in anchor.parameters()]
        for rank, (replica, optimizer) in enumerate(zip(replicas, inner, strict=True)):
            replica.load_state_dict(anchor.state_dict())
            steps = range(number * every, (number + 1) * every)
            rows = [plan.rank_indices(step, rank, world_size) for step in steps]
            local_training(replica, rows, job, sources["train"], optimizer)
            for total, before, after in zip(moved, anchor.parameters(), replica.parameters(), strict=True):
                total += (before - after).detach() / world_size
        for parameter, gradient in zip(anchor.parameters(), moved, strict=True):
            parameter.grad = gradient
        outer.step()
    return anchor.state_dict()


def test_diloco_is_what_torchs_own_optimizers_make_of_it(gloo):
    flags = {**DILOCO, "stop.after": "12 steps", "optimizer.name": "adamw", "optimizer.learning_rate": 0.01}
    finished = gloo.run(2, train, Classify(), flags)[0]
    expected = diloco_in_plain_torch(Classify(), flags, world_size=2, every=4, rounds=3)
    assert largest_difference(expected, finished.weights) <= 1e-9


# between averagings


def weights_after_each_step(place, flags, num_steps):
    stepper = Stepper(place, Classify(), flags)
    found = []
    for number in range(1, num_steps + 1):
        result = stepper(number)
        found.append((stepper.weights, known(stepper.parallel.metrics()), result))
    sent = stepper.parallel.bytes_sent()
    stepper.parallel.close()
    return found, sent, sum(p.numel() * p.element_size() for p in stepper.parallel.module.parameters())


def spread(everyone, step, ranks):
    """Largest difference of the parameters of some ranks after a step."""
    first = everyone[ranks[0]][0][step - 1][0]
    return max(largest_difference(first, everyone[rank][0][step - 1][0]) for rank in ranks[1:])


def test_replicas_part_after_the_warm_up_and_agree_after_each_averaging(gloo):
    flags = {**LOCAL, "local_sgd.warmup_steps": 2, "local_sgd.sync_every": 3, "stop.after": "9 steps"}
    everyone = gloo.run(2, weights_after_each_step, flags, 9)
    agree = [step for step in range(1, 10) if spread(everyone, step, [0, 1]) == 0]
    assert agree == [1, 2, 5, 8]
    results = [found[2] for found in everyone[0][0]]
    assert [r.is_own for r in results] == [False, False, True, True, False, True, True, False, True]
    _, sent, model_bytes = everyone[0]
    assert sent == model_bytes * (2 + 2 * 2)  # each step of the warm-up, and each averaging with the momentum


def test_the_consensus_distance_is_measured_where_replicas_meet(gloo):
    flags = {**LOCAL, "local_sgd.sync_every": 3, "stop.after": "6 steps", "local_sgd.average_momentum": False}
    everyone = gloo.run(2, weights_after_each_step, flags, 6)
    assert [CONSENSUS_DISTANCE.name in found[1] for found in everyone[0][0]] == [False, False, True, True, True, True]
    reported = {rank: everyone[rank][0][2][1][CONSENSUS_DISTANCE.name] for rank in (0, 1)}
    assert reported[0] == reported[1]

    # the third step of a run that does not average then is where the replicas were
    apart = gloo.run(2, weights_after_each_step, {**flags, "local_sgd.sync_every": 4}, 3)
    flat = torch.stack([torch.cat([v.flatten() for v in apart[rank][0][2][0].values()]) for rank in (0, 1)])
    mean = flat.mean(dim=0)
    expected = ((flat - mean).square().sum(dim=1).mean().sqrt() / mean.norm()).item()
    assert reported[0] == pytest.approx(expected, rel=1e-9)


def test_nodes_average_often_and_all_workers_rarely(gloo):
    flags = {
        **LOCAL,
        "local_sgd.sync_every": 4,
        "local_sgd.node_sync_every": 2,
        "local_sgd.node_size": 2,
        "stop.after": "9 steps",
    }
    everyone = gloo.run(4, weights_after_each_step, flags, 9)
    within = {
        step for step in range(1, 10) if spread(everyone, step, [0, 1]) == 0 and spread(everyone, step, [2, 3]) == 0
    }
    between = {step for step in range(1, 10) if spread(everyone, step, [0, 1, 2, 3]) == 0}
    assert within == {2, 4, 6, 8} and between == {4, 8}


def test_workers_on_one_machine_are_one_node(gloo):
    flags = {**LOCAL, "local_sgd.sync_every": 4, "local_sgd.node_sync_every": 2, "stop.after": "4 steps"}
    everyone = gloo.run(2, weights_after_each_step, flags, 4)
    assert [spread(everyone, step, [0, 1]) == 0 for step in (1, 2, 3, 4)] == [False, True, False, True]


def momentum_after(place, flags, num_steps):
    stepper = Stepper(place, Classify(), flags)
    for number in range(1, num_steps + 1):
        stepper(number)
    state = stepper.setup.optimizer.state
    found = [entry["exp_avg"].clone() for entry in state.values()]
    stepper.parallel.close()
    return found


@pytest.mark.parametrize("averages", [True, False])
def test_the_optimizers_state_is_averaged_if_asked(gloo, averages):
    flags = {**LOCAL, "optimizer.name": "adamw", "local_sgd.average_momentum": averages}
    first, second = gloo.run(2, momentum_after, flags, 4)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)) == averages


def test_clipping_uses_each_workers_own_norm(gloo):
    flags = {**LOCAL, "optimizer.clip_norm": 0.1}
    everyone = gloo.run(2, weights_after_each_step, flags, 1)
    first, second = (found[0][0][2].grad_norm for found in everyone)
    assert first != second and min(first, second) > 0.1


class Frozen(WithBatchNorm):
    def build_model(self):
        model = super().build_model()
        model[0].requires_grad_(False)
        return model


def frozen_and_buffers(place, flags):
    stepper = Stepper(place, Frozen(), flags)
    before = {n: v.clone() for n, v in stepper.parallel.module.state_dict().items()}
    for number in range(1, 4):
        stepper(number)
    apart = {n: v.clone() for n, v in stepper.parallel.module.state_dict().items()}
    with stepper.parallel.averaged(True):
        mean = {n: v.clone() for n, v in stepper.parallel.module.state_dict().items()}
    again = {n: v.clone() for n, v in stepper.parallel.module.state_dict().items()}
    sent = stepper.parallel.bytes_sent()
    stepper.parallel.close()
    return before, apart, mean, again, sent


def test_the_mean_has_buffers_too_and_leaves_the_replica_to_the_bit(gloo):
    everyone = gloo.run(2, frozen_and_buffers, LOCAL)
    (before, apart, mean, again, _), (_, other, _, _, _) = everyone
    assert torch.equal(mean["0.weight"], before["0.weight"])
    assert all(torch.equal(apart[name], again[name]) for name in apart)
    for name in ("1.running_mean", "3.weight"):
        assert not torch.equal(apart[name], other[name])
        assert torch.allclose(mean[name], (apart[name] + other[name]) / 2, rtol=1e-12)
    assert mean["1.num_batches_tracked"] == 3


# losses that are not finite


class BadOnRank1(Classify):
    """The loss of some steps is NaN on one worker, which knows itself by its rank."""

    def __init__(self, bad=(3,), **sizes):
        super().__init__(**sizes)
        self.bad, self.calls = bad, 0

    def loss(self, model, batch):
        total, count = super().loss(model, batch)
        if torch.is_grad_enabled() and model.training:
            self.calls += 1
            if torch.distributed.get_rank() == 1 and self.calls in self.bad:
                total = self.spoil(total)
        return total, count

    def spoil(self, total):
        return total * float("nan")


class BadGradientOnRank1(BadOnRank1):
    """The loss is finite, which the look at the first batch asks for, and its gradient is not."""

    def spoil(self, total):
        total.register_hook(lambda gradient: gradient * float("nan"))
        return total


def train_or_error(place, workload, flags):
    try:
        return train(place, workload, flags)
    except NonFiniteLossError as exc:
        return str(exc)


@pytest.mark.parametrize("bad", [3, 4])  # between two meetings, and in one
def test_one_workers_bad_loss_is_raised_on_all_where_they_meet(gloo, bad):
    texts = gloo.run(2, train_or_error, BadOnRank1((bad,), num_rows=32), {**LOCAL, "stop.after": "12 steps"})
    assert all("step 4" in text or "up to step 4" in text for text in texts)


def test_one_workers_bad_loss_is_skipped_by_it_alone(gloo):
    flags = {**LOCAL, "stop.after": "12 steps", "on_nonfinite": "skip"}
    first, second = gloo.run(2, train_or_error, BadOnRank1((2, 3, 7), num_rows=32), flags)
    assert len(first.steps) == 12 and first.summary.nonfinite_steps == second.summary.nonfinite_steps == 3
    assert all(value.isfinite().all() for value in first.weights.values())
    whole = gloo.run(2, train, Classify(num_rows=32), flags)[0]
    assert first.losses[3] != whole.losses[3] and first.losses[:3] == whole.losses[:3]


def test_one_workers_bad_loss_stops_all_where_they_meet(gloo):
    flags = {**LOCAL, "stop.after": "12 steps", "on_nonfinite": "stop"}
    first, second = gloo.run(2, train_or_error, BadOnRank1((6,), num_rows=32), flags)
    assert first.summary.verdict == second.summary.verdict
    assert first.summary.verdict.startswith("stopped") and first.summary.steps == 8


def test_a_worker_that_skips_without_end_is_given_up_on_all(gloo):
    flags = {**LOCAL, "stop.after": "20 steps", "on_nonfinite": "skip"}
    texts = gloo.run(2, train_or_error, BadOnRank1(range(3, 30), num_rows=32), flags)
    assert all("10 steps in a row up to step 12" in text for text in texts)


def test_a_worker_without_optimizer_state_yet_takes_part(gloo):
    flags = {
        **LOCAL,
        "local_sgd.sync_every": 2,
        "on_nonfinite": "skip",
        "optimizer.momentum": 0.9,
        "stop.after": "6 steps",
    }
    first, _ = gloo.run(2, train_or_error, BadGradientOnRank1((1, 2), num_rows=32), flags)
    assert len(first.steps) == 6 and all(value.isfinite().all() for value in first.weights.values())


# what is refused


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"precision.dtype": "fp16"}, "loss scale"),
        ({"scale.workers": {"min": 1, "max": 4}}, "changes the training"),
        ({"compression.name": "bf16"}, "ddp"),
        ({"local_sgd.node_sync_every": 3}, "divisor"),
        ({"local_sgd.node_sync_every": 4}, "divisor"),
        ({"local_sgd.node_size": 2}, "node_sync_every"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(more, says):
    with pytest.raises(ConfigError, match=says):
        make_job(Classify(), {**LOCAL, "scale.workers": 4, **more})


def test_settings_of_the_other_strategy_are_reported(gloo):
    flags = {**LOCAL, "local_sgd.outer_momentum": 0.5, "stop.after": "2 steps"}
    events = gloo.run(2, train, Classify(), flags)[0].events
    assert "local_sgd.outer_momentum has no effect with strategy local_sgd" in events


def bytes_kept(place):
    """(bytes of parameters and buffers, what a mean of them keeps, what one with the optimizer's state keeps)."""
    flags = {"strategy.name": "local_sgd", "optimizer.name": "adamw", "optimizer.learning_rate": 0.01}
    stepper = Stepper(place, Classify(), flags)
    stepper(1)
    own = sum(t.numel() * t.element_size() for t in stepper.setup.parallel.module.state_dict().values())
    kept = []
    for with_optimizer, copies in ((False, 1), (True, 3)):  # Adam's two averages
        with LiveTensors() as live, stepper.parallel.averaged(with_optimizer):
            wait_until(lambda live=live, most=(copies + 0.5) * own: live.bytes < most)  # gloo's thread lets go late
            kept.append(live.bytes)
    stepper.setup.close()
    return own, *kept


def test_an_evaluation_of_the_mean_keeps_no_copy_of_the_optimizers_state(gloo):
    for own, without, with_optimizer in gloo.run(2, bytes_kept):
        assert without < 1.5 * own
        assert with_optimizer >= without + 2 * own
