"""Settings that do nothing are said, each with the reason, and nothing is said of those that do something."""

import pytest

from scaleray.config import known_keys, load_config
from scaleray.config.idle_settings import NEEDS, OFF, USERS, idle_settings, used_settings
from scaleray.config.strategy_traits import TRAITS

STRATEGIES = set(TRAITS)
CHANGED = {
    "strategy.bucket_size_mib": 1, "strategy.gradient_as_bucket_view": False, "strategy.static_graph": True,
    "strategy.find_unused_parameters": True, "fsdp.prefetch": 2, "fsdp.cpu_offload": True, "fsdp.wrap": "size",
    "fsdp.reshard_after_forward": False,
    "pipeline.schedule": "gpipe", "local_sgd.sync_every": 2, "local_sgd.average_momentum": False,
    "local_sgd.outer_learning_rate": 1, "local_sgd.outer_momentum": 0.5, "gossip.graph": "ring", "gossip.is_asynchronous": True,
    "gossip.max_staleness": 1, "gossip.meet_every": 5,
}  # fmt: skip
USED = {
    "single": set(),
    "ddp": {"strategy"},
    "zero1": {"strategy"},
    "fsdp": {"fsdp"},
    "tensor": {"fsdp.reshard_after_forward"},
    "pipeline": {"pipeline"},
    "local_sgd": {"strategy", "local_sgd.sync_every", "local_sgd.average_momentum"},
    "diloco": {"strategy", "local_sgd.sync_every", "local_sgd.outer_learning_rate", "local_sgd.outer_momentum"},
    "gossip": {"strategy.bucket_size_mib", "gossip"},
    "async_sgd": {"strategy.bucket_size_mib", "gossip.max_staleness", "gossip.meet_every"},
}


def config_with(**values):
    required = {
        "workload.name": "m:W",
        "batch.global_size": 64,
        "optimizer.learning_rate": 0.1,
        "stop.after": "1 epoch",
    }
    return load_config(flags={**required, "scale.workers": 4, **values}, environ={})


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_what_other_strategies_use_is_said_and_what_this_one_uses_is_not(strategy):
    config = config_with(**CHANGED, **{"strategy.name": strategy})
    used = {key for key in CHANGED if {key, key.partition(".")[0]} & USED[strategy]}
    where = "with one worker" if strategy == "single" else f"with strategy {strategy}"
    assert set(idle_settings(config, strategy)) == {f"{key} has no effect {where}" for key in CHANGED.keys() - used}


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_nothing_is_said_of_defaults(strategy):
    assert idle_settings(config_with(**{"strategy.name": strategy}), strategy) == []


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"gossip.max_staleness": 2, "strategy.name": "gossip"}, "without gossip.is_asynchronous"),
        ({"fsdp.wrap_min_parameters": 9, "strategy.name": "fsdp"}, "without fsdp.wrap size"),
        ({"tensor.sequence_parallel": False, "strategy.name": "fsdp"}, "with strategy fsdp"),
        ({"tensor.sequence_parallel": False, "strategy.name": "pipeline"}, "without parallel.tensor"),
        ({"shares.measure_every": 7}, "without shares.by speed"),
        ({"shares.smallest": 0.5}, "with equal shares"),
        ({"precision.initial_loss_scale": 2}, "without precision.dtype fp16"),
        ({"noise_scale.every_steps": 3}, "without noise_scale.measure"),
    ],
)
def test_what_another_setting_switches_on_is_said_where_it_does_not(given, says):
    config = config_with(**given)
    strategy = given.get("strategy.name", "ddp")
    assert idle_settings(config, strategy) == [f"{next(iter(given))} has no effect {says}"]


def test_the_table_names_keys_and_strategies_that_there_are():
    config = config_with()
    for key in {*USERS, *NEEDS}:
        section, _, name = key.partition(".")
        assert not name or hasattr(getattr(config, section), name), key
    assert {strategy for users in USERS.values() for strategy in users} == STRATEGIES - {"single"}


def test_what_a_plain_run_does_not_use_is_not_among_its_settings():
    used = used_settings(config_with(**{"scale.workers": 1}), "single")
    assert (
        not {"fsdp", "tensor", "pipeline", "gossip", "compression", "pruning", "fine_tuning", "study", "local_sgd"}
        & used.keys()
    )
    assert "momentum" not in used["optimizer"] and "betas" in used["optimizer"]
    assert used["batch"]["global_size"] == 64 and used["seed"] == 0


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_what_a_strategy_uses_is_among_them_with_its_defaults(strategy):
    used = used_settings(config_with(**{"strategy.name": strategy}), strategy)
    for key in USED[strategy] - {"gossip.max_staleness"}:
        section, _, name = key.partition(".")
        assert section in used and (not name or name in used[section]), key


def test_what_was_changed_is_always_among_them():
    config = config_with(**CHANGED)
    used, every = used_settings(config, "single"), config.to_dict()
    for key in CHANGED:
        section, _, name = key.partition(".")
        assert used[section][name] == every[section][name]


def test_a_part_that_is_on_shows_its_defaults():
    used = used_settings(config_with(**{"pruning.method": "magnitude", "optimizer.name": "sgd"}), "single")
    assert "sparsity" in used["pruning"] and "momentum" in used["optimizer"] and "betas" not in used["optimizer"]


def test_what_may_be_off_is_a_key_that_there_is():
    keys = set(known_keys())
    assert all(key in keys or any(other.startswith(f"{key}.") for other in keys) for key in OFF)
