"""Numbers that the host knows and numbers of a device go through the same arithmetic, to the bit."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scaleray.strategies.contract.numbers import Unread, as_factor, choose, is_finite, ratio, together

FINITE = st.floats(allow_nan=False, allow_infinity=False, width=64)
CPU = torch.device("cpu")


def there(value):
    return torch.tensor(value, dtype=torch.float64)


def same(known, computed):
    return known == computed.item() or (math.isnan(known) and math.isnan(computed))


@given(part=FINITE, whole=FINITE.filter(lambda value: value != 0))
def test_a_quotient_has_the_same_bits_whoever_knows_its_parts(part, whole):
    known = ratio(part, whole)
    assert all(same(known, found) for found in (ratio(part, there(whole)), ratio(there(part), whole)))
    assert same(known, ratio(there(part), there(whole)))


@pytest.mark.parametrize("whole", [0.0, -0.0])
def test_nothing_counted_gives_no_finite_quotient(whole):
    assert not is_finite(ratio(3.0, whole)) and not is_finite(ratio(3.0, there(whole)))


@pytest.mark.parametrize(("value", "expected"), [(1.5, True), (math.inf, False), (-math.inf, False), (math.nan, False)])
def test_what_is_finite(value, expected):
    assert is_finite(value) is expected and is_finite(there(value)).item() is expected


@given(value=st.floats(-1e4, 1e4), factor=st.floats(-1e3, 1e3))
def test_a_factor_is_rounded_to_the_type_of_the_tensor_first(value, factor):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        tensor = torch.tensor(value, dtype=dtype)
        assert torch.equal(tensor * as_factor(factor, dtype), tensor * as_factor(there(factor), dtype))


def test_a_choice_of_numbers_and_of_tensors():
    assert choose(True, 1.0, 2.0) == choose(torch.tensor(True), there(1.0), 2.0).item() == 1.0
    assert choose(torch.tensor(False), torch.ones(3), torch.zeros(3)).tolist() == [0.0] * 3


@pytest.mark.parametrize(
    "numbers", [[1.0, 2, True], [there(1.0), 2.0, torch.tensor(True)], [there(1.0), there(2.0), 1.0]]
)
def test_numbers_of_both_kinds_keep_their_order(numbers):
    assert together(numbers, CPU).tolist() == [1.0, 2.0, 1.0]
    unread = Unread([*numbers, None])
    unread.wait()
    assert unread.read() == [1.0, 2.0, 1.0, None]
