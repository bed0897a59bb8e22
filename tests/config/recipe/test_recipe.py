"""What follows from a config and the size of the data, and what is refused with a size that would do."""

import dataclasses
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from scaleray.config import load_config
from scaleray.config.recipe.derive import derive, resolve_strategy
from scaleray.config.recipe.values import DataSize, Recipe, nearest_multiples
from scaleray.errors import ConfigError, DataError, UsageError

DATA = DataSize(num_samples=1000)
SEQUENCES = DataSize(num_samples=1000, tokens_per_sample=128)


def recipe(data=DATA, **flags):
    keys = {key.replace("__", "."): value for key, value in flags.items()}
    required = {
        "workload.name": "m:W",
        "batch.global_size": 64,
        "optimizer.learning_rate": 0.1,
        "stop.after": "3 epochs",
    }
    return derive(load_config(flags={**required, **keys}, environ={}), data)


def refusal(data=DATA, **flags):
    with pytest.raises(UsageError) as caught:
        recipe(data, **flags)
    return caught.value


def suggested(error):
    """The sizes that an error names as nearest."""
    return [int(n) for n in re.search(r"nearest[^:]*: (.*)", str(error)).group(1).split(" or ")]


def test_a_recipe_of_a_plain_config():
    found = recipe()
    assert found.values() == {
        "global_batch_size": 64,
        "per_worker_batch_size": 64,
        "micro_batch_size": 64,
        "evaluation_micro_batch_size": 64,
        "accumulation_steps": 1,
        "steps_per_epoch": 16,
        "total_steps": 48,
        "warmup_steps": 0,
        "schedule_steps": 48,
        "evaluate_every_steps": None,
        "learning_rate": 0.1,
        "betas": (0.9, 0.999),
        "epsilon": 1e-8,
        "strategy": "single",
        "checkpoint_every_steps": None,
        "keep_checkpoint_every_steps": None,
        "memory_every_steps": None,
        "degrees": {"pipeline": 1, "replicate": 1, "shard": 1, "context": 1, "tensor": 1, "expert": 1},
        "worker_shares": None,
        "measure_shares_every_steps": None,
        "parameter_dtype": None,
    }


def test_workers_and_micro_batches_share_the_global_batch():
    found = recipe(scale__workers=4, batch__micro_size=2, evaluation__micro_size=50)
    assert (found.per_worker_batch_size, found.micro_batch_size, found.accumulation_steps) == (16, 2, 8)
    assert (found.evaluation_micro_batch_size, found.strategy) == (50, "ddp")


@given(
    workers=st.integers(1, 64), accumulation=st.integers(1, 8), micro=st.integers(1, 8), samples=st.integers(1, 10**6)
)
def test_the_training_is_the_same_for_every_number_of_workers(workers, accumulation, micro, samples):
    batch = workers * accumulation * micro
    assume(samples >= batch)
    data = DataSize(samples)
    flags = {"batch__global_size": batch, "schedule__name": "cosine", "evaluation__every": "1 epoch"}
    many, one = recipe(data, scale__workers=workers, batch__micro_size=micro, **flags), recipe(data, **flags)
    assert many.per_worker_batch_size * workers == many.micro_batch_size * many.accumulation_steps * workers == batch
    shares = {
        "per_worker_batch_size",
        "micro_batch_size",
        "evaluation_micro_batch_size",
        "accumulation_steps",
        "strategy",
        "degrees",
    }
    assert {k: v for k, v in many.values().items() if k not in shares} == {
        k: v for k, v in one.values().items() if k not in shares
    }


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"optimizer__rule": "legw", "optimizer__reference_batch_size": 32, "schedule__warmup": "0.5 epochs"},
        {
            "evaluation__every": "100 samples",
            "schedule__name": "linear",
            "schedule__length": "1 epoch",
            "batch__micro_size": 8,
        },
        {"batch__drop_last": True, "optimizer__rule": "adam", "optimizer__reference_batch_size": 32},
    ],
)
def test_every_value_has_an_explanation(flags):
    found = recipe(**flags)
    assert set(found.explanations) == {f.name for f in dataclasses.fields(Recipe)} - {"explanations"}
    assert all(found.explanations.values())


# durations


@pytest.mark.parametrize(
    ("after", "steps"),
    [
        ("5 steps", 5),
        ("2 epochs", 32),
        ("0.5 epochs", 8),
        ("640 samples", 10),
        ("641 samples", 11),
        ("1 samples", 1),
        ("0.1 steps", 1),
    ],
)
def test_durations_become_steps(after, steps):
    assert recipe(stop__after=after).total_steps == steps


@given(epochs=st.integers(1, 50), samples=st.integers(64, 5000), drop_last=st.booleans())
def test_epochs_given_as_samples_are_as_many_steps(epochs, samples, drop_last):
    """The last batch of an epoch is partial, so that an epoch has more steps than its samples fill."""
    data, flags = DataSize(samples), {"batch__drop_last": drop_last}
    used = samples // 64 * 64 if drop_last else samples
    as_samples = recipe(data, stop__after=f"{used * epochs} samples", **flags)
    assert as_samples.total_steps == recipe(data, stop__after=f"{epochs} epochs", **flags).total_steps


def test_tokens_count_where_samples_have_a_fixed_number_of_them():
    found = recipe(SEQUENCES, stop__after="81920 tokens", evaluation__every="8192 tokens")
    assert (found.total_steps, found.evaluate_every_steps) == (10, 1)
    assert "fixed number of tokens" in str(refusal(DATA, stop__after="10 tokens"))


def test_drop_last_makes_the_epoch_shorter_and_says_what_is_left_out():
    kept, dropped = recipe(), recipe(batch__drop_last=True)
    assert (kept.steps_per_epoch, dropped.steps_per_epoch) == (16, 15)
    assert "last step has 40" in kept.explanations["steps_per_epoch"]
    assert "last 40 omitted" in dropped.explanations["steps_per_epoch"]


def test_a_warmup_as_long_as_the_training_is_refused():
    assert refusal(schedule__warmup="3 epochs").what == "schedule.warmup"
    assert recipe(schedule__warmup="47 steps").warmup_steps == 47


def test_a_decay_that_ends_within_the_warmup_is_refused():
    flags = {"schedule__name": "cosine", "schedule__warmup": "20 steps"}
    assert refusal(schedule__length="20 steps", **flags).what == "schedule.length"
    assert recipe(schedule__length="21 steps", **flags).schedule_steps == 21


# sizes that do not divide


@given(size=st.integers(1, 500), workers=st.integers(2, 40))
def test_an_error_names_the_nearest_batches_and_they_work(size, workers):
    assume(size % workers)
    error = refusal(batch__global_size=size, scale__workers=workers)
    assert isinstance(error, ConfigError) and error.what == "batch.global_size"
    for other in suggested(error):
        assert abs(other - size) < workers
        assert recipe(batch__global_size=other, scale__workers=workers).global_batch_size == other


@given(size=st.integers(1, 50_000), workers=st.integers(1, 20))
def test_in_tokens_the_nearest_batches_are_in_tokens_and_they_work(size, workers):
    flags = {"batch__unit": "tokens", "scale__workers": workers}
    assume(size % (128 * workers))
    error = refusal(SEQUENCES, batch__global_size=size, **flags)
    assert error.what == "batch.global_size" and error.found == size
    for other in suggested(error):
        assert abs(other - size) <= 128 * workers
        assert recipe(SEQUENCES, batch__global_size=other, **flags).global_batch_size == other // 128


@given(micro=st.integers(1, 70 * 128), per_worker=st.integers(1, 64))
def test_in_tokens_micro_batches_are_in_tokens_and_the_nearest_work(micro, per_worker):
    flags = {"batch__unit": "tokens", "batch__global_size": 2 * per_worker * 128, "scale__workers": 2}
    samples, rest = divmod(micro, 128)
    if rest == 0 and per_worker % samples == 0:
        assert recipe(SEQUENCES, batch__micro_size=micro, **flags).micro_batch_size == samples
        return
    error = refusal(SEQUENCES, batch__micro_size=micro, **flags)
    assert error.what == "batch.micro_size" and error.found == micro
    for other in suggested(error):
        assert recipe(SEQUENCES, batch__micro_size=other, **flags).micro_batch_size == other // 128


def test_micro_batches_of_rows_of_unequal_length_are_about_as_many_rows():
    packed = DataSize(num_samples=1000, total_tokens=50_000, longest=80)
    found = recipe(packed, batch__unit="tokens", batch__global_size=4000, batch__micro_size=1000)
    assert (found.micro_batch_size, found.accumulation_steps) == (20, 4)
    assert "1000 tokens, at 50 per sample on average" in found.explanations["micro_batch_size"]


@given(micro=st.integers(1, 80), per_worker=st.integers(1, 64))
def test_an_error_names_the_nearest_micro_batches_and_they_work(micro, per_worker):
    assume(per_worker % micro)
    error = refusal(batch__global_size=2 * per_worker, scale__workers=2, batch__micro_size=micro)
    assert error.what == "batch.micro_size"
    for other in suggested(error):
        found = recipe(batch__global_size=2 * per_worker, scale__workers=2, batch__micro_size=other)
        assert found.micro_batch_size == other


@given(value=st.integers(1, 10**9), of=st.integers(1, 10**6))
def test_nearest_multiples_lie_on_both_sides(value, of):
    found = nearest_multiples(value, of)
    assert all(n % of == 0 and n > 0 for n in found)
    assert any(n >= value for n in found) and all(abs(n - value) <= of for n in found)


def test_tokens_need_samples_of_one_length():
    assert "count in samples" in str(refusal(DATA, batch__unit="tokens"))


@pytest.mark.parametrize(("unit", "data"), [("samples", DATA), ("tokens", SEQUENCES)])
def test_data_smaller_than_a_global_batch_names_the_largest_batch_and_it_works(unit, data):
    flags = {"batch__unit": unit, "scale__workers": 3}
    per_sample = data.tokens_per_sample if unit == "tokens" else 1
    error = refusal(data, batch__global_size=3000 * per_sample, **flags)
    assert isinstance(error, DataError)
    largest = int(re.search(r"--batch.global-size (\d+)", str(error)).group(1))
    assert recipe(data, batch__global_size=largest, **flags).global_batch_size == 999


def test_fewer_samples_than_workers_asks_for_fewer_workers():
    message = str(refusal(DataSize(3), batch__global_size=8, scale__workers=4))
    assert "fewer workers" in message and "--batch.global-size 0" not in message


# rules


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("none", 0.1), ("linear", 0.8), ("sqrt", 0.1 * 8**0.5), ("adam", 0.1 * 8**0.5), ("legw", 0.1 * 8**0.5)],
)
def test_the_rule_carries_the_learning_rate_to_the_global_batch(rule, expected):
    found = recipe(optimizer__rule=rule, optimizer__reference_batch_size=8)
    assert found.learning_rate == pytest.approx(expected)
    assert ("kappa = 8 = 64 / 8" in found.explanations["learning_rate"]) == (rule != "none")


def test_adams_rule_moves_betas_and_epsilon_too():
    found = recipe(optimizer__rule="adam", optimizer__reference_batch_size=16)
    assert found.betas == pytest.approx((0.6, 0.996)) and found.epsilon == pytest.approx(5e-9)


def test_rules_without_a_reference_batch_are_refused():
    error = refusal(optimizer__rule="sqrt")
    assert error.what == "optimizer.reference_batch_size" and "--optimizer.reference-batch-size 64" in str(error)


def test_adams_rule_is_refused_for_sgd_and_beyond_its_validity():
    assert "is a rule for adamw" in str(
        refusal(optimizer__rule="adam", optimizer__name="sgd", optimizer__reference_batch_size=32)
    )
    assert "below 10 x the reference" in str(refusal(optimizer__rule="adam", optimizer__reference_batch_size=6))


@pytest.mark.parametrize(("warmup", "unstretched"), [("0.25 epochs", 25), ("256 samples", 4)])
def test_legw_stretches_the_warmup_with_the_batch(warmup, unstretched):
    flags = {"optimizer__reference_batch_size": 16, "schedule__warmup": warmup}
    data = DataSize(6400)
    assert recipe(data, optimizer__rule="sqrt", **flags).warmup_steps == unstretched
    stretched = recipe(data, optimizer__rule="legw", **flags)
    assert stretched.warmup_steps == 4 * unstretched
    assert "4 x as many epochs" in stretched.explanations["warmup_steps"]


def test_legw_leaves_a_warmup_in_steps_which_is_kappa_times_as_many_epochs_already():
    flags = {"optimizer__reference_batch_size": 16, "optimizer__rule": "legw"}
    assert recipe(DataSize(6400), schedule__warmup="16 steps", **flags).warmup_steps == 16
    # the same warm-up in samples, at the reference batch of 16
    assert recipe(DataSize(6400), schedule__warmup="256 samples", **flags).warmup_steps == 16


def test_a_decay_length_without_a_decay_is_refused_rather_than_dropped():
    error = refusal(schedule__name="constant", schedule__length="20 steps")
    assert error.what == "schedule.length"
    assert "cosine" in str(error)


# strategies


@pytest.mark.parametrize(
    ("name", "workers", "strategy"),
    [("auto", 1, "single"), ("auto", 2, "ddp"), ("ddp", 1, "single"), ("ddp", 2, "ddp"), ("single", 1, "single")],
)
def test_the_strategy_follows_from_its_name_and_the_workers(name, workers, strategy):
    assert recipe(strategy__name=name, scale__workers=workers).strategy == strategy


def test_single_is_for_one_worker():
    assert refusal(strategy__name="single", scale__workers=2).what == "strategy.name"
    flags = {"workload.name": "m:W", "batch.global_size": 2, "optimizer.learning_rate": 1, "stop.after": "1 epoch"}
    config = load_config(flags={**flags, "scale.workers": 2, "strategy.name": "single"}, environ={})
    with pytest.raises(ConfigError, match="use ddp or auto"):
        resolve_strategy(config)


def test_a_static_graph_is_refused_with_accumulation_and_the_advice_works():
    flags = {"scale__workers": 2, "strategy__static_graph": True}
    error = refusal(batch__micro_size=8, **flags)
    assert error.what == "strategy.static_graph" and "--batch.micro-size 32" in str(error)
    assert recipe(batch__micro_size=32, **flags).accumulation_steps == 1
    assert recipe(batch__micro_size=8, strategy__static_graph=True).strategy == "single"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({}, "no other worker could notice the loss"),
        ({"scale__workers": 2, "strategy__name": "fsdp"}, "under fsdp each worker has a part of the state"),
        ({"scale__workers": {"min": 2, "max": 4}, "strategy__name": "ddp"}, "a fixed number of workers"),
        ({"scale__workers": 2, "compression__name": "powersgd"}, "with compression.name each worker has a part"),
        ({"scale__workers": 2, "shares__by": "speed"}, "depends on measured times"),
        ({"scale__workers": 2, "memory__on_out_of_memory": "halve"}, "repeats steps as well"),
    ],
)
def test_spares_need_copies_of_the_whole_state(flags, reason):
    assert recipe(scale__workers=2, recovery__spares=1).strategy == "ddp"
    error = refusal(recovery__spares=1, **flags)
    assert str(error).startswith("recovery.spares is 1: ") and reason in str(error)


def test_a_group_may_shrink_if_its_results_do_not_depend_on_its_size():
    flags = {"recovery__on_loss": "shrink", "scale__workers": 4}
    assert recipe(**flags).per_worker_batch_size == recipe(scale__workers=4).per_worker_batch_size
    for more, reason in (
        ({"strategy__name": "diloco", "checkpoint__memory": {}}, "another number of workers changes the training"),
        ({"parallel__tensor": 2, "checkpoint__memory": {}}, "needs a fixed number of workers"),
        ({"shares__by": "given", "shares__speeds": [1, 1, 1, 2]}, "shares.speeds would have no worker"),
    ):
        error = refusal(**flags, **more)
        assert str(error).startswith("recovery.on_loss is shrink: ") and reason in str(error)
    assert "exclude each other" in str(refusal(recovery__on_loss="restart", recovery__spares=1, scale__workers=2))


def test_copies_in_memory_let_spares_take_parts_of_the_state():
    for flags in ({"strategy__name": "fsdp"}, {"compression__name": "powersgd"}):
        assert "--checkpoint.memory.every '1 step'" in str(refusal(scale__workers=2, recovery__spares=1, **flags))
        found = recipe(scale__workers=2, recovery__spares=1, checkpoint__memory={"every": "2 steps"}, **flags)
        assert found.memory_every_steps == 2
        assert found.decides_after(2) and not found.decides_after(3)
