"""How a gradient's values come from those that are due, and the class of cause that this shows."""

import pytest
import torch

from scaleray.verification.causes.cause_classes import Cause, Layout
from scaleray.verification.causes.gradient_values import from_values, relation_of

DUE = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
PARAMETER = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def without_last_row(due):
    return torch.cat([due[:-1], torch.zeros(1, 4)])


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda due: 2 * due, Cause.DOUBLE_SYNCHRONISATION),
        (lambda due: 0.5 * due, Cause.DOUBLE_SYNCHRONISATION),
        (lambda due: 0.7 * due, Cause.LOSS_NORMALISATION),
        (without_last_row, Cause.MISSING_SYNCHRONISATION),
        (torch.zeros_like, Cause.MISSING_SYNCHRONISATION),
        (lambda due: due.roll(3, 0), Cause.MISSING_SYNCHRONISATION),
        (lambda due: due + 0.1 * PARAMETER, Cause.UPDATE),
        (lambda due: due.bfloat16().double(), Cause.DTYPE),
    ],
)
def test_the_values_show_the_cause(change, cause):
    relation = relation_of(change(DUE), DUE, PARAMETER)
    assert from_values({"0.weight": relation}, 4, Layout(2, 1)).cause == cause


def test_equal_gradients_have_no_relation_and_no_cause():
    assert relation_of(DUE + 1e-12, DUE, PARAMETER) is None
    assert from_values({}, 4, Layout(2, 1)) is None


def test_values_that_have_nothing_in_common_show_no_cause():
    assert from_values({"0.weight": relation_of(DUE.square(), DUE, PARAMETER)}, 4, Layout(2, 1)) is None
