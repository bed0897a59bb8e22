"""A folder that is exported over another one: what lay there stays."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from scaleray.models import exported
from scaleray.models.exported import export_model


class Workload:
    def export(self, weights, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")


@pytest.fixture(autouse=True)
def _a_run(monkeypatch):
    plain = SimpleNamespace(fine_tuning=SimpleNamespace(lora_rank=0))
    weights = SimpleNamespace(tensors={}, words="the final weights", step=None)
    monkeypatch.setattr(exported, "find_trained", lambda run, uri: SimpleNamespace(name="mine", config=plain))
    monkeypatch.setattr(exported, "workload_of", lambda *asked: Workload())
    monkeypatch.setattr(exported, "read_run_weights", lambda *asked: weights)


def test_what_lay_in_the_folder_stays_under_another_name(tmp_path):
    models = tmp_path / "models"
    (models / "another").mkdir(parents=True)
    (models / "another" / "weights").write_text("of a month")
    (tmp_path / "models.before-1").mkdir()
    made = export_model("mine", models, overwrite=True)
    assert [path.name for path in models.iterdir()] == ["config.json"]
    assert (tmp_path / "models.before-2/another/weights").read_text() == "of a month"
    assert (made.weights, made.former) == ("the final weights of mine", str(tmp_path / "models.before-2"))
    assert "models.before-2" in made.lines()[1]


def test_an_export_that_fails_leaves_the_folder_as_it_was(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.setattr(Workload, "export", lambda self, weights, folder: 1 / 0)
    with pytest.raises(Exception, match="division by zero"):
        export_model("mine", tmp_path / "model", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
