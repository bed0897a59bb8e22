"""Fetched models on one machine: several processes, how many stay, and where they lie."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from scaleray.errors import TrackingError
from scaleray.models import fetched
from scaleray.models.registry import STATEMENT_TAG, ModelVersion
from scaleray.records.statement import STATEMENT, digests, file_digest

DAY_S = 86400


class Registry:
    """Versions whose files are copied from folders. meanwhile: what happens while one is fetched."""

    def __init__(self, folder):
        self.folder, self.meanwhile, self.downloads, self.tags = folder, lambda: None, 0, {}

    def __call__(self, uri):
        return self

    def find(self, named):
        place = self.folder / str(named.number)
        (place / fetched.MODEL).mkdir(parents=True, exist_ok=True)
        (place / fetched.MODEL / "weights").write_text(f"weights {named.number}")
        whole = [{"name": name, "digest": {"sha256": digest}} for name, digest in digests(place).items()]
        (place / STATEMENT).write_text(json.dumps({"subject": whole}))
        tags = {STATEMENT_TAG: file_digest(place / STATEMENT), **self.tags}
        return ModelVersion("digits", named.number, str(place), "run", tags)

    def download(self, version, folder):
        self.downloads += 1
        found = Path(shutil.copytree(version.source, folder / "found"))
        self.meanwhile()
        return found


@pytest.fixture
def registry(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fetched, "own_folder", lambda: tmp_path, raising=False)
    made = Registry(tmp_path / "registry")
    monkeypatch.setattr(fetched, "ModelRegistry", made)
    return made


def fetch(number):
    return fetched.fetch_model(f"models:/digits/{number}")


def kept(place):
    return list(place.parents[2].iterdir())


def test_of_two_processes_that_fetch_one_model_none_takes_away_what_the_other_reads(registry):
    first = []

    def other_process():
        registry.meanwhile = lambda: None
        first.append(fetch(1))
        first.append((first[0] / "weights").stat().st_ino)

    registry.meanwhile = other_process
    second = fetch(1)
    assert (first[0] / "weights").stat().st_ino == first[1], "the very file that the first one reads"
    assert (second / "weights").read_text() == "weights 1" and len(kept(second)) == 1
    assert fetch(1) == second and registry.downloads == 2


def test_a_model_that_was_changed_here_is_fetched_again_and_not_taken_from_a_reader(registry):
    changed = fetch(1)
    (changed / "weights").write_text("others")
    assert (fetch(1) / "weights").read_text() == "weights 1" and (changed / "weights").exists()


def test_models_that_were_not_used_for_a_day_are_removed_but_for_the_newest(registry):
    places = [fetch(number) for number in range(1, 7)]
    assert len(kept(places[0])) == 6, "other processes may read them"
    for age, place in enumerate(reversed(places), start=1):
        os.utime(place.parents[1], (time.time() - age * 2 * DAY_S,) * 2)
    cut_off = places[0].parents[2] / "tmp-of-a-killed-process"
    cut_off.mkdir()
    os.utime(cut_off, (0, 0))
    fetch(2)  # is used again
    last = fetch(7)
    assert {place.parents[1] for place in (places[5], places[1], last)} == set(kept(last))


def test_models_lie_in_a_folder_of_this_user_on_a_disk(registry, tmp_path, monkeypatch):
    place = fetch(1)
    assert place.is_relative_to(tmp_path / "cache") and place.parents[2].stat().st_mode & 0o777 == 0o700


def test_a_tag_that_is_a_path_names_no_folder(registry, tmp_path):
    registry.tags = {STATEMENT_TAG: "../../elsewhere"}
    with pytest.raises(TrackingError, match="changed"):
        fetch(1)
    assert not list(tmp_path.rglob("*elsewhere*"))
