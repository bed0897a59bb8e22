"""What is lost or changed on the disk is found, healed from its copy, or passed over for an older checkpoint; no bad input is followed."""

from __future__ import annotations

import shutil

import pytest
import torch
from saved_runs import assert_equal, catalog_of, make_newer, make_saver, read_all, save, shards, snapshot
from small_runs import Classify, WithBatchNorm, train_alone
from torch import nn

from scaleray.checkpoints.catalog import require
from scaleray.checkpoints.manifest import Incomplete
from scaleray.errors import CheckpointError

TENSORS = {"a": torch.arange(100.0), "b": torch.ones(7, 3)}


def truncate(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def remove(path):
    path.unlink()


def grow(path):
    path.write_bytes(path.read_bytes() + b"x")


DAMAGES = [truncate, flip_a_bit, remove, grow]


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_to_a_shard_is_found(tmp_path, damage):
    catalog = catalog_of(tmp_path)
    save(make_saver(catalog), 1, TENSORS)
    (file,) = shards(tmp_path)
    damage(file)
    (found,) = catalog.check(catalog.read(1))
    assert found.file == str(file) and found.is_lost and found.healed_from is None
    if damage is not grow:
        with pytest.raises(Incomplete, match="missing or damaged"):
            read_all(catalog, catalog.read(1))


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("damaged", [0, 1])
def test_a_damaged_shard_is_healed_from_the_other_place(tmp_path, damage, damaged):
    folders = [tmp_path / "run", tmp_path / "copies" / "run"]
    catalog = catalog_of(folders[0], tmp_path / "copies")
    save(make_saver(catalog), 1, TENSORS)
    before = snapshot(tmp_path)
    damage(shards(folders[damaged])[0])
    manifest = catalog.read(1)
    assert_equal(read_all(catalog, manifest), TENSORS)  # reading needs no healing
    (found,) = catalog.check(manifest, heal=False)
    assert not found.is_lost and found.healed_from is None and found.good_at == str(shards(folders[1 - damaged])[0])
    (found,) = catalog.check(manifest)
    assert found.healed_from == str(shards(folders[1 - damaged])[0])
    assert snapshot(tmp_path) == before
    assert catalog.check(manifest) == []


@pytest.mark.parametrize("damaged", [0, 1])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_manifest_is_healed_too(tmp_path, damaged, damage):
    catalog = catalog_of(tmp_path / "run", tmp_path / "copies")
    save(make_saver(catalog), 1, TENSORS)
    before = snapshot(tmp_path)
    damage(
        [tmp_path / "run", tmp_path / "copies" / "run"][damaged] / "checkpoints" / "step-000000001" / "manifest.json"
    )
    (found,) = catalog.check(catalog.read(1))
    assert found.file.endswith("manifest.json") and found.healed_from
    assert snapshot(tmp_path) == before


def test_a_whole_lost_place_is_rebuilt_from_the_other(tmp_path):
    catalog = catalog_of(tmp_path / "run", tmp_path / "copies")
    saver = make_saver(catalog)
    save(saver, 1, TENSORS)
    save(saver, 2, {**TENSORS, "b": torch.zeros(7, 3)})
    before = snapshot(tmp_path)
    shutil.rmtree(tmp_path / "run")
    for manifest in catalog.complete():
        assert all(damage.healed_from for damage in catalog.check(manifest))
    assert snapshot(tmp_path) == before


def test_a_damage_that_cannot_be_replaced_is_not_lost(tmp_path, monkeypatch):
    catalog = catalog_of(tmp_path / "run", tmp_path / "copies")
    save(make_saver(catalog), 1, TENSORS)
    flip_a_bit(shards(tmp_path / "run")[0])

    def refuse(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("scaleray.checkpoints.storage.Store.write", refuse)
    (found,) = catalog.check(catalog.read(1))
    assert "Read-only" in found.problem and found.healed_from is None and not found.is_lost


def test_damage_in_both_places_is_lost(tmp_path):
    catalog = catalog_of(tmp_path / "run", tmp_path / "copies")
    save(make_saver(catalog), 1, TENSORS)
    for file in shards(tmp_path):
        flip_a_bit(file)
    assert [found.is_lost for found in catalog.check(catalog.read(1))] == [True, True]


def test_a_folder_without_a_whole_manifest_does_not_exist(tmp_path):
    catalog = catalog_of(tmp_path)
    saver = make_saver(catalog)
    for step in (1, 2, 3):
        save(saver, step, TENSORS)
    folder = tmp_path / "checkpoints"
    (folder / "step-000000003" / "manifest.json").unlink()
    truncate(folder / "step-000000002" / "manifest.json")
    assert [m.step for m in catalog.complete()] == [1]
    assert require(catalog, None, where="here").step == 1
    with pytest.raises(CheckpointError, match=r"step 3 is incomplete.*not finished.*\n.*complete checkpoints: 1"):
        require(catalog, 3, where="here")
    with pytest.raises(CheckpointError, match="step 9 is missing"):
        require(catalog, 9, where="here")


def test_a_renamed_folder_is_no_checkpoint_of_its_new_step(tmp_path):
    catalog = catalog_of(tmp_path)
    save(make_saver(catalog), 1, TENSORS)
    (tmp_path / "checkpoints" / "step-000000001").rename(tmp_path / "checkpoints" / "step-000000002")
    with pytest.raises(Incomplete, match="is that of step 1"):
        catalog.read(2)


def test_a_place_that_does_not_answer_is_no_missing_checkpoint(tmp_path, monkeypatch):
    catalog = catalog_of(tmp_path)
    save(make_saver(catalog), 1, TENSORS)

    def busy(self, name):
        raise OSError(5, "the server answers 500")

    monkeypatch.setattr("scaleray.checkpoints.storage.Store.read", busy)
    with pytest.raises(OSError, match="500"):  # an older checkpoint, or none, would be taken for the newest
        catalog.newest()
    with pytest.raises(OSError, match="500"):
        catalog.prune(make_saver(catalog).retention)


FLAGS = {"checkpoint.every": "3 steps", "stop.after": "8 steps", "precision.dtype": "fp32", "optimizer.name": "adamw"}


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, remove])
def test_training_falls_back_to_an_older_checkpoint_and_says_so(tmp_path, damage):
    whole = train_alone(Classify(), FLAGS)
    train_alone(Classify(), FLAGS, folder=tmp_path, kill_at=7)
    damage(shards(tmp_path / "checkpoints" / "step-000000006")[0])
    resumed = train_alone(Classify(), FLAGS, folder=tmp_path)
    assert [s.step for s in resumed.steps] == [4, 5, 6, 7, 8]
    assert resumed.losses == whole.losses[3:]
    text = "\n".join(resumed.events)
    assert (
        "step 6" in text
        and "is damaged" in text
        and "the run resumes from an older one" in text
        and "resumed after step 3" in text
    )
    catalog = catalog_of(tmp_path)
    assert [m.step for m in catalog.complete()] == [8, 6]
    assert all(catalog.check(m) == [] for m in catalog.complete()), "step 6 was written anew"


def test_the_good_checkpoints_after_a_fall_back_are_not_pruned_for_a_damaged_newer_one(tmp_path):
    flags = {**FLAGS, "checkpoint.keep_last": 1}
    train_alone(Classify(), flags, folder=tmp_path, kill_at=7)
    flip_a_bit(shards(tmp_path / "checkpoints" / "step-000000006")[0])
    train_alone(Classify(), {**flags, "checkpoint.every": "1 steps"}, folder=tmp_path, kill_at=5)
    resumed = train_alone(Classify(), flags, folder=tmp_path)
    assert resumed.steps[0].step > 1, "what was saved since is still there"


def test_training_heals_a_checkpoint_from_its_copy_and_says_so(tmp_path):
    flags = {**FLAGS, "checkpoint.copies": 2, "checkpoint.copy_path": str(tmp_path / "copies")}
    whole = train_alone(Classify(), flags)
    train_alone(Classify(), flags, folder=tmp_path / "run", kill_at=7)
    remove(shards(tmp_path / "run" / "checkpoints" / "step-000000006")[0])
    resumed = train_alone(Classify(), flags, folder=tmp_path / "run")
    assert resumed.losses == whole.losses[6:]
    assert any("healed from" in event and "copies" in event for event in resumed.events)


def test_one_worker_heals_a_manifest_that_is_missing_in_one_place(tmp_path):
    flags = {**FLAGS, "checkpoint.copies": 2, "checkpoint.copy_path": str(tmp_path / "copies")}
    train_alone(Classify(), flags, folder=tmp_path / "run", kill_at=7)
    (manifest,) = (tmp_path / "copies").rglob("step-000000006/manifest.json")
    text = manifest.read_text()
    manifest.unlink()
    resumed = train_alone(Classify(), flags, folder=tmp_path / "run", kill_at=1)
    assert manifest.read_text() == text and any("missing, damaged" in event for event in resumed.events)


class Wider(Classify):
    def build_model(self):
        return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))


@pytest.mark.parametrize("other", [Wider, WithBatchNorm])
def test_another_model_is_refused_and_nothing_is_overwritten(tmp_path, other):
    train_alone(Classify(), FLAGS, folder=tmp_path, kill_at=4)
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointError, match="another model"):
        train_alone(other(), FLAGS, folder=tmp_path)
    assert snapshot(tmp_path) == before


def test_a_newer_format_stops_the_run_and_nothing_is_overwritten(tmp_path):
    train_alone(Classify(), FLAGS, folder=tmp_path, kill_at=7)
    make_newer(tmp_path / "checkpoints" / "step-000000006")
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointError, match="newer scaleray"):
        train_alone(Classify(), FLAGS, folder=tmp_path)
    with pytest.raises(CheckpointError, match="newer scaleray"):
        catalog_of(tmp_path).prune(make_saver(catalog_of(tmp_path)).retention)
    assert snapshot(tmp_path) == before
