"""Traces that differ in one thing: where the comparison sees it, and what it is taken for."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scaleray.records.certificate import Divergence
from scaleray.verification.causes.cause_classes import Layout, from_traces
from scaleray.verification.causes.cause_experiments import (
    EVALUATION_MODE,
    NO_CLIPPING,
    from_experiment,
    needs_experiments,
    without_experiment,
)
from scaleray.verification.traces.compare_traces import compare
from scaleray.verification.traces.run_trace import Restored, StepTrace, Trace
from scaleray.verification.traces.signatures import Signer, number_format
from scaleray.verification.verdicts.explanation import from_shares

NAMES = ("first.weight", "first.bias")
SIGN = Signer()


def signatures(*tensors):
    return np.array(
        [SIGN(name, torch.as_tensor(t, dtype=torch.float64)) for name, t in zip(NAMES, tensors, strict=True)]
    )


def step(number, **changes):
    gradients = signatures([0.3, -0.4, 0.1], [0.2])
    values = {
        "step": number,
        "loss": 2.0 / number,
        "count": 8.0,
        "grad_norm": float(np.linalg.norm(gradients[:, 0])),
        "used_norm": None,
        "updates": ((0.1,),),
        "rows": np.arange(8, dtype=np.uint64) + 8 * number,
        "gradients": gradients,
        "parameters": signatures([1.0, 2.0, 3.0], [4.0]),
        "gradient_spread": np.zeros(2),
        "parameter_spread": np.zeros(2),
        "gradient_formats": ("", ""),
        "draws_random_numbers": False,
        "shares_random_state": False,
        "changes_buffers": False,
    }
    return StepTrace(**{**values, **changes})


def trace(*, at=None, change=None, **more):
    """Three steps; the one numbered `at` has something changed."""
    steps = tuple(step(n, **(change if n == at else {})) for n in (1, 2, 3))
    values = {
        "names": NAMES,
        "dtypes": ("float64",) * 2,
        "initial": signatures([1.0, 1.0, 1.0], [0.5]),
        "steps": steps,
        "final": {"first.weight": np.array([1.0, 2.0, 3.0]), "first.bias": np.array([4.0])},
        "loss_dtype": "float64",
    }
    return Trace(**{**values, **more})


def explained(other, layout=None, reference=None):
    reference = reference or trace()
    divergence = compare(reference, other).divergence
    return divergence, from_traces(reference, other, divergence, layout or Layout(2, 1))


# signatures


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30), st.integers(0, 29), st.floats(1e-6, 1e3))
def test_signatures_show_any_change_of_one_element_in_its_size(values, position, change):
    tensor = torch.tensor(values, dtype=torch.float64)
    changed = tensor.clone()
    changed[position % len(values)] += change
    apart = np.abs(SIGN("x", tensor) - SIGN("x", changed))
    assert np.isclose(apart[1:].max(), change, rtol=1e-3, atol=1e-9)


def test_signatures_show_exchanged_elements_which_norm_and_sum_do_not():
    tensor = torch.arange(100.0)
    turned = tensor.flip(0)
    ours, theirs = SIGN("x", tensor), SIGN("x", turned)
    assert np.allclose(ours[:2], theirs[:2]) and not np.allclose(ours[2:], theirs[2:])


def test_signatures_are_the_same_in_every_process_and_for_an_empty_tensor():
    assert Signer()("x", torch.arange(5.0)).tolist() == SIGN("x", torch.arange(5.0)).tolist()
    assert SIGN("x", torch.zeros(0)).tolist() == [0, 0, 0, 0]


def test_a_number_format_is_seen_in_the_digits():
    values = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert number_format(values) == ""
    assert [number_format(values.to(t).double()) for t in (torch.float32, torch.float16, torch.bfloat16)] == [
        "fp32",
        "fp16",
        "bf16",
    ]
    assert number_format(torch.zeros(3, dtype=torch.float64)) == number_format(values.float()) == ""


# comparing


def test_equal_traces_are_equal_to_the_bit():
    found = compare(trace(), trace(), bound=0)
    assert found.is_equal and found.largest == 0


@pytest.mark.parametrize(("change", "is_equal"), [(1e-12, True), (1e-8, False)])
def test_the_bound_is_relative(change, is_equal):
    found = compare(trace(), trace(at=2, change={"loss": 1.0 * (1 + change)}))
    assert found.is_equal is is_equal
    assert found.loss == pytest.approx(change, rel=1e-3)


def test_a_bound_of_0_sees_the_last_bit_and_the_order_of_rows():
    assert compare(trace(), trace(at=2, change={"loss": np.nextafter(1.0, 2)}), bound=0).divergence.step == 2
    turned = trace(at=3, change={"rows": (np.arange(8, dtype=np.uint64) + 24)[::-1]})
    assert compare(trace(), turned).is_equal
    assert compare(trace(), turned, bound=0).divergence.quantity == "rows"


def test_the_first_divergence_in_time_and_in_cause_is_named():
    changed = {"loss": 5.0, "gradients": signatures([0.3, -0.4, 0.1], [0.3])}
    divergence = compare(trace(), trace(at=2, change=changed)).divergence
    assert (divergence.step, divergence.quantity) == (2, "loss")
    del changed["loss"]
    divergence = compare(trace(), trace(at=2, change=changed)).divergence
    assert (divergence.step, divergence.quantity, divergence.parameter) == (2, "gradient", "first.bias")


def test_what_is_lost_on_both_sides_in_the_same_way_is_equal():
    lost = {"loss": math.nan}
    assert compare(trace(at=3, change=lost), trace(at=3, change=lost)).is_equal
    found = compare(trace(), trace(at=3, change=lost))
    assert not found.is_equal and found.loss == math.inf


def test_a_parameter_with_no_gradient_but_rounding_is_compared_with_the_others_size():
    noise = {"gradients": signatures([0.3, -0.4, 0.1], [1e-17])}
    ours = dataclasses.replace(trace(), steps=tuple(step(n, **noise) for n in (1, 2, 3)))
    ours = dataclasses.replace(ours, final={**ours.final, "first.bias": np.array([1e-13])})
    theirs = dataclasses.replace(ours, final={**ours.final, "first.bias": np.array([2e-13])})
    assert compare(ours, theirs).is_equal


def test_final_values_count_even_where_signatures_were_equal():
    found = compare(trace(), trace(final={**trace().final, "first.bias": np.array([4.1])}))
    assert found.divergence.quantity == "final values" and found.parameters == pytest.approx(0.025)


def test_models_of_other_parameters_cannot_be_compared():
    divergence, finding = explained(trace(names=("first.weight", "last.bias")))
    assert (divergence.quantity, finding.cause) == ("model", "another model")


def test_a_run_and_its_resumption_are_one_trace():
    whole = trace()
    before = dataclasses.replace(whole, steps=whole.steps[:2], final={})
    resumed = dataclasses.replace(whole, steps=whole.steps[1:], initial=whole.initial + 1)
    assert compare(whole, before.continued_by(resumed), bound=0).is_equal
    assert compare(whole, before, bound=0).divergence.quantity == "steps"


# causes, from traces

NORM = step(1).grad_norm
OTHER_UPDATE = {"parameters": signatures([1.0, 2.0, 3.3], [4.0])}


@pytest.mark.parametrize(
    ("other", "cause", "at", "words"),
    [
        (trace(dtypes=("float64", "float32")), "dtype", 0, "first.bias is float32"),
        (trace(initial=signatures([1.0, 1.0, 1.1], [0.5])), "initial parameters", 0, "first.weight"),
        (trace(at=2, change={"rows": np.arange(8, dtype=np.uint64)}), "data order", 2, "8 belong to other steps"),
        (trace(at=2, change={"updates": ((0.2,),)}), "schedule or learning-rate step count", 2, "0.2 instead of 0.1"),
        (trace(at=2, change={"updates": ((0.1,), (0.1,))}), "schedule or learning-rate step count", 2, "2 updates"),
        (trace(at=1, change={"count": 4.0}), "loss normalisation", 1, "count of 4 instead of 8"),
        (trace(at=1, change={"loss": 4.0}), "loss normalisation", 1, "2 times"),
        (trace(at=3, change={"gradient_spread": np.array([0.0, 1.0])}), "missing gradient synchronisation", 3, "1 of 2 parameters (first.bias"),
        (trace(at=1, change={"gradients": 2 * signatures([0.3, -0.4, 0.1], [0.2])}), "double gradient synchronisation", 1, "2 times"),
        (trace(at=1, change={"gradients": 3 * signatures([0.3, -0.4, 0.1], [0.2])}), "loss normalisation", 1, "3 times"),
        (trace(at=2, clip_norm=0.1, change={"used_norm": 0.2, "parameters": signatures([1.0, 2.0, 3.3], [4.0])}), "clipping on a local norm", 2, "clipped by a norm of 0.2"),
        (trace(at=2, clip_norm=0.1, change={"used_norm": NORM, "used_norms": (NORM, 0.3)} | OTHER_UPDATE), "clipping on a local norm", 2, "by a norm of 0.3"),
        (trace(at=2, clip_norm=0.1, change={"used_norm": NORM, "used_norms": (NORM, NORM), "parameter_spread": np.array([0.0, 0.5])} | OTHER_UPDATE), "missing parameter synchronisation", 2, "1 of 2 parameters (first.bias"),
        (trace(at=2, clip_norm=0.1, change={"used_norm": NORM, "used_norms": (NORM, 0.3)} | OTHER_UPDATE, loss_dtype=""), "clipping on a local norm", 2, "by a norm of 0.3"),
        (trace(at=2, change={"rows_agree": False}), "data order", 2, "one replica read different rows"),
        (trace(base_rates=(0.1,), at=3, change={"due_factor": 0.5}), "schedule or learning-rate step count", 3, "0.1 instead of 0.05"),
        (trace(restored=Restored(2, signatures([1.0, 2.0, 3.1], [4.0]), {})), "state after a resume", 3, "parameter first.weight is not"),
        (trace(restored=Restored(2, signatures([1.0, 2.0, 3.0], [4.0]), {})), "state after a resume", 3, "exp_avg of first.bias is missing"),
        (trace(at=2, change={"loss": 1.0001}, loss_dtype="float32"), "dtype", 2, "the loss is float32"),
        (dataclasses.replace(trace(), steps=trace().steps[:2]), "schedule or learning-rate step count", 3, "2 steps instead of 3"),
        (trace(final={**trace().final, "running_mean": np.zeros(2)}), None, None, None),
    ],
)  # fmt: skip
def test_what_the_traces_alone_show(other, cause, at, words):
    reference = trace(saved=Restored(2, signatures([1.0, 2.0, 3.0], [4.0]), {"first.bias: exp_avg": np.ones(4)}))
    divergence = compare(reference, other).divergence
    if cause is None:
        assert divergence is None  # a tensor that the reference does not have is not compared
        return
    finding = from_traces(trace(), other, divergence, Layout(2, 1))
    assert (finding.cause, divergence.step) == (cause, at)
    assert words in finding.why


def test_a_ratio_of_the_accumulation_steps_is_a_matter_of_normalisation():
    other = trace(at=1, change={"gradients": signatures([0.3, -0.4, 0.1], [0.2]) / 4})
    assert explained(other, Layout(2, 4))[1].cause == "loss normalisation"


def test_a_gradient_of_one_parameter_alone_needs_more_than_traces():
    other = trace(at=1, change={"gradients": signatures([0.3, -0.4, 0.1], [0.3])})
    assert explained(other)[1] is None


def test_experiments_follow_from_what_a_step_does():
    noisy = trace(at=1, change={"draws_random_numbers": True})
    statistics = trace(at=1, change={"changes_buffers": True})
    assert needs_experiments(trace(), trace()) == []
    assert needs_experiments(trace(), trace(clip_norm=1.0)) == [NO_CLIPPING]
    assert needs_experiments(noisy, trace(clip_norm=1.0)) == [EVALUATION_MODE, NO_CLIPPING]
    assert from_experiment(EVALUATION_MODE, noisy, noisy).cause == "dropout or random numbers"
    assert from_experiment(EVALUATION_MODE, statistics, statistics).cause == "BatchNorm statistics"
    assert from_experiment(NO_CLIPPING, trace(), trace()).cause == "clipping on a local norm"
    unequal = Divergence(1, "gradient", 1.0)
    assert without_experiment(trace(), trace(), unequal, Layout(2, 1)).cause == "not recognised"
    assert without_experiment(noisy, trace(), unequal, Layout(2, 1)).cause == "dropout or random numbers"
    fewer = trace(at=1, change={"count": 7.0})
    assert without_experiment(trace(), fewer, unequal, Layout(2, 1)).cause == "loss normalisation"
    measured = Divergence(1, "evaluation", 1.0, "val/loss")
    assert without_experiment(trace(), trace(), measured, Layout(2, 1)).cause == "evaluation"


def test_random_numbers_of_a_strategy_do_not_make_dropout_of_everything():
    pipelined = trace(at=1, change={"draws_random_numbers": True})
    assert needs_experiments(trace(), pipelined) == []
    unequal = Divergence(1, "gradient", 1.0)
    by_itself, by_the_model = (Layout(2, 1, draws_by_itself=draws) for draws in (True, False))
    assert without_experiment(trace(), pipelined, unequal, by_itself).cause == "not recognised"
    assert without_experiment(trace(), pipelined, unequal, by_the_model).cause == "dropout or random numbers"


# causes, from the gradient's parts

COUNTS = np.array([[2.0, 6.0], [4.0, 4.0]])


def shares(*views):
    return np.array(views if len(views) > 1 else views * 2, dtype=float)


@pytest.mark.parametrize(
    ("weights", "cause"),
    [
        (shares([[1, 1], [1, 1]]), None),
        (shares([[2, 2], [0, 0]], [[0, 0], [2, 2]]), "missing gradient synchronisation"),
        (shares([[1, 1], [1, 0]], [[1, 1], [0, 1]]), "missing gradient synchronisation"),
        (shares([[2, 2], [2, 2]]), "double gradient synchronisation"),
        (shares([[0.5, 0.5], [0.5, 0.5]]), "double gradient synchronisation"),
        (shares(16 / 4 / COUNTS), "loss normalisation"),
        (shares([[2, 1], [2, 1]]), "double gradient synchronisation"),
        (shares([[0, 1], [0, 1]]), "gradient accumulation"),
        (shares([[1, 0], [1, 1]]), "gradient accumulation"),
        (shares([[1, 0.3], [0.7, 0.1]]), "not recognised"),
    ],
)
def test_what_the_weights_of_the_micro_batches_show(weights, cause):
    finding = from_shares(weights, COUNTS, Layout(2, 2))
    assert (finding.cause if finding else None) == cause


def test_a_mean_of_the_ranks_means_is_seen_whatever_each_counts():
    counts = np.array([[2.0, 2.0], [1.0, 5.0]])
    weights = np.broadcast_to(5.0 / counts.sum(axis=1, keepdims=True), (2, 2))
    finding = from_shares(shares(weights), counts, Layout(2, 2))
    assert finding.cause == "loss normalisation" and "mean of means" in finding.why


# what overflowed


OVERFLOWED = np.array([[math.inf, math.inf, -math.inf, math.nan], [0.2, 0.2, 0.2, 0.2]])


def test_the_same_overflow_in_both_runs_is_no_difference():
    lost = {"gradients": OVERFLOWED, "grad_norm": math.inf, "used_norm": math.inf}
    final = {"first.weight": np.array([1.0, math.inf, math.nan]), "first.bias": np.array([4.0])}
    ours, theirs = (trace(at=1, change=lost, final=dict(final)) for _ in range(2))
    comparison = compare(ours, theirs, bound=0)
    assert comparison.is_equal and comparison.largest == 0


@pytest.mark.parametrize("other", [math.nan, -math.inf, 3.0])
def test_an_overflow_on_one_side_or_to_the_other_side_is_a_difference(other):
    lost = {"grad_norm": math.inf, "used_norm": math.inf}
    changed = OVERFLOWED.copy()
    changed[0, 1] = other
    ours, theirs = (trace(at=1, change={**lost, "gradients": g}) for g in (OVERFLOWED, changed))
    divergence = compare(ours, theirs, bound=0).divergence
    assert (divergence.step, divergence.quantity, divergence.parameter) == (1, "gradient", "first.weight")


def test_a_step_that_overflowed_does_not_hide_which_parameters_are_idle():
    idle = {"gradients": signatures([0.3, -0.4, 0.1], [1e-14])}
    steps = tuple(step(n, **idle, **({"grad_norm": math.inf} if n == 1 else {})) for n in (1, 2, 3))
    other = tuple(dataclasses.replace(s, parameters=signatures([1.0, 2.0, 3.0], [4.0 + 1e-9])) for s in steps)
    assert compare(trace(steps=steps), trace(steps=other), bound=4e-10).is_equal


def test_a_gradient_of_the_step_before_is_named():
    assert from_shares(shares([[1, 1], [1, 1]]), COUNTS, Layout(2, 2), stale=1.0).cause == "gradient accumulation"


# evaluations


def test_a_gradient_that_is_the_sum_of_its_parts_and_not_that_of_the_batch_is_the_losss_own_doing():
    finding = from_shares(shares([[1, 1], [1, 1]]), COUNTS, Layout(2, 2), difference=0.1)
    assert finding.cause == "loss that depends on how a batch is cut"
    assert from_shares(shares([[1, 1], [1, 1]]), COUNTS, Layout(2, 2), difference=1e-8) is None


def test_a_ratio_of_one_is_no_wrong_normalisation():
    assert from_shares(shares([[1 + 1e-8, 1], [1, 1 + 1e-8]]), COUNTS, Layout(2, 1), difference=1e-8) is None


def test_an_evaluation_that_differs_is_found_after_its_step():
    ours, theirs = (trace(evaluations={2: {"val/loss": loss, "val/accuracy": 0.5}}) for loss in (0.3, 0.3 + 1e-6))
    divergence = compare(ours, theirs).divergence
    assert (divergence.step, divergence.quantity, divergence.parameter) == (2, "evaluation", "val/loss")
    assert compare(ours, trace(evaluations={2: {"val/loss": 0.3}})).divergence.parameter == "val/accuracy"
    assert compare(ours, ours).is_equal
