"""Learning rates that follow evaluations: those of torch's ReduceLROnPlateau, on any number of workers, through resumes."""

from functools import partial

import pytest
import torch
from small_runs import Classify, largest_difference, make_job, train, train_alone
from torch.optim import lr_scheduler as schedulers
from verified import judge

from scaleray.errors import ConfigError, WorkloadError

FLAGS = {
    "stop.after": "20 steps", "evaluation.every": "2 steps", "checkpoint.every": "3 steps", "precision.dtype": "fp64",
    "deterministic": True,
}  # fmt: skip
PLATEAU = {
    "schedule.name": "plateau", "schedule.factor": 0.25, "schedule.patience": 1, "schedule.threshold": 0.3,
    "schedule.cooldown": 1, "schedule.final_ratio": 0.1, "schedule.warmup": "3 steps",
}  # fmt: skip
TORCHS = {"factor": 0.25, "patience": 1, "threshold": 0.3, "cooldown": 1}


class Own(Classify):
    """A ReduceLROnPlateau of its own."""

    def __init__(self, **settings):
        super().__init__(num_val=10)
        self.settings = {**TORCHS, **settings}

    def schedule(self, optimizer, recipe):
        return schedulers.ReduceLROnPlateau(optimizer, **self.settings)


class Two(Classify):
    """Two optimizers of one loss, of which one follows evaluations and the other the config."""

    def optimizer(self, model, settings):
        first, _, second = model
        return {name: torch.optim.SGD(part.parameters(), lr=0.1) for name, part in (("a", first), ("b", second))}

    def schedule(self, optimizer, recipe):
        return {"b": schedulers.ReduceLROnPlateau(optimizer["b"], **TORCHS)}


def rates(run):
    return [step.learning_rate for step in run.steps]


def facts_of(flags):
    """What a run's checkpoints hold of its config, by which a resume finds what has changed."""
    return {"config": make_job(Classify(num_val=10), flags)[0].config.to_dict()}


def due_rates(run, metric="val/loss", *, rate=0.1, every=2, **settings):
    """The rates that torch makes of what was evaluated."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=rate)
    plateau = schedulers.ReduceLROnPlateau(optimizer, **{**TORCHS, **settings})
    measured, found = iter(run.evaluations), []
    for step in range(1, len(run.steps) + 1):
        found.append(optimizer.param_groups[0]["lr"])
        if step % every == 0:
            plateau.step(next(measured).metrics[metric])
    return found


def test_a_schedule_of_the_workloads_own_is_stepped_with_every_evaluation():
    finished = train_alone(Own(), FLAGS)
    assert rates(finished) == due_rates(finished)
    assert len(set(rates(finished))) >= 3
    assert len([event for event in finished.events if "val/loss is on a plateau" in event]) >= 2


def test_the_configs_own_plateau_multiplies_the_rate_of_the_warm_up():
    finished = train_alone(Classify(num_val=10), {**FLAGS, **PLATEAU})
    factors = due_rates(finished, rate=1.0, min_lr=0.1, eps=0.0)
    warm = [min(1.0, (step + 1) / 3) for step in range(20)]
    assert rates(finished) == [0.1 * (w * f) for w, f in zip(warm, factors, strict=True)]
    assert rates(finished)[-1] == 0.1 * 0.1


def test_the_metric_is_the_one_that_evaluations_are_judged_by():
    flags = {**FLAGS, "checkpoint.best": "val/accuracy max"}
    finished = train_alone(Own(mode="max"), flags)
    assert rates(finished) == due_rates(finished, "val/accuracy", mode="max")
    watched = train_alone(Own(), {**flags, "schedule.watch": "val/loss min"})
    assert rates(watched) == due_rates(watched) != rates(finished)


def test_each_of_several_optimizers_follows_its_own():
    first, second = (train_alone(Two(num_val=10), {**FLAGS, **more}) for more in ({}, {"schedule.name": "cosine"}))
    assert set(rates(first)) == {0.1} and rates(second)[-1] < 0.01  # of the group `a`
    alone = train_alone(Own(), FLAGS)
    assert largest_difference(first.weights, alone.weights) > 1e-6


@pytest.mark.always("13-own", "5-config")
@pytest.mark.parametrize("workload", [Own(), Classify(num_val=10)], ids=["own", "config"])
@pytest.mark.parametrize("kill_at", [5, 13])
def test_a_resumed_run_is_bit_identical(tmp_path, workload, kill_at):
    flags = {**FLAGS, **({} if isinstance(workload, Own) else PLATEAU)}
    whole = train_alone(workload, flags)
    train_alone(workload, flags, folder=tmp_path, kill_at=kill_at)
    resumed = train_alone(workload, flags, folder=tmp_path)
    assert rates(resumed) == rates(whole)[kill_at // 3 * 3 :]
    assert all(torch.equal(resumed.weights[name], value) for name, value in whole.weights.items())


@pytest.mark.parametrize("workload", [Own(), Classify(num_val=10)], ids=["own", "config"])
def test_an_extended_run_is_the_one_that_was_as_long_from_the_start(tmp_path, workload):
    flags = {**FLAGS, **({} if isinstance(workload, Own) else PLATEAU)}
    whole = train_alone(workload, flags)
    short = {**flags, "stop.after": "9 steps"}  # its evaluation at the end is its own
    train_alone(workload, short, folder=tmp_path, facts=facts_of(short))
    resumed = train_alone(workload, flags, folder=tmp_path, facts=facts_of(flags))
    assert rates(resumed) == rates(whole)[9:]
    assert all(torch.equal(resumed.weights[name], value) for name, value in whole.weights.items())


@pytest.mark.parametrize("workload", [Own(), Classify(num_val=10)], ids=["own", "config"])
def test_another_learning_rate_is_reduced_as_the_one_before(tmp_path, workload):
    flags = {**FLAGS, **({} if isinstance(workload, Own) else {**PLATEAU, "schedule.warmup": "0 steps"})}
    before = train_alone(workload, flags, folder=tmp_path, kill_at=13, facts=facts_of(flags))
    flags = {**flags, "optimizer.learning_rate": 0.4}
    resumed = train_alone(workload, flags, folder=tmp_path, facts=facts_of(flags))
    assert rates(before)[12] < 0.1
    assert rates(resumed)[0] == pytest.approx(4 * rates(before)[12], rel=1e-12)


@pytest.mark.always("own-ddp", "config-fsdp")
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "local_sgd", "diloco"])
@pytest.mark.parametrize("kind", ["own", "config"])
def test_two_workers_take_the_same_decisions(gloo, strategy, kind):
    workload, more = (Own(), {}) if kind == "own" else (Classify(num_val=10), PLATEAU)
    flags = {**FLAGS, **more, "deterministic": False, "strategy.name": strategy}
    first, other = gloo.run(2, train, workload, {**flags, "batch.micro_size": 2})
    alone = train_alone(workload, {k: v for k, v in flags.items() if k != "strategy.name"})
    shape = {"rate": 1.0, "min_lr": 0.1, "eps": 0.0} if kind == "config" else {}
    due = due_rates(first, **shape)
    if kind == "config":
        due = [0.1 * (min(1.0, (step + 1) / 3) * f) for step, f in enumerate(due)]
    assert rates(first) == due and len(set(due)) >= 3 and other.steps == []
    if strategy in ("ddp", "zero1", "fsdp"):
        assert rates(first) == rates(alone)
        assert largest_difference(first.weights, alone.weights) < 1e-11


@pytest.mark.parametrize(
    ("workload", "flags", "text"),
    [
        (Own(), {"evaluation.every": None}, r"schedule\(\) returned .*ReduceLROnPlateau.*evaluation\.every is not set"),
        (Classify(num_val=9), {**PLATEAU, "evaluation.every": None}, r"evaluation\.every is needed"),
        (Classify(), PLATEAU, r"schedule\.watch is val/loss min.*no splits to evaluate"),
        (Own(), {"schedule.watch": "tset/loss min"}, r"schedule\.watch is tset/loss min.*val/loss"),
        (Own(), {"schedule.watch": "val/f1 min"}, r"schedule\.watch is 'val/f1'.*val/accuracy"),
        (Own(), {"schedule.watch": "val/accuracy max"}, r"mode='min'.*follows val/accuracy max"),
        (Classify(num_val=9), {**PLATEAU, "schedule.length": "9 steps"}, "a plateau schedule has no decay"),
        (Classify(num_val=9), {**PLATEAU, "schedule.factor": 1.5}, r"schedule\.factor"),
    ],
)
def test_what_cannot_be_followed_is_refused(workload, flags, text):
    with pytest.raises((ConfigError, WorkloadError), match=f"(?s){text}"):
        train_alone(workload, {**FLAGS, **flags})
    torch.use_deterministic_algorithms(False)


def test_settings_of_a_plateau_that_are_of_no_use_are_reported():
    finished = train_alone(Classify(num_val=9), {**FLAGS, "schedule.patience": 3})
    assert "schedule.patience has no effect without schedule.name plateau" in finished.events


@pytest.mark.combination
def test_verify_compares_a_rate_that_falls_among_its_steps(gloo):
    flags = {**PLATEAU, "schedule.patience": 0, "schedule.threshold": 0.9, "evaluation.every": "1 epoch"}
    outcome = gloo.run(2, partial(judge, resumes=True), Classify(num_val=10), flags)[0]
    assert outcome.verdict == "equal", outcome
    assert outcome.comparison.largest < 1e-9
