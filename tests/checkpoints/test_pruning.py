"""Which checkpoints stay, and that whatever stays can be read: after any policy, any order of saves, and any broken-off operation."""

from __future__ import annotations

import os
import tempfile
import time
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from saved_runs import assert_equal, catalog_of, make_saver, read_all, save, snapshot

from scaleray.checkpoints.manifest import Manifest, folder_name
from scaleray.checkpoints.retention import Retention
from scaleray.checkpoints.storage import Store
from scaleray.records.run_record import CheckpointRecord


def manifests(**metrics):
    return [manifest_of(int(step[1:]), m, evaluated_at=int(step[1:])) for step, m in metrics.items()]


def manifest_of(step, metrics, **more):
    return Manifest(step, 1, "ddp", 0.0, {}, {}, {}, {"metrics": metrics, **more})


STORED = manifests(
    s10={"val/loss": 3.0},
    s20={"val/loss": 1.0},
    s30={},
    s40={"val/loss": float("nan")},
    s50={"val/loss": 2.0},
    s60={"val/loss": 1.0},
)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (Retention(keep_last=1), {60}),
        (Retention(keep_last=3), {40, 50, 60}),
        (Retention(keep_last=100), {10, 20, 30, 40, 50, 60}),
        (Retention(keep_last=1, keep_best=1, best="val/loss"), {20, 60}),  # of equal ones the older
        (Retention(keep_last=1, keep_best=3, best="val/loss"), {20, 50, 60}),
        (Retention(keep_last=1, keep_best=1, best="val/loss", is_higher_better=True), {10, 60}),
        (Retention(keep_last=1, keep_best=1, best="val/accuracy"), {60}),
        (Retention(keep_last=1, keep_every=20), {20, 40, 60}),
        (Retention(keep_last=1, keep_best=1, best="val/loss", keep_every=30), {20, 30, 60}),
    ],
)
def test_what_a_policy_keeps(policy, kept):
    assert policy.kept(STORED) == kept


def test_metrics_of_an_older_step_or_of_an_unknown_one_rank_nothing():
    stored = [
        manifest_of(10, {"val/loss": 3.0}, evaluated_at=10),
        manifest_of(20, {"val/loss": 1.0}, evaluated_at=10),
        manifest_of(30, {"val/loss": 1.0}),
        manifest_of(40, {}, evaluated_at=None),
    ]
    assert Retention(keep_last=1, keep_best=1, best="val/loss").kept(stored) == {10, 40}


def tensors_at(numbers):
    """Four tensors whose values say when each was changed last."""
    return {f"t{i}": torch.full((5, i + 1), float(number)) for i, number in enumerate(numbers)}


actions = st.lists(
    st.one_of(
        st.tuples(st.just("save"), st.sets(st.integers(0, 3))),
        st.tuples(
            st.just("prune"),
            st.builds(Retention, st.integers(1, 3), st.just(1), st.just("m"), keep_every=st.sampled_from([None, 2, 3])),
        ),
        st.tuples(st.just("rebuild"), st.integers(0, 10)),
        st.tuples(st.just("resume"), st.integers(0, 3)),
    ),
    max_size=12,
)


@pytest.mark.combination
@settings(max_examples=60)
@given(actions, st.integers(1, 5), st.booleans())
def test_everything_kept_can_be_read_after_any_sequence(sequence, full_every, is_copied):
    with tempfile.TemporaryDirectory() as folder:
        catalog = catalog_of(f"{folder}/run", f"{folder}/copies" if is_copied else None)
        messages = []
        saver = make_saver(catalog, full_every=full_every, keep_last=3, messages=messages)
        state, step, expected = [0, 0, 0, 0], 0, {}
        for what, argument in sequence:
            if what == "save":
                step += 1
                state = [step if i in argument else old for i, old in enumerate(state)]
                tensors = tensors_at(state)
                save(saver, step, tensors, metrics={"m": (step * 7) % 5})
                if isinstance(messages[-1], CheckpointRecord):
                    expected[step] = tensors
                else:  # after a resume from an older one, which was pruned as newer ones were still there
                    assert "is missing" in messages[-1].text
                    save(saver, step, tensors, metrics={"m": (step * 7) % 5})  # now in full
                    expected[step] = tensors
            elif what == "prune":
                catalog.prune(argument)
            elif what == "rebuild" and (found := list(catalog.complete())):
                rebuilt = catalog.rebuild(found[argument % len(found)])
                assert rebuilt.chain == 0 and all(name.startswith(rebuilt.name) for name in rebuilt.files)
            elif what == "resume" and (found := list(catalog.complete())):
                chosen = found[argument % len(found)]
                step = chosen.step
                saver = make_saver(catalog, full_every=full_every, keep_last=3, messages=messages)
                state = [int(expected[step][f"t{i}"].flatten()[0]) for i in range(4)]
                saver.start_from(chosen)
        for manifest in catalog.complete():
            assert catalog.check(manifest, heal=False) == []
            assert_equal(read_all(catalog, manifest), expected[manifest.step])
            assert manifest.chain < full_every
        assert bool(expected) == (catalog.newest() is not None)


def test_files_that_a_kept_checkpoint_names_survive_pruning(tmp_path):
    catalog = catalog_of(tmp_path)
    saver = make_saver(catalog, keep_last=1)
    for step in (1, 2, 3):
        save(saver, step, tensors_at([step, 1, 1, 1]))
    assert [m.step for m in catalog.complete()] == [3]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [folder_name(1), folder_name(3)]
    assert_equal(read_all(catalog, catalog.read(3)), tensors_at([3, 1, 1, 1]))
    catalog.rebuild(catalog.read(3))
    catalog.prune(saver.retention)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [folder_name(3)]
    assert_equal(read_all(catalog, catalog.read(3)), tensors_at([3, 1, 1, 1]))


def test_rebuilding_twice_does_not_read_what_it_writes(tmp_path):
    catalog = catalog_of(tmp_path)
    saver = make_saver(catalog)
    save(saver, 1, tensors_at([1, 1, 1, 1]))
    save(saver, 2, tensors_at([2, 1, 1, 1]))
    for _ in range(3):
        catalog.rebuild(catalog.read(2))
    assert_equal(read_all(catalog, catalog.read(2)), tensors_at([2, 1, 1, 1]))


def test_a_step_that_is_saved_again_leaves_older_and_newer_checkpoints_whole(tmp_path):
    catalog = catalog_of(tmp_path)
    saver = make_saver(catalog)
    for step in (1, 2, 3):
        save(saver, step, tensors_at([step, 1, 1, 1]))
    again = make_saver(catalog)
    save(again, 1, tensors_at([1, 9, 9, 9]))  # step 2 and 3 name files of the first attempt at step 1
    expected = {1: [1, 9, 9, 9], 2: [2, 1, 1, 1], 3: [3, 1, 1, 1]}
    for manifest in catalog.complete():
        assert catalog.check(manifest) == []
        assert_equal(read_all(catalog, manifest), tensors_at(expected[manifest.step]))


def test_what_broken_attempts_left_is_removed_and_young_files_are_spared(tmp_path):
    catalog = catalog_of(tmp_path)
    saver = make_saver(catalog)
    save(saver, 2, tensors_at([1, 1, 1, 1]))
    before = snapshot(tmp_path)
    for name in (
        "step-000000001/rank-00000-aa.bin",
        "step-000000002/rank-00000-bb.bin",
        "step-000000002/manifest.json.cc.part",
    ):
        Store(f"{tmp_path}/checkpoints").write(name, [b"left over"])
    newer = tmp_path / "checkpoints" / "step-000000009" / "rank-00000-dd.bin"
    Store(f"{tmp_path}/checkpoints").write("step-000000009/rank-00000-dd.bin", [b"being written"])
    assert catalog.prune(saver.retention, spared_s=60, is_dry_run=True).num_bytes == 0
    assert catalog.prune(saver.retention, is_dry_run=True).num_bytes == 27
    catalog.prune(saver.retention, spared_s=60)
    assert len(snapshot(tmp_path)) == len(before) + 4
    os.utime(newer.parent.parent / "step-000000001" / "rank-00000-aa.bin", (time.time() - 100,) * 2)
    catalog.prune(saver.retention, spared_s=60)
    assert len(snapshot(tmp_path)) == len(before) + 3
    catalog.prune(saver.retention)
    newer.unlink()
    assert snapshot(tmp_path) == before


class Killed(BaseException):
    """Nothing expects it, as nothing expects a SIGKILL."""


class KillBefore:
    """Ends the program before its nth change of a file."""

    def __init__(self, number):
        self.number, self.done = number, 0

    def watch(self, function):
        def changed(*args, **options):
            if self.done == self.number:
                raise Killed
            self.done += 1
            return function(*args, **options)

        return changed

    def __enter__(self):
        import pyarrow.fs

        real = pyarrow.fs.LocalFileSystem()
        deleting = mock.Mock(wraps=real)
        deleting.delete_file, deleting.delete_dir = self.watch(real.delete_file), self.watch(real.delete_dir)
        self.patches = [
            mock.patch("os.replace", self.watch(os.replace)),
            mock.patch("os.fsync", self.watch(os.fsync)),
            mock.patch("pyarrow.fs.LocalFileSystem", return_value=deleting),
            mock.patch("scaleray.checkpoints.sharded.ShardWriter.discard"),  # a killed process tidies nothing up
            mock.patch("pathlib.Path.unlink"),
        ]
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *error):
        for patch in self.patches:
            patch.stop()


@pytest.mark.always("save-False", "save-True")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize("what", ["save", "save again", "prune", "rebuild"])
def test_a_program_that_is_killed_anywhere_leaves_the_old_state_or_the_new(tmp_path, what, is_copied):
    for number in range(200):
        folder = tmp_path / f"{what}-{number}"
        places = (folder / "run", folder / "copies" if is_copied else None)
        saver = make_saver(catalog_of(*places))
        expected = {step: tensors_at([step, 1, 1, step // 3]) for step in range(1, 5)}
        for step, tensors in expected.items():
            save(saver, step, tensors)
        before = {1, 2, 3, 4}
        after = {"save": {4, 5}, "prune": {2, 4}}.get(what, before)
        killer, catalog = KillBefore(number), catalog_of(*places)
        changed = {5: tensors_at([5, 5, 1, 1])} if what == "save" else {}
        with killer:
            try:
                if what == "save":
                    saver.catalog, saver.retention = catalog, Retention(keep_last=2)
                    save(saver, 5, changed[5])
                elif what == "save again":
                    second = make_saver(catalog)
                    changed = {1: tensors_at([7, 7, 7, 7])}
                    save(second, 1, changed[1])
                elif what == "prune":
                    catalog.prune(Retention(keep_last=1, keep_every=2))
                else:
                    catalog.rebuild(catalog.read(4))
            except Killed:
                pass
        catalog = catalog_of(*places)
        steps = set()
        for manifest in catalog.complete():
            steps.add(manifest.step)
            assert not any(damage.is_lost for damage in catalog.check(manifest)), (number, manifest.step)
            found = read_all(catalog, manifest)
            if manifest.step in changed and (
                manifest.step not in expected or found["t1"][0, 0] == changed[manifest.step]["t1"][0, 0]
            ):
                assert_equal(found, changed[manifest.step])
            else:
                assert_equal(found, expected[manifest.step])
        assert steps <= before | after and steps >= before & after, (number, steps)
        newest = catalog.newest()
        goes_on = make_saver(catalog, keep_last=1)
        goes_on.start_from(newest)
        save(goes_on, 6, tensors_at([6, 6, 6, 6]))
        assert_equal(read_all(catalog, catalog.read(6)), tensors_at([6, 6, 6, 6]))
        assert [m.step for m in catalog.complete()] == [6], "what the kill left is gone too"
        for place in filter(None, places):
            names = {path.name.rpartition("-")[0] or path.name for path in place.rglob("*") if path.is_file()}
            assert names == {"manifest.json", "rank-00000"}, number
        if killer.done < killer.number:
            break
    assert number > 1, "nothing was killed"
