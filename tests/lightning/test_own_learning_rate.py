"""The learning rate of a module's own optimizer needs not be said twice; without one, somebody must say it."""

import dataclasses

import pytest
import torch
from lit_modules import FLAGS, Data, Plain, with_scaleray
from small_runs import Classify, make_job, same_generators, train_alone, train_job
from test_same_as_lightning import EveryStep

from scaleray.config import load_config
from scaleray.errors import ConfigError
from scaleray.launch.run import train as run
from scaleray.lightning import as_workload
from scaleray.records.run_record import DerivedRecord
from scaleray.training.setup.rank_context import RankContext

OWN_RATE = 0.05


def derived(finished):
    (found,) = [m for m in finished.messages if isinstance(m, DerivedRecord)]
    return found.values["learning_rate"]


def test_the_rate_of_the_module_trains_and_is_the_one_recorded():
    finished = with_scaleray(as_workload(Plain, Data)())
    assert derived(finished) == OWN_RATE == finished.steps[0].learning_rate
    assert not [event for event in finished.events if "learning_rate" in event]


def test_the_recorded_rate_of_a_schedule_is_its_largest():
    finished = with_scaleray(as_workload(EveryStep, Data)())
    assert (
        derived(finished)
        == pytest.approx(max(step.learning_rate for step in finished.steps))
        == pytest.approx(0.2, rel=0.1)
    )


class Fixed(Plain):
    """Takes no rate."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=OWN_RATE)


class ByAttribute(Plain):
    def __init__(self, learning_rate=0.05):
        super().__init__()
        self.learning_rate = learning_rate
        del self.hparams["lr"]

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.learning_rate)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


RATE = "optimizer.learning_rate"


@pytest.mark.parametrize("module", [Plain, ByAttribute])
def test_a_rate_in_the_config_becomes_the_modules_hyperparameter(module):
    finished = with_scaleray(as_workload(module, Data)(), {RATE: 0.02})
    assert derived(finished) == 0.02 == finished.steps[0].learning_rate
    assert not [event for event in finished.events if "learning_rate" in event]


def in_sweep(module, rate, **args):
    """One trial of a sweep over learning rates."""
    job, sources = make_job(as_workload(module, Data)(**args), {**FLAGS, RATE: rate})
    with same_generators():
        return train_job(RankContext(), dataclasses.replace(job, varied=(RATE,)), sources)


@pytest.mark.parametrize("module", [Plain, ByAttribute])
def test_a_sweep_over_rates_moves_the_modules(module):
    few, many = in_sweep(module, 0.01), in_sweep(module, 0.05)
    assert (few.steps[0].learning_rate, many.steps[0].learning_rate) == (0.01, 0.05)
    assert few.losses[-1] != many.losses[-1]


def test_a_sweep_over_rates_that_a_module_would_not_take_is_refused_with_what_to_do():
    with pytest.raises(ConfigError, match=r"(?s)ignores it.*a hyperparameter lr or learning_rate"):
        in_sweep(Fixed, 0.01)
    with pytest.raises(ConfigError, match=r"(?s)ignores it.*which workload\.args leaves out"):
        in_sweep(Plain, 0.01, lr=0.03)


def test_a_rule_scales_the_modules_rate():
    flags = {RATE: 0.04, "optimizer.rule": "linear", "optimizer.reference_batch_size": 4}
    assert with_scaleray(as_workload(Plain, Data)(), flags).steps[0].learning_rate == pytest.approx(0.08)


def test_a_rate_in_the_config_that_a_module_would_not_take_is_ignored_with_both_values_said():
    finished = with_scaleray(as_workload(Fixed, Data)(), {RATE: 0.5})
    (said,) = [event for event in finished.events if "learning_rate" in event]
    assert "0.05" in said and "0.5" in said
    assert derived(finished) == OWN_RATE


def test_a_rule_without_a_rate_to_start_from_is_refused():
    with pytest.raises(ConfigError, match="the rule sqrt starts from it"):
        make_job(as_workload(Plain, Data)(), {**FLAGS, "optimizer.rule": "sqrt", "optimizer.reference_batch_size": 4})


class AsksForIt(Classify):
    def optimizer(self, model, settings):
        return torch.optim.SGD(model.parameters(), lr=settings.learning_rate)


def test_a_workload_whose_optimizer_asks_for_the_rate_is_told_that_it_is_missing():
    with pytest.raises(ConfigError, match="reads it"):
        train_alone(AsksForIt(), FLAGS)


def test_without_an_optimizer_of_the_workloads_own_the_rate_is_required_before_anything_starts(tmp_path):
    config = load_config(flags={**FLAGS, "checkpoint.storage_path": str(tmp_path)}, environ={})
    with pytest.raises(ConfigError, match=r"has no optimizer\(\) of its own") as caught:
        run.train(config, Classify(), local=True)
    assert caught.value.key == "optimizer.learning_rate" and not list(tmp_path.iterdir())
