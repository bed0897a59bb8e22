"""The table of traits knows every strategy that a config may name, and no other."""

from typing import get_args

from scaleray.config.strategy import StrategySettings
from scaleray.config.strategy_traits import TRAITS, names_with, traits_of
from scaleray.strategies import STRATEGIES
from scaleray.verification.verdicts.guarantees import GUARANTEES


def test_every_strategy_has_traits_and_every_name_of_the_table_is_one():
    named = get_args(StrategySettings.model_fields["name"].annotation)
    assert set(named) - {"auto"} == set(TRAITS) == set(STRATEGIES)


def test_those_that_train_apart_promise_less_than_equality():
    assert set(names_with("trains_apart")) <= set(GUARANTEES)


def test_a_worker_holds_a_part_where_it_has_one():
    assert names_with("splits_parameters") == ("fsdp", "tensor", "pipeline")
    assert traits_of("auto") == traits_of("single")
