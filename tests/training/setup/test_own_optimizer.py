"""A workload's own optimizer beside the config: what it ignores is said with both values, what it makes of them is not."""

import json

import pytest
import torch
from small_runs import NUM_FEATURES, Classify, make_job, same_generators, train, train_alone

from scaleray.errors import ConfigError
from scaleray.launch.run import train as run
from scaleray.records.run_record import DerivedRecord, EventRecord
from scaleray.training.setup.model_setup import prepare
from scaleray.training.setup.own_optimizer import acts_on_elements
from scaleray.training.setup.rank_context import RankContext

SHORT = {"stop.after": "2 steps", "optimizer.learning_rate": 1e-3}


class Brings(Classify):
    """make: from the model and the settings."""

    def __init__(self, make):
        super().__init__()
        self.make, self.made = make, []

    def optimizer(self, model, settings):
        self.made.append(self.make(model, settings))
        return self.made[-1]


def fixed(model, settings):
    return torch.optim.AdamW(model.parameters(), lr=4e-5)


def layer_wise(factors):
    def make(model, settings):
        groups = [
            {"params": model[i].parameters(), "lr": settings.learning_rate * f}
            for i, f in zip((0, 2), factors, strict=True)
        ]
        return torch.optim.AdamW(groups)

    return make


def look(make, flags=None, varied=()):
    """What is said of an optimizer, what is in use, and the optimizer."""
    with same_generators():
        job, _ = make_job(Brings(make), {**SHORT, "optimizer.name": "adamw", **(flags or {})})
        setup = prepare(job.workload, job.config, job.recipe, RankContext(), varied=varied)
    assert setup.optimizer is job.workload.made[-1]  # what the workload keeps is what trains
    return setup.in_use.warnings, setup.in_use.values


def test_a_rate_that_is_not_the_derived_one_is_said_with_both_values_and_what_to_do():
    finished = train_alone(Brings(fixed), SHORT)
    (said,) = [event for event in finished.events if "learning_rate" in event]
    assert "4e-05" in said and "0.001" in said and "use settings.learning_rate there" in said
    (derived,) = [m for m in finished.messages if isinstance(m, DerivedRecord)]
    assert derived.values["learning_rate"] == pytest.approx(4e-5) == finished.steps[0].learning_rate


@pytest.mark.parametrize("factors", [(1.0, 1.0), (0.1, 1.0), (0.1, 0.5)])
def test_rates_that_follow_the_derived_one_are_none_of_our_business(factors):
    for flags in ({}, {"optimizer.rule": "sqrt", "optimizer.reference_batch_size": 2}):
        warnings, values = look(layer_wise(factors), flags)
        assert warnings == []
        rate = 2e-3 if flags else 1e-3
        assert values == ({} if 1.0 in factors else {"learning_rate": pytest.approx(rate * factors[0])})


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("betas", (0.8, 0.95), "(0.8, 0.95)"), ("epsilon", 1e-6, "1e-06"), ("weight_decay", 0.1, "0.1"),
        ("momentum", 0.5, "it uses none"), ("name", "sgd", "it uses AdamW"),
    ],
)  # fmt: skip
def test_any_other_setting_that_was_asked_for_and_is_ignored_is_said_too(key, value, shown):
    only_the_rate = lambda model, settings: torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    warnings, _ = look(only_the_rate, {f"optimizer.{key}": value})
    assert len(warnings) == 1 and f"optimizer.{key}" in warnings[0] and shown in warnings[0]


def test_settings_of_an_optimizer_that_is_not_built_are_said_to_have_no_effect():
    make = lambda model, settings: (torch.optim.SGD if settings.name == "lars" else torch.optim.AdamW)(
        model.parameters(), lr=settings.learning_rate
    )
    warnings, _ = look(make, {"optimizer.name": "lars", "optimizer.trust_coefficient": 0.1})
    assert warnings == ["optimizer.trust_coefficient has no effect on the workload's own optimizer()"]


def test_values_of_its_own_are_not_reported_where_nobody_asked_for_others():
    own = lambda model, settings: torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1
    )
    assert look(own) == ([], {})


def test_betas_that_a_rule_moves_and_the_optimizer_ignores_are_said_and_recorded_as_they_are():
    only_the_rate = lambda model, settings: torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    warnings, values = look(only_the_rate, {"optimizer.rule": "adam", "optimizer.reference_batch_size": 4})
    assert len(warnings) == 2 and "optimizer.betas" in warnings[0] and "(0.9, 0.999)" in warnings[0]
    assert values == {"betas": (0.9, 0.999), "epsilon": 1e-8}


def test_a_rule_or_a_swept_value_that_would_change_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"optimizer\.rule is linear.*it uses 4e-05, not 0\.002"):
        look(fixed, {"optimizer.rule": "linear", "optimizer.reference_batch_size": 4})
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate.*4e-05 in every trial"):
        look(fixed, varied=("optimizer.learning_rate",))
    with pytest.raises(ConfigError, match=r"optimizer\.betas"):
        look(fixed, varied=("optimizer.betas",))


def test_an_optimizer_that_knows_one_value_only_is_asked_once_more_and_believed():
    def picky(model, settings):
        assert settings.learning_rate == 1e-3
        return fixed(model, settings)

    warnings, _ = look(picky, {"optimizer.rule": "linear", "optimizer.reference_batch_size": 8})
    assert len(warnings) == 1 and "does not have optimizer.learning_rate" in warnings[0]


def test_header_record_and_mlflow_do_not_state_a_rate_that_is_not_in_use(tmp_path, uri):
    from scaleray.config import load_config
    from scaleray.recording import store

    flags = {
        **SHORT,
        "workload.name": "test_own_optimizer:Fixed",
        "batch.global_size": 8,
        "scale.workers": 1,
        "checkpoint.storage_path": str(tmp_path),
        "tracking.uri": uri,
        "checkpoint.save_final": False,
        "tracking.system_metrics": False,
    }
    said = []
    record = run.train(load_config(flags=flags, environ={}), Fixed, local=True, say=said.append)
    assert any("learning rate 0.001 for the workload's own optimizer()" in line for line in said)
    assert record.derived["learning_rate"] == pytest.approx(4e-5)
    params = store.open_client(uri).get_run(record.run_id).data.params
    assert float(params["derived.learning_rate"]) == pytest.approx(4e-5)
    assert json.loads(record.to_json())["derived"]["betas"] == [0.9, 0.999]


class Fixed(Classify):
    def optimizer(self, model, settings):
        return fixed(model, settings)


def test_settings_that_nothing_is_derived_from_are_not_among_the_derived_values_in_use():
    own = lambda model, settings: torch.optim.AdamW(model.parameters(), lr=4e-5, weight_decay=0.3)
    warnings, values = look(own, {"optimizer.weight_decay": 0.1})
    assert len(warnings) == 2 and values == {"learning_rate": pytest.approx(4e-5)}


@pytest.mark.parametrize(
    ("make", "acts"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1), True),
        (lambda p: torch.optim.AdamW(p, lr=0.1), True),
        (lambda p: torch.optim.RMSprop(p, lr=0.1), True),
        (lambda p: torch.optim.Muon(p, lr=0.1), False),
        (lambda p: torch.optim.Adafactor(p, lr=0.1), False),
    ],
    ids=["sgd", "adamw", "rmsprop", "muon", "adafactor"],
)
def test_an_optimizer_that_needs_whole_matrices_is_recognised(make, acts):
    weight = torch.nn.Parameter(torch.ones(4, 3))
    own = make([weight])
    drawn = torch.get_rng_state()
    assert acts_on_elements(own) == acts
    assert torch.equal(weight, torch.ones(4, 3)) and not own.state and torch.equal(drawn, torch.get_rng_state())


class WithMuon(Classify):
    def build_model(self):
        return torch.nn.Sequential(torch.nn.Linear(NUM_FEATURES, 8, bias=False), torch.nn.Linear(8, 3, bias=False))

    def optimizer(self, model, settings):
        return torch.optim.Muon(model.parameters(), lr=settings.learning_rate)


@pytest.mark.parametrize(("strategy", "is_warned"), [("ddp", False), ("fsdp", True)])
def test_a_run_warns_of_it_where_each_worker_has_a_part(gloo, strategy, is_warned):
    texts = gloo.run(2, warnings_in_pool, strategy)[0]
    assert any("(Muon) needs whole matrices" in text for text in texts) == is_warned


def warnings_in_pool(place, strategy):
    finished = train(place, WithMuon(), {"strategy.name": strategy, "stop.after": "2 steps"})
    return [m.text for m in finished.messages if isinstance(m, EventRecord) and m.kind == "warning"]
