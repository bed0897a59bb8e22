"""Saved by some ranks, read by others: replicated and sharded tensors, collectively and alone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from saved_runs import assert_equal, catalog_of, flip, make_saver, read_all, save, shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from scaleray.checkpoints import sharded
from scaleray.checkpoints.consolidated import load_weights
from scaleray.checkpoints.manifest import Incomplete
from scaleray.errors import CheckpointError

WHOLE = {
    "rows": torch.arange(70.0).reshape(10, 7), "columns": torch.arange(33).reshape(3, 11), "small": torch.arange(2.0), "scalar": torch.tensor(4.0),
    "plain": torch.arange(5, dtype=torch.bfloat16), "empty": torch.zeros(0, 4),
}  # fmt: skip
PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "small": Shard(0), "scalar": Replicate(), "empty": Shard(0)}


def spread(world_size, tensors, placements=PLACEMENTS):
    """The tensors as one rank holds them."""
    if world_size == 1:
        return {name: tensor.clone() for name, tensor in tensors.items()}
    mesh = init_device_mesh("cpu", (world_size,))
    return {
        name: distribute_tensor(tensor.clone(), mesh, [placements[name]]) if name in placements else tensor.clone()
        for name, tensor in tensors.items()
    }


def save_in(place, folder, steps=1):
    group = dist.new_group(backend="gloo") if place.world_size > 1 else None
    saver = make_saver(catalog_of(folder), group=group, world_size=place.world_size)
    for step in range(1, steps + 1):
        save(saver, step, spread(place.world_size, {**WHOLE, "small": WHOLE["small"] + step - 1}))


def load_in(place, folder, is_collective, other_placements):
    """The tensors as read by these ranks, whole again."""
    placements = {**PLACEMENTS, "rows": Shard(1), "columns": Replicate()} if other_placements else PLACEMENTS
    group = place.group if is_collective else None
    into = spread(place.world_size, {name: torch.full_like(t, 77) for name, t in WHOLE.items()}, placements)
    catalog = catalog_of(folder)
    sharded.load({f"model.{name}": t for name, t in into.items()}, catalog.stores, catalog.newest(), group)
    weights = spread(place.world_size, {name: torch.full_like(t, 77) for name, t in WHOLE.items()}, placements)
    assert load_weights(weights, str(folder), group=group).step == 1
    return [
        {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in tensors.items()}
        for tensors in (into, weights)
    ]


@pytest.mark.always("[1]")
@pytest.mark.parametrize("saved_by", [4, 1])
def test_what_4_ranks_saved_is_read_by_any_number(gloo, tmp_path, saved_by):
    gloo.run(saved_by, save_in, str(tmp_path))
    catalog = catalog_of(tmp_path)
    assert_equal(read_all(catalog, catalog.newest()), WHOLE)
    assert len(shards(tmp_path)) == saved_by
    for world_size in (1, 2, 3, 4):
        for is_collective in (True, False):
            for other_placements in (True, False):
                for result in gloo.run(world_size, load_in, str(tmp_path), is_collective, other_placements):
                    for tensors in result:
                        assert_equal(tensors, WHOLE)


def test_unchanged_shards_are_not_written_again(gloo, tmp_path):
    gloo.run(4, save_in, str(tmp_path), 3)
    newest = catalog_of(tmp_path).newest()
    assert newest.step == 3 and newest.bytes_written <= 128, "two small shards, padded"
    assert_equal(read_all(catalog_of(tmp_path), newest), {**WHOLE, "small": WHOLE["small"] + 2})


def load_damaged(place, folder, reads_weights):
    into = spread(place.world_size, {name: torch.full_like(t, 77) for name, t in WHOLE.items()})
    catalog = catalog_of(folder)
    try:
        if reads_weights:
            load_weights(into, folder, group=place.group)
        else:
            sharded.load(
                {f"model.{name}": t for name, t in into.items()}, catalog.stores, catalog.newest(), place.group
            )
    except (Incomplete, CheckpointError) as exc:
        return type(exc), str(exc)
    return None


@pytest.mark.parametrize(("reads_weights", "expected"), [(False, Incomplete), (True, CheckpointError)])
def test_damage_that_one_rank_meets_is_told_on_all(gloo, tmp_path, reads_weights, expected):
    gloo.run(4, save_in, str(tmp_path))
    flip(shards(tmp_path)[0], 3)
    outcomes = gloo.run(3, load_damaged, str(tmp_path), reads_weights)
    assert {kind for kind, _ in outcomes} == {expected}
    assert all("missing or damaged" in text for _, text in outcomes)


def load_from_nowhere(place, folder):
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        load_weights({"a": torch.zeros(1)}, folder, group=place.group)


def test_a_folder_without_checkpoints_is_told_on_all_ranks(gloo, tmp_path):
    gloo.run(3, load_from_nowhere, str(tmp_path))
