"""steps.csv in a bucket: as many bytes as the run has rows, whole after every checkpoint, and after a kill at any write."""

from __future__ import annotations

import json
import shutil

import pytest
from fake_mlflow import FakeMlflow
from test_recorder import describe, step

from scaleray.checkpoints.storage import Store
from scaleray.live import published_steps
from scaleray.live.published_steps import PublishedSteps, read
from scaleray.live.steps_file import parse
from scaleray.recording.recorder import Recorder

EVERY = 20  # steps from one checkpoint to the next


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(published_steps, "PART_BYTES", 4000)
    monkeypatch.setattr("os.fsync", lambda file: None)  # no power fails here


class Counting(Store):
    """A store that counts, and ends the process, as it were, at a write or a deletion."""

    def __init__(self, root, end=None):
        super().__init__(root)
        object.__setattr__(self, "left", [end])
        object.__setattr__(self, "sent", [])

    def _act(self):
        if self.left[0] is not None:
            if not self.left[0]:
                raise KeyboardInterrupt
            self.left[0] -= 1

    def write(self, name, pieces, *, known=""):
        pieces = list(pieces)
        self._act()
        self.sent.append((name, sum(map(len, pieces))))
        return super().write(name, pieces)

    def delete(self, name):
        self._act()
        super().delete(name)


def rows(first, last):
    return "".join(f"{n},{1 / n!r},8.0,8,0.1,,0.5,0.1,0.1,True,1,1e9,\n" for n in range(first, last + 1))


def header():
    from scaleray.live.steps_file import STEP_COLUMNS

    return ",".join(STEP_COLUMNS) + "\n"


def published(path, store, num_checkpoints):
    """Send after every checkpoint of a run, and check what is there; gives the bytes."""
    steps = PublishedSteps(path, store)
    path.write_text(header())
    for number in range(num_checkpoints):
        with open(path, "a") as file:
            file.write(rows(EVERY * number + 1, EVERY * (number + 1)))
        steps.send(1)
        assert read(store, path.name) == path.read_bytes()
    return sum(count for _, count in store.sent)


@pytest.mark.combination
def test_what_is_sent_grows_as_the_run_does_and_not_as_its_square(tmp_path, small_parts):
    sent = [
        published(tmp_path / "steps.csv", Counting(str(tmp_path / str(number))), number) for number in (50, 100, 200)
    ]
    assert sent[1] < 2.2 * sent[0] and sent[2] < 2.2 * sent[1]
    assert sent[2] < 200 * (4000 + 2 * EVERY * len(rows(100, 100)))  # a part and what is new, with every checkpoint
    assert (tmp_path / "200" / "steps.csv").stat().st_size < 4100
    assert len(Store(str(tmp_path / "200")).names()) < (tmp_path / "steps.csv").stat().st_size / 4000 + 1


def test_a_short_run_has_no_other_file_than_before(tmp_path):
    store = Counting(str(tmp_path / "bucket"))
    published(tmp_path / "steps.csv", store, 30)
    assert store.names() == ["steps.csv"]


def test_nothing_is_sent_where_nothing_is_new(tmp_path, small_parts):
    store = Counting(str(tmp_path / "bucket"))
    published(tmp_path / "steps.csv", store, 1)
    steps = PublishedSteps(tmp_path / "steps.csv", store)
    steps.send(1)
    before = len(store.sent)
    steps.send(1)
    assert len(store.sent) == before


def test_rows_that_changed_are_sent_again_and_parts_that_are_no_more_go(tmp_path, small_parts):
    path, store = tmp_path / "steps.csv", Counting(str(tmp_path / "bucket"))
    steps = PublishedSteps(path, store)
    for version, last in ((1, 900), (2, 300), (3, 600)):
        path.write_text(header() + rows(1, last).replace(",8.0,", f",{version}.0,"))
        steps.send(version)
        assert read(store, "steps.csv") == path.read_bytes()
    steps.join()
    assert store.names() == ["steps.csv"] and store.read("steps.csv") == path.read_bytes()


@pytest.mark.parametrize("before", ["whole", "parts"])
def test_a_kill_at_any_write_of_a_run_that_goes_on_loses_no_row_that_was_there(tmp_path, small_parts, before):
    path, number, is_over = tmp_path / "steps.csv", 0, False
    while not is_over:
        root = tmp_path / f"bucket-{number}"
        path.write_text(header() + rows(1, 300))
        if before == "whole":  # as versions before wrote it
            Store(str(root)).write("steps.csv", [path.read_bytes()])
        else:
            PublishedSteps(path, Store(str(root))).send(1)
        killed = Counting(str(root), end=number)
        again = PublishedSteps(path, killed)
        try:
            again.send(1)
            with open(path, "a") as file:
                file.write(rows(301, 420))
            again.send(1)
            again.join()
            is_over = True
        except KeyboardInterrupt:
            pass
        found, damage = parse(read(Store(str(root)), "steps.csv"))
        assert list(found)[:300] == list(range(1, 301)) and list(found) == list(range(1, len(found) + 1))
        assert damage == ""
        number += 1
    assert number > 12 and Store(str(root)).names() == ["steps.csv"] and len(found) == 420


def test_a_run_goes_on_elsewhere_from_the_parts_and_ends_with_one_file(tmp_path, monkeypatch, small_parts):
    FakeMlflow().install(monkeypatch)
    bucket = tmp_path / "bucket"
    where = {"run_path": str(bucket)}
    recorder = Recorder(describe(f"sqlite:///{tmp_path}/none.db", tmp_path, **where))
    recorder.start()
    for first in (1, 101):
        recorder.log([step(n, loss=1 / n, recorded_at=1e9 + n) for n in range(first, first + 100)])
        recorder.durable()
    assert len([one for one in bucket.iterdir() if one.name.startswith("steps")]) > 2
    shutil.rmtree(tmp_path / "run")  # the node is lost
    about = json.loads((bucket / "run.json").read_text())
    again = Recorder(describe(f"sqlite:///{tmp_path}/none.db", tmp_path, continues=about, **where))
    again.start()
    again.log([step(n, loss=1 / n, recorded_at=1e9 + n) for n in range(201, 251)])
    again.durable()
    events = again.drain().events
    again.finish("FINISHED", metrics={}, tags={}, files={})
    found, damage = parse((bucket / "steps.csv").read_bytes())
    assert (list(found), damage, events) == (list(range(1, 251)), "", [])
    assert [one.name for one in bucket.iterdir() if one.name.startswith("steps")] == ["steps.csv"]
