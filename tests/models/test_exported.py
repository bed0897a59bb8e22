"""`scaleray export`: files that others open, compared on real rows before they appear."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import scaleray
from scaleray.cli.main import run_command
from scaleray.errors import CheckpointError, UsageError, WorkloadError
from scaleray.models import export_formats, exported
from scaleray.models.exported import export_model
from scaleray.models.model_call import distance

TIED = """
import numpy as np
import torch
from torch import nn
from scaleray import Workload


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.inner = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, *, scale=1.0):
        return {"logits": self.head(torch.tanh(self.inner(self.embedding(tokens)))) * scale}


class Branches(Net):
    def forward(self, tokens, *, scale=1.0):
        if tokens.sum() > 0:
            return {"logits": self.head(self.embedding(tokens))}
        return super().forward(tokens)


class Tied(Workload):
    def build_model(self):
        return Net()

    def datasets(self):
        tokens = np.random.default_rng(0).integers(16, size=(32, 6))
        return {"train": {"tokens": tokens}}

    def loss(self, model, batch):
        tokens = batch["tokens"]
        logits = model(tokens[:, :-1], scale=2.0)["logits"]
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"), tokens[:, 1:].numel()


class Branching(Tied):
    def build_model(self):
        return Branches()
"""


@pytest.fixture(scope="module")
def tied(tmp_path_factory, empty_database):
    """A language model in bf16 whose embedding is its head."""
    folder = tmp_path_factory.mktemp("tied")
    (folder / "tied.py").write_text(TIED)
    database = shutil.copy(empty_database, folder / "mlflow.db")
    config = {
        "workload.name": f"{folder}/tied.py:Tied", "batch.global_size": 16, "optimizer.learning_rate": 0.01,
        "stop.after": "1 epoch", "precision.dtype": "bf16", "checkpoint.storage_path": str(folder / "runs"),
        "tracking.uri": f"sqlite:///{database}", "tracking.run_name": "tied", "tracking.system_metrics": False,
    }  # fmt: skip
    return scaleray.train(config, local=True).run_dir


def test_weights_come_back_to_the_bit_and_any_reader_of_safetensors_finds_them(run, tmp_path):
    from safetensors.torch import load_file

    found = export_model(run, tmp_path / "a.safetensors")
    module = scaleray.load(run).module
    weights = load_file(tmp_path / "a.safetensors")
    assert (found.difference, found.tolerance, found.any_rows, found.rows) == (0.0, 0.0, True, 8)
    assert all(torch.equal(weights[name], value) for name, value in module.state_dict().items())
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_program_runs_without_the_code_of_the_model_for_any_number_of_rows(run, tmp_path):
    found = export_model(run, tmp_path / "a.pt2")
    program = torch.export.load(tmp_path / "a.pt2").module()
    rows = torch.randn(13, 4, generator=torch.Generator().manual_seed(0))
    assert found.any_rows and torch.allclose(program(rows), scaleray.load(run).module(rows), atol=1e-6)


@pytest.mark.combination
def test_weights_that_are_tied_stay_so_and_are_written_once(tied, tmp_path):
    from safetensors import safe_open

    found = export_model(tied, tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert len({"embedding.weight", "head.weight"} & set(file.keys())) == 1
    program = export_model(tied, tmp_path / "a.pt2", format="torch.export")
    assert (found.difference, program.any_rows) == (0.0, True) and program.difference <= 1e-5


@pytest.mark.combination
@pytest.mark.parametrize(("format", "ending"), [("safetensors", "safetensors"), ("torch.export", "pt2")])
def test_half_the_bytes_are_held_against_the_model_as_it_was_trained(tied, tmp_path, format, ending):
    found = export_model(tied, tmp_path / f"a.{ending}", format=format, dtype="bf16")
    assert 0 < found.difference <= 0.05 == found.tolerance
    with pytest.raises(CheckpointError, match="Nothing was written"):
        export_model(tied, tmp_path / f"b.{ending}", format=format, dtype="bf16", tolerance=1e-6)
    assert [path.name for path in tmp_path.iterdir()] == [f"a.{ending}"]


@pytest.mark.combination
@pytest.mark.parametrize("dtype", [None, "fp16"])
def test_onnxruntime_gives_what_the_model_gives(tied, tmp_path, dtype):
    for name in export_formats.ONNX:
        pytest.importorskip(name, reason="the extra onnx is not installed")
    found = export_model(tied, tmp_path / "a.onnx", format="onnx", dtype=dtype)
    assert found.any_rows and found.difference <= found.tolerance
    assert [path.name for path in tmp_path.iterdir()] == ["a.onnx"]


def test_without_its_libraries_onnx_names_the_extra(run, tmp_path, monkeypatch):
    monkeypatch.setattr(export_formats.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"onnx, onnxscript, onnxruntime(?s:.*)pip install '[^']+\[onnx\]'"):
        export_model(run, tmp_path / "a.onnx", format="onnx")


@pytest.mark.parametrize(("format", "ending"), [("safetensors", "safetensors"), ("torch.export", "pt2")])
def test_a_file_that_says_something_else_does_not_take_the_place_of_a_good_one(
    run, tmp_path, monkeypatch, format, ending
):
    good = tmp_path / f"a.{ending}"
    export_model(run, good, format=format)
    before, kind = good.read_bytes(), exported.KINDS[format]

    def wrong(module, call, file, about):
        with torch.no_grad():
            next(module.parameters()).add_(1.0)
        kind.write(module, call, file, about)

    monkeypatch.setitem(exported.KINDS, format, dataclasses.replace(kind, write=wrong))
    with pytest.raises(CheckpointError, match="Nothing was written"):
        export_model(run, good, format=format, overwrite=True)
    assert good.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_plain_weights_need_neither_code_nor_data_and_become_a_checkpoint(run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    (copy / "run.json").write_text((copy / "run.json").read_text().replace(":Points", ":Gone"))
    found = export_model(copy, tmp_path / "w.pt")
    weights = torch.load(tmp_path / "w.pt", weights_only=True)
    expected = scaleray.load(run).module.state_dict()
    assert weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in expected)
    assert (found.format, found.difference, found.sha256 is None) == ("pt", None, False)
    assert run_command(["checkpoint", "import", str(tmp_path / "w.pt"), str(tmp_path / "imported")]) == 0


def test_rows_may_come_from_a_file_without_labels(run, tmp_path):
    rows = np.random.default_rng(0).normal(size=(20, 4))
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"x": row.tolist()}) for row in rows))
    assert export_model(run, tmp_path / "a.pt2", format="torch.export", data=tmp_path / "rows.jsonl").rows == 8


def test_a_forward_that_cannot_be_followed_is_one_error_with_what_to_do(tied, tmp_path):
    folder = str(tied).rsplit("/runs/", 1)[0]
    with pytest.raises(WorkloadError, match=r"cannot trace its forward(?s:.*)--format safetensors"):
        export_model(tied, tmp_path / "a.pt2", format="torch.export", workload=f"{folder}/tied.py:Branching")


def test_a_workload_that_calls_parts_of_its_model_is_told_so(run, classes, tmp_path):
    with pytest.raises(WorkloadError, match="calls a part"):
        export_model(run, tmp_path / "a.pt2", format="torch.export", workload=classes.InParts)


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("a.pt", {"format": "torch.export"}, r"ends in .pt2"),
        ("a.onnx", {"format": "tflite"}, "formats are safetensors"),
        ("a.safetensors", {"dtype": "int8"}, "types are fp32"),
        ("a.safetensors", {"tolerance": -1.0}, "at least 0"),
        ("there.safetensors", {}, "--overwrite"),
        ("there", {}, "--overwrite"),
        ("model.gguf", {}, r"endings are .safetensors, .pt2, .onnx, .pt(?s:.*)--format folder"),
        ("model.pt", {"format": "folder"}, "does not end in .pt"),
        ("model.pt", {"dtype": "bf16"}, "--format safetensors, torch.export, onnx"),
    ],
)
def test_bad_input_is_refused_before_anything_is_read(tmp_path, name, more, message):
    (tmp_path / "there.safetensors").write_bytes(b"")
    (tmp_path / "there").mkdir()
    with pytest.raises(UsageError, match=message):
        export_model("nowhere", tmp_path / name, **more)


def test_the_command_prints_the_record(run, tmp_path, capsys):
    assert run_command(["export", run, "--out", str(tmp_path / "a.pt2"), "--format", "torch.export", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["tolerance"] == 1e-5 and "differ by" in captured.err


def test_a_distance_is_relative_and_infinite_where_shapes_or_finiteness_differ():
    ones = [torch.ones(3)]
    assert distance([torch.tensor([1.0, 1.0, 1.5])], [torch.tensor([1.0, 2.0, 2.0])]) == 0.5
    assert distance(ones, ones) == 0.0 == distance([torch.zeros(2)], [torch.zeros(2)])
    for other in ([torch.ones(4)], [*ones, *ones], [torch.tensor([1.0, float("nan"), 1.0])], []):
        assert distance(other, ones) == float("inf")
