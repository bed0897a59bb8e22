"""Modes and rates of layers, number formats, and the rows that a loss is given."""

import copy
import pickle

import numpy as np
import torch
from torch import nn

from scaleray.verification.traces.layer_settings import Given, TakenOut, alike, formats_of, layers_of, taken_out, widest


def test_a_rate_that_is_taken_out_is_zero_and_keeps_what_it_stands_for():
    rate = TakenOut(0.5)
    assert rate == 0.0 and taken_out(rate) == 0.5 and taken_out(0.25) == 0.25
    assert taken_out(rate / 2) == 0.25 and taken_out(rate * 2) == 1.0 and rate / 2 == 0.0
    assert taken_out(copy.deepcopy(rate)) == taken_out(pickle.loads(pickle.dumps(rate))) == 0.5


def test_layers_have_modes_and_settings():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Tanh(), nn.BatchNorm1d(2))
    model[1].eval()
    found = layers_of(model)
    assert found["0"] == (True, ()) and found["1"] == (False, (("p", 0.5),))
    assert "2" not in found and dict(found["3"][1]) == {"momentum": 0.1, "eps": 1e-5}


def test_a_layer_whose_class_fsdp_has_replaced_keeps_its_settings():
    sharded = nn.BatchNorm1d(2)
    sharded.__class__ = type("FSDPBatchNorm1d", (nn.BatchNorm1d,), {"__module__": "torch.distributed.fsdp"})
    assert layers_of(nn.Sequential(sharded)) == layers_of(nn.Sequential(nn.BatchNorm1d(2)))


def test_ranks_with_other_layers_have_none_in_common():
    assert alike([{"0": (True, ())}, {"0": (False, ()), "1": (True, ())}]) == {"0": None, "1": (True, ())}


def test_formats_leave_out_tensors_of_one_value():
    narrow, wide = torch.tensor([1.0, 0.1]).bfloat16(), torch.tensor([1.0, 0.1], dtype=torch.float64)
    found = formats_of({"narrow": narrow.double(), "float32": wide.float(), "wide": wide, "ones": torch.ones(3)})
    assert found == {"narrow": "bf16", "float32": "fp32", "wide": ""}
    assert widest([{"a": "bf16"}, {"a": "fp32", "b": ""}]) == {"a": "fp32", "b": ""}


def test_rows_are_the_same_however_they_are_cut_and_in_whichever_type():
    x, y = torch.randn(6, 3), torch.arange(6)
    whole, cut, shifted = Given(), Given(), Given()
    whole.take({"x": x.double(), "y": y})
    for part in (slice(0, 2), slice(2, 6)):
        cut.take((x[part], y[part]))
    shifted.take({"x": x, "y": y.roll(1)})
    assert np.array_equal(whole.rows, cut.rows) and not np.isin(whole.rows, shifted.rows).any()
    assert whole.formats == {"rows' x": "fp32"}
