"""A workload's own learning-rate schedule: stepped once a step, kept in checkpoints, and what it ignores is said."""

import pytest
import torch
from small_runs import Classify, largest_difference, make_job, same_generators, train, train_alone
from torch.optim import lr_scheduler as schedulers

from scaleray.errors import ConfigError, WorkloadError
from scaleray.records.run_record import DerivedRecord
from scaleray.training.setup.model_setup import prepare
from scaleray.training.setup.rank_context import RankContext

FLAGS = {
    "stop.after": "14 steps", "optimizer.name": "adamw", "optimizer.learning_rate": 1e-2, "checkpoint.every": "3 steps",
    "precision.dtype": "fp32", "deterministic": True,
}  # fmt: skip


class Scheduled(Classify):
    """make: name of a function of this module that makes the schedule, so that it can be pickled."""

    def __init__(self, make, **args):
        super().__init__(**args)
        self.make = make

    def schedule(self, optimizer, recipe):
        return globals()[self.make](optimizer, recipe)


def one_cycle(optimizer, recipe):
    return schedulers.OneCycleLR(optimizer, max_lr=0.05, total_steps=recipe.total_steps)


def warm_restarts(optimizer, recipe):
    warm = schedulers.LinearLR(optimizer, 0.1, total_iters=recipe.warmup_steps or 4)
    rest = schedulers.CosineAnnealingWarmRestarts(optimizer, T_0=4)
    return schedulers.SequentialLR(optimizer, [warm, rest], milestones=[recipe.warmup_steps or 4])


def in_steps(optimizer, recipe):  # each rate follows from the one before, and its milestones are a Counter
    return schedulers.ChainedScheduler(
        [schedulers.MultiStepLR(optimizer, [5, 5, 11], 0.5), schedulers.ExponentialLR(optimizer, 0.97)]
    )


def nothing(optimizer, recipe):
    return None


def test_rates_are_those_that_torch_gives_step_by_step():
    finished = train_alone(Scheduled("one_cycle"), FLAGS)
    oracle = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=1e-2)
    schedule = schedulers.OneCycleLR(oracle, max_lr=0.05, total_steps=14)
    for step in finished.steps:
        assert step.learning_rate == oracle.param_groups[0]["lr"]
        oracle.step()
        schedule.step()


@pytest.mark.parametrize("make", ["one_cycle", "warm_restarts", "in_steps"])
@pytest.mark.parametrize("kill_at", [4, 13])
def test_a_resumed_run_is_bit_identical(tmp_path, make, kill_at):
    whole = train_alone(Scheduled(make), FLAGS)
    train_alone(Scheduled(make), FLAGS, folder=tmp_path, kill_at=kill_at)
    resumed = train_alone(Scheduled(make), FLAGS, folder=tmp_path)
    first = kill_at // 3 * 3
    assert [s.learning_rate for s in resumed.steps] == [s.learning_rate for s in whole.steps[first:]]
    assert resumed.losses == whole.losses[first:]
    assert all(torch.equal(resumed.weights[name], value) for name, value in whole.weights.items())


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "tensor"])
def test_two_workers_train_as_one_does(gloo, strategy):
    flags = {**FLAGS, "precision.dtype": "fp64", "deterministic": False}
    alone = train_alone(Scheduled("warm_restarts"), flags)
    sized = {"parallel.tensor": 2} if strategy == "tensor" else {}
    both = gloo.run(2, train, Scheduled("warm_restarts"), {**flags, "strategy.name": strategy, **sized})[0]
    assert [s.learning_rate for s in both.steps] == [s.learning_rate for s in alone.steps]
    assert largest_difference(alone.weights, both.weights) < 1e-11


def test_a_schedule_goes_on_at_its_place_after_a_change_of_the_batch(tmp_path):
    train_alone(Scheduled("in_steps"), FLAGS, folder=tmp_path, kill_at=7)
    resumed = train_alone(Scheduled("in_steps"), {**FLAGS, "batch.global_size": 4}, folder=tmp_path)
    # an epoch has 7 steps of 4 rows, and of the second one 10 rows are left, which are 3 of them
    position = 7 + 7 - 3
    oracle = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=1e-2)
    schedule = in_steps(oracle, None)
    for _ in range(position):
        oracle.step()
        schedule.step()
    assert resumed.steps[0].learning_rate == oracle.param_groups[0]["lr"]


def look(make, flags=None, varied=()):
    with same_generators():
        job, _ = make_job(Scheduled(make), {**FLAGS, **(flags or {})})
        setup = prepare(job.workload, job.config, job.recipe, RankContext(), varied=varied)
    torch.use_deterministic_algorithms(False)
    return setup.in_use.warnings, setup.in_use.values


def test_a_rate_that_is_not_the_derived_one_is_said_and_recorded():
    finished = train_alone(Scheduled("one_cycle"), FLAGS)
    (said,) = [event for event in finished.events if "schedule()" in event]
    assert "ignores optimizer.learning_rate" in said and "0.0495388, not 0.01" in said
    (derived,) = [m for m in finished.messages if isinstance(m, DerivedRecord)]
    assert derived.values["learning_rate"] == max(s.learning_rate for s in finished.steps)


def test_a_schedule_that_follows_the_optimizers_rate_is_none_of_our_business():
    assert look("warm_restarts") == ([], {})
    flags = {"optimizer.rule": "sqrt", "optimizer.reference_batch_size": 2, "schedule.warmup": "4 steps"}
    assert look("warm_restarts", flags, varied=("optimizer.learning_rate", "schedule.warmup")) == ([], {})


def test_what_it_ignores_of_the_section_schedule_is_said():
    flags = {"schedule.warmup": "4 steps", "schedule.name": "cosine", "schedule.final_ratio": 0.1}
    warnings, _ = look("in_steps", flags)
    assert [w.split("schedule.")[1].split()[0].rstrip(":") for w in warnings] == ["name", "final_ratio", "warmup"]
    assert look("nothing", flags) == ([], {})  # the configured one


def test_a_rule_or_a_swept_value_that_would_change_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"optimizer\.rule is linear.*largest rate is 0\.0495388, not 0\.02"):
        look("one_cycle", {"optimizer.rule": "linear", "optimizer.reference_batch_size": 4})
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate.*0\.0495388 in every trial"):
        look("one_cycle", varied=("optimizer.learning_rate",))
    with pytest.raises(ConfigError, match=r"schedule\.warmup.*in every trial"):
        look("one_cycle", varied=("schedule.warmup",))


def a_number(optimizer, recipe):
    return 0.1


def broken(optimizer, recipe):
    return recipe.no_such_value


@pytest.mark.parametrize(
    ("make", "text"),
    [("a_number", "float.*LRScheduler or None"), ("broken", r"(?s)schedule\(\).*test_own_schedule\.py.*no_such_value")],
)
def test_what_is_no_schedule_over_steps_is_one_clear_error(make, text):
    with pytest.raises(WorkloadError, match=text):
        train_alone(Scheduled(make), FLAGS)
    torch.use_deterministic_algorithms(False)
