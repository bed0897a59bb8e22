"""What rounding explains of a difference, and what it does not."""

import dataclasses

import numpy as np
import pytest
import torch
from test_compare_traces import signatures, step, trace

from scaleray.verification.verdicts.own_precision import Rounding, excess

EPSILON = float(torch.finfo(torch.float32).eps)
ROUNDING = Rounding(EPSILON, num_parts=2)


def standing_still(error, *, formats=("", ""), parameters=None, loss=0.0, parameter_formats=("", "")):
    """Three steps whose gradients are this far from the true ones, relative to their size."""
    gradients = signatures([0.3 * (1 + error), -0.4 * (1 - error), 0.1], [0.2])
    more = {"gradients": gradients, "gradient_formats": formats}
    if parameters is not None:
        more["parameters"] = parameters
    steps = tuple(dataclasses.replace(step(n), **more, loss=2.0 / n * (1 + loss)) for n in (1, 2, 3))
    return trace(steps=steps, parameter_formats=parameter_formats)


def test_another_order_of_sums_is_explained_by_rounding():
    assert excess(standing_still(0.0), standing_still(1e-6), standing_still(-2e-6), ROUNDING) is None
    assert excess(standing_still(0.0), standing_still(0.0), standing_still(2 * EPSILON), ROUNDING) is None


def test_a_gradient_that_is_far_from_that_of_one_process_is_not():
    found = excess(standing_still(0.0), standing_still(1e-7), standing_still(1e-3), ROUNDING)
    assert (found.divergence.quantity, found.divergence.parameter) == ("gradient", "first.weight")
    assert found.allowed < 1e-4 < found.divergence.difference
    assert excess(standing_still(0.0), standing_still(1e-3), standing_still(-1e-3), ROUNDING) is None  # as in bf16


def test_digits_tell_of_a_gradient_that_was_sent_in_fewer():
    sent = standing_still(1e-3, formats=("bf16", ""))
    found = excess(standing_still(0.0), standing_still(1e-3), sent, ROUNDING)
    assert found.format == "bf16"
    also_alone = standing_still(1e-3, formats=("bf16", ""))
    assert excess(standing_still(0.0), also_alone, sent, ROUNDING) is None
    assert (
        excess(standing_still(0.0), standing_still(1e-3), sent, dataclasses.replace(ROUNDING, is_narrow=True)) is None
    )


def test_parameters_that_change_although_updates_are_zero_are_found():
    moved = signatures([1.0, 2.0, 3.01], [4.0])
    found = excess(standing_still(0.0), standing_still(0.0), standing_still(0.0, parameters=moved), ROUNDING)
    assert (found.divergence.quantity, found.divergence.parameter) == ("parameters", "first.weight")


@pytest.mark.parametrize(("loss", "is_found"), [(1e-8, False), (1e-3, True)])
def test_replicas_and_approximated_gradients_are_judged_by_their_loss(loss, is_found):
    rounding = dataclasses.replace(ROUNDING, compares_gradients=False)
    found = excess(standing_still(0.0), standing_still(0.0), standing_still(0.5, loss=loss), rounding)
    assert (found is not None) == is_found


def test_steps_that_overflow_are_left_out():
    ours, theirs = standing_still(0.0), standing_still(0.0)
    lost = dataclasses.replace(theirs.steps[0], grad_norm=np.inf, gradients=np.full((2, 4), np.inf))
    theirs = dataclasses.replace(theirs, steps=(lost, *theirs.steps[1:]))
    assert excess(ours, ours, theirs, ROUNDING) is None
