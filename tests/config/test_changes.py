"""Which differences between two configs make another training of a run."""

from __future__ import annotations

import pytest

from scaleray.config import load_config
from scaleray.config.decides import Decides, decides
from scaleray.launch.run.resume import changes, training_values
from scaleray.launch.session.conditions import training_of

BASE = {"workload.name": "m:V", "batch.global_size": 16, "optimizer.learning_rate": 0.1, "stop.after": "1 epochs"}


def config(**more):
    return load_config(flags={**BASE, **{k.replace("__", "."): v for k, v in more.items()}}, environ={})


@pytest.mark.parametrize(
    ("key", "value", "alters"),
    [
        ("scale.workers", 4, False),
        ("scale.max_failures", 9, False),
        ("batch.micro_size", 4, False),
        ("checkpoint.every", "5 steps", False),
        ("tracking.every_steps", 3, False),
        ("evaluation.every", "1 epochs", False),
        ("data.prefetch_mib", 1.0, False),
        ("study.price_per_worker_hour", 2.5, False),
        ("batch.global_size", 32, True),
        ("optimizer.learning_rate", 0.2, True),
        ("optimizer.clip_norm", 1.0, True),
        ("stop.after", "2 epochs", True),
        ("schedule.warmup", "3 steps", True),
        ("data.shuffle", False, True),
        ("precision.dtype", "bf16", True),
        ("fsdp.parameter_dtype", "bf16", True),
        ("fsdp.reduce_dtype", "bf16", True),
        ("fsdp.reduce_unused", True, True),
        ("seed", 5, True),
        ("workload.args", {"width": 3}, True),
        ("deterministic", True, True),
    ],
)
def test_a_change_is_named_with_both_values_and_judged(key, value, alters):
    (change,) = changes(config().to_dict(), config(**{key.replace(".", "__"): value}))
    assert change.key == key and change.alters_training == alters
    assert str(change).startswith(f"{key}: ")
    same = training_values(config().to_dict()) == training_values(config(**{key.replace(".", "__"): value}).to_dict())
    assert same != alters


@pytest.mark.parametrize(
    "follows", [{"stop__at": "val/loss <= 0.1"}, {"stop__patience": 2, "stop__watch": "val/loss min"}, {"schedule__name": "plateau"}]
)  # fmt: skip
def test_the_distance_of_evaluations_alters_a_training_that_follows_them(follows):
    before = config(evaluation__every="2 epochs", **follows)
    (change,) = changes(before.to_dict(), config(evaluation__every="1 epochs", **follows))
    assert change.key == "evaluation.every" and change.alters_training


@pytest.mark.parametrize(
    ("key", "value"),
    [("study.price_per_worker_hour", 2.5), ("tracking.every_steps", 3), ("checkpoint.every", "5 steps"), ("seed", 5), ("scale.workers", 4)],
)  # fmt: skip
def test_hash_resume_and_curves_agree_on_what_a_key_decides(key, value):
    before, after = config(), config(**{key.replace(".", "__"): value})
    (change,) = changes(before.to_dict(), after)
    decides_nothing = decides(key) is Decides.NOTHING
    assert (before.hash() == after.hash()) == decides_nothing
    assert not (decides_nothing and change.alters_training)
    on_one_curve = training_of(before.to_dict()) == training_of(after.to_dict())
    assert on_one_curve == (decides_nothing or key == "scale.workers")


def test_equal_configs_have_no_changes():
    assert changes(config().to_dict(), config()) == []


def test_a_key_that_an_older_version_did_not_have_counts_as_its_default():
    old = config().to_dict()
    del old["checkpoint"]["keep_best"], old["deterministic"]
    assert changes(old, config()) == []
    (change,) = changes(old, config(deterministic=True))
    assert (change.key, change.before, change.after) == ("deterministic", False, True)
