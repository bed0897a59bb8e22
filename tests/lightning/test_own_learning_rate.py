"""The learning rate of a module's own optimizer needs not be said twice; without one, somebody must say it."""

import pytest
from lit_modules import FLAGS, Data, Plain, with_scaleray
from small_runs import Classify, make_job, train_alone
from test_same_as_lightning import EveryStep

from scaleray.config import load_config
from scaleray.errors import ConfigError
from scaleray.launch.run import train as run
from scaleray.lightning import as_workload
from scaleray.records.run import DerivedRecord

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


def test_another_rate_in_the_config_is_ignored_with_both_values_said():
    finished = with_scaleray(as_workload(Plain, Data)(), {"optimizer.learning_rate": 0.5})
    (said,) = [event for event in finished.events if "learning_rate" in event]
    assert "0.05" in said and "0.5" in said
    assert derived(finished) == OWN_RATE


def test_a_rule_without_a_rate_to_start_from_is_refused():
    with pytest.raises(ConfigError, match="the rule sqrt starts from it"):
        make_job(as_workload(Plain, Data)(), {**FLAGS, "optimizer.rule": "sqrt", "optimizer.reference_batch_size": 4})


class AsksForIt(Classify):
    def optimizer(self, model, settings):
        import torch

        return torch.optim.SGD(model.parameters(), lr=settings.learning_rate)


def test_a_workload_whose_optimizer_asks_for_the_rate_is_told_that_it_is_missing():
    with pytest.raises(ConfigError, match="asks for it"):
        train_alone(AsksForIt(), FLAGS)


def test_without_an_optimizer_of_the_workloads_own_the_rate_is_required_before_anything_starts(tmp_path):
    config = load_config(flags={**FLAGS, "checkpoint.storage_path": str(tmp_path)}, environ={})
    with pytest.raises(ConfigError, match="brings no optimizer of its own") as caught:
        run.train(config, Classify(), local=True)
    assert caught.value.key == "optimizer.learning_rate" and not list(tmp_path.iterdir())
