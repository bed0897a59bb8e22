"""What a sweep varies: ranges, lists and grids, drawn without repeats, and what can never run kept apart."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from scaleray.config import load_config
from scaleray.errors import ConfigError
from scaleray.sweeps.search_space import (
    BATCH_SIZE,
    LEARNING_RATE,
    MOST_COMBINATIONS,
    RULE,
    SEED,
    LogUniform,
    Space,
    choose,
    parse_rates,
    parse_sizes,
)
from scaleray.sweeps.sweep_question import question_of

FLAGS = {"workload.name": "a:B", "batch.global_size": 64, "optimizer.learning_rate": 0.1, "stop.after": "2 epochs"}


def config(**more):
    return load_config(flags={**FLAGS, **more}, environ={})


def space(**more):
    values = {"choices": {BATCH_SIZE: (32, 64, 128), RULE: ("sqrt", "none")}, "learning_rates": (0.1, 0.2)}
    return Space(**{**values, **more})


def anything(settings):
    return None


@given(low=st.integers(1, 10**4), doublings=st.integers(0, 20), rest=st.floats(0, 0.999))
def test_a_range_of_sizes_doubles_up_to_its_end(low, doublings, rest):
    high = int(low * 2**doublings * (1 + rest))
    sizes = parse_sizes("--batch-sizes", f"{low}..{high}")
    assert sizes[0] == low
    assert all(b == 2 * a for a, b in itertools.pairwise(sizes))
    assert sizes[-1] <= high < 2 * sizes[-1]


def test_a_list_of_sizes_stays_as_it_is_without_repeats():
    assert parse_sizes("--batch-sizes", "64, 32,64") == (64, 32)


@pytest.mark.parametrize("text", ["", ",", "0..8", "8..4", "32..x", "1.5", "-4", "0", "a,b", "32.."])
def test_sizes_that_cannot_be_read_are_one_error(text):
    with pytest.raises(ConfigError, match="--batch-sizes"):
        parse_sizes("--batch-sizes", text)


@pytest.mark.parametrize("text", ["", "0", "-1e-3", "nan", "inf", "1e-3..1e-4", "1e-3..", "1..2..3", "fast"])
def test_rates_that_cannot_be_read_are_one_error(text):
    with pytest.raises(ConfigError, match="--learning-rates"):
        parse_rates("--learning-rates", text)


@given(st.integers(0, 2**32))
def test_a_drawn_rate_lies_in_its_range(seed):
    rates = parse_rates("--learning-rates", "1e-4..3.3333e-2")
    assert isinstance(rates, LogUniform)
    assert rates.low <= rates.draw(random.Random(seed)) <= rates.high


def test_drawn_rates_are_spread_over_every_doubling_alike():
    chance, rates = random.Random(0), LogUniform(1.0, 16.0)
    octaves = [int(math.log2(rates.draw(chance))) for _ in range(4000)]
    for octave in range(4):
        assert 850 < octaves.count(octave) < 1150  # 1000 expected, its standard deviation 27


def test_a_grid_is_every_combination_with_every_seed():
    found = choose(space(num_seeds=3, first_seed=7), search="grid", num_trials=None, refuse=anything, seed=0)
    assert found.num_possible == 12
    assert len(found.chosen) == 36
    assert len({tuple(sorted(c.items())) for c in found.chosen}) == 36
    assert {c[SEED] for c in found.chosen} == {7, 8, 9}


@hypothesis_settings(max_examples=30)
@given(num_trials=st.integers(1, 20), seed=st.integers(0, 1000))
def test_a_random_search_draws_without_repeats_and_the_same_for_a_seed(num_trials, seed):
    found = choose(space(), search="random", num_trials=num_trials, refuse=anything, seed=seed)
    assert len(found.chosen) == min(num_trials, 12)
    assert len({tuple(sorted(c.items())) for c in found.chosen}) == len(found.chosen)
    assert choose(space(), search="random", num_trials=num_trials, refuse=anything, seed=seed) == found


def test_what_never_fits_takes_no_trial_and_keeps_its_reason():
    def refuse(settings):
        return "too large" if settings[BATCH_SIZE] == 128 else None

    found = choose(space(), search="random", num_trials=8, refuse=refuse, seed=0)
    assert len(found.chosen) == 8 and all(c[BATCH_SIZE] < 128 for c in found.chosen)
    assert len(found.refused) == 4 and {reason for _, reason in found.refused} == {"too large"}


def test_a_range_of_rates_tries_every_combination_before_any_comes_again():
    def refuse(settings):
        return "never" if settings[BATCH_SIZE] == 128 else None

    rates = LogUniform(1e-3, 1e-1)
    found = choose(space(learning_rates=rates), search="random", num_trials=8, refuse=refuse, seed=0)
    pairs = [(c[BATCH_SIZE], c[RULE]) for c in found.chosen]
    assert len(set(pairs[:4])) == 4 and len(set(pairs[4:])) == 4
    assert len({c[LEARNING_RATE] for c in found.chosen}) == 8
    assert len(found.refused) == 2


def test_a_grid_larger_than_its_trials_and_a_range_without_trials_are_refused():
    with pytest.raises(ConfigError, match="the grid has 12 combinations"):
        choose(space(), search="grid", num_trials=5, refuse=anything, seed=0)
    with pytest.raises(ConfigError, match="a range has infinitely many learning rates"):
        choose(space(learning_rates=LogUniform(1, 2)), search="random", num_trials=None, refuse=anything, seed=0)


def test_a_space_without_end_is_refused():
    with pytest.raises(ConfigError, match=f"at most {MOST_COMBINATIONS:,} can be checked"):
        Space({f"k{n}": tuple(range(10)) for n in range(6)}, (0.1,)).combinations()


def test_the_options_make_the_question():
    question = question_of(
        config(),
        batch_sizes="32..128",
        rules="linear,adam",
        learning_rates="0.1,0.2",
        optimizers="sgd",
        warmups="0 epochs,10 steps",
        vary=("optimizer.betas=[0.9, 0.95],[0.9, 0.999]", "optimizer.weight-decay=0,1e-2"),
        seeds=2,
        trials=5,
        workers_per_trial=2,
    )
    choices = question.space.choices
    assert choices[BATCH_SIZE] == (32, 64, 128)
    assert choices["schedule.warmup"] == ("0 epochs", "10 steps")
    assert choices["optimizer.betas"] == ([0.9, 0.95], [0.9, 0.999])
    assert choices["optimizer.weight_decay"] == (0, 0.01)
    assert question.space.num_seeds == 2 and question.workers_per_trial == 2
    assert not question.batch_sizes_are_listed


def test_what_is_not_varied_stays_as_the_config_says():
    question = question_of(config(**{"scale.workers": 3, "seed": 11}))
    assert question.space.combinations() == [
        {BATCH_SIZE: 64, RULE: "none", "optimizer.name": "adamw", "schedule.warmup": "0 steps", LEARNING_RATE: 0.1}
    ]
    assert (question.workers_per_trial, question.space.first_seed) == (3, 11)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rules": "linear,cubic"}, "--rules is cubic"),
        ({"optimizers": "adadelta"}, "it must be one of adamw, adam, sgd, lars, lamb"),
        ({"warmups": "a while"}, "--warmups is a while: a number"),
        ({"vary": ("optimizer.weight_decay",)}, "it must be a key and its values"),
        ({"vary": ("batch.global_size=1,2",)}, "use --batch-sizes"),
        ({"vary": ("seed=1,2",)}, "use --seeds"),
        ({"vary": ("optimizer.betas=[0.9",)}, "the values must be a list, separated by commas"),
        ({"trials": 0}, "--trials is 0"),
        ({"seeds": 0}, "--seeds is 0"),
        ({"workers_per_trial": 0}, "--workers-per-trial is 0"),
        ({"search": "grid", "learning_rates": "1e-3..1e-2"}, "a range of learning rates has no grid"),
        ({"search": "optuna"}, "for example --trials 24"),
        ({"scheduler": "pbt", "seeds": 2}, "omit it with pbt"),
    ],
)
def test_options_that_make_no_question_are_one_error(options, message):
    with pytest.raises(ConfigError) as caught:
        question_of(config(), **options)
    assert message in str(caught.value)


def test_an_elastic_config_must_say_the_workers_of_a_trial():
    elastic = config(**{"scale.workers": {"min": 1, "max": 2}})
    with pytest.raises(ConfigError, match="--workers-per-trial 2"):
        question_of(elastic)
    assert question_of(elastic, workers_per_trial=2).workers_per_trial == 2
