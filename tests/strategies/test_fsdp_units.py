"""What becomes a unit of FSDP, and how many of them may be gathered ahead."""

from __future__ import annotations

import pytest
from deep_net import Deep, Net
from small_runs import Tokens
from torch import nn

from scaleray.config.fsdp import FsdpSettings
from scaleray.errors import ConfigError, WorkloadError
from scaleray.records.text.units import GIB
from scaleray.strategies.sharding.fsdp_units import Units, choose_units, prefetch_distance


def units_of(model, workload=None, **settings):
    return choose_units(model, FsdpSettings(**settings), workload)


def test_the_units_are_the_blocks_and_the_rest_is_the_roots():
    units = units_of(Net(11), Deep())
    assert units.names == [f"blocks.{n}" for n in range(4)]
    assert units.sizes == [125] * 4 and units.root_size == 55 + 10 and units.notes == []


def test_without_blocks_the_model_is_one_unit_and_a_note_says_so():
    units = units_of(Net(11), Tokens())
    assert units.modules == [] and units.root_size == 4 * 125 + 65
    assert "whole model is one unit" in units.notes[0]


@pytest.mark.parametrize("least", [1, 10, 60, 125, 126, 10**6])
def test_every_unit_by_size_is_large_enough_and_every_parameter_is_in_one(least):
    units = units_of(Net(11), wrap="size", wrap_min_parameters=least)
    assert all(size >= least for size in units.sizes)
    assert sum(units.sizes) + units.root_size == 4 * 125 + 65
    assert not any(isinstance(module, nn.ModuleList) for module in units.modules)


def test_a_unit_that_shares_a_parameter_with_the_rest_is_left_to_the_root():
    units = units_of(Net(11), wrap="class", wrap_classes=("Embedding", "Linear"))
    assert [name for name in units.names if "blocks" not in name] == [] and len(units.names) == 8
    assert any("embedding is not a separate unit" in note for note in units.notes)
    assert any("head is not a separate unit" in note for note in units.notes)


def test_a_class_that_the_model_does_not_have_is_refused_with_those_it_has():
    with pytest.raises(ConfigError, match=r"Blok.*Block, Embedding"):
        units_of(Net(11), wrap="class", wrap_classes=("Blok",))


def test_blocks_of_another_model_are_refused():
    class Other(Deep):
        def blocks(self, model):
            return [nn.Linear(1, 1)]

    with pytest.raises(WorkloadError, match="blocks"):
        units_of(Net(11), Other())


@pytest.mark.parametrize(("parameters", "distance"), [(10**6, 3), (65 + 4 * 125, 3), (65 + 3 * 125, 2), (65 + 125, 0)])
def test_the_bound_on_gathered_parameters_shortens_the_prefetch(parameters, distance):
    settings = FsdpSettings(prefetch=3, max_unsharded_gib=parameters * 4 / GIB)
    assert prefetch_distance(units_of(Net(11), Deep()), settings, bytes_per_parameter=4) == distance


@pytest.mark.parametrize(("gathered", "distance"), [(11, 2), (10, 1), (9, 1), (8, 0), (7, 0)])
def test_the_bound_holds_where_units_are_largest_together_wherever_that_is(gathered, distance):
    units = Units([], [], sizes=[1, 1, 2, 7, 2], root_size=0, notes=[])  # 11 of three in a row, 9 of two
    settings = FsdpSettings(prefetch=2, max_unsharded_gib=gathered * 4 / GIB)
    assert prefetch_distance(units, settings, bytes_per_parameter=4) == distance


def test_a_bound_below_one_unit_is_refused_with_what_it_takes():
    units = units_of(Net(11), Deep())
    with pytest.raises(ConfigError, match="largest unit"):
        prefetch_distance(units, FsdpSettings(max_unsharded_gib=189 * 4 / GIB), bytes_per_parameter=4)
    settings = FsdpSettings(max_unsharded_gib=564 * 4 / GIB, reshard_after_forward=False)
    with pytest.raises(ConfigError, match="whole model"):
        prefetch_distance(units, settings, bytes_per_parameter=4)
