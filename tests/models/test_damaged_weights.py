"""Final weights that are not those that the run wrote: every reader refuses them in one sentence."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from pathlib import Path

import pytest
import torch

import scaleray
from scaleray.checkpoints.catalog import Catalog
from scaleray.cli.main import run_command
from scaleray.errors import CheckpointError
from scaleray.models.load import find_parts
from scaleray.strategies.contract.weight_shares import Placed, WeightShare
from scaleray.training.state import final_weight_files as final_weights
from tests.release.promote.tampering import forge_checkpoint


def loaded(file):
    return torch.load(file, weights_only=True)


def saved(change):
    """A damage that leaves a whole file with other tensors."""

    def damage(file):
        torch.save(change(loaded(file)), file)

    return damage


def cut(share):
    def damage(file):
        file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])

    return damage


def flip(seed):
    """One bit, anywhere in the file."""

    def damage(file):
        content = bytearray(file.read_bytes())
        place = random.Random(seed).randrange(len(content))
        content[place] ^= 1 << (seed % 8)
        file.write_bytes(content)

    return damage


def replaced(content):
    return lambda file: file.write_bytes(content)


def folder_instead(file):
    file.unlink()
    file.mkdir()


def negated(state):
    name = [name for name in state if state[name].dim() > 1][-1]
    return {**state, name: -state[name]}


def changed(function):
    return lambda state: {name: function(tensor) for name, tensor in state.items()}


DAMAGES = {
    "negated": saved(negated),
    "float64": saved(changed(lambda t: t.double())),
    "bfloat16": saved(changed(lambda t: t.bfloat16())),
    "int64": saved(changed(lambda t: t.long())),
    "transposed": saved(changed(lambda t: t.t())),
    "nan": saved(changed(lambda t: t * float("nan"))),
    "other run": saved(changed(lambda t: t + 0.01)),
    "one tensor less": saved(lambda state: dict(list(state.items())[1:])),
    "one tensor more": saved(lambda state: {**state, "more": torch.ones(2)}),
    "no tensors": saved(lambda state: {}),
    "a list": saved(lambda state: list(state.values())),
    "one tensor": saved(lambda state: torch.ones(3)),
    "texts": saved(lambda state: dict.fromkeys(state, "text")),
    "saved again": saved(dict),
    "empty": replaced(b""),
    "one byte": replaced(b"\x80"),
    "zeros": replaced(bytes(5000)),
    "text": replaced(b"version https://git-lfs.github.com/spec/v1\n"),
    "a pickle": replaced(b"cos\nsystem\n(S'true'\ntR."),
    "appended": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "folder": folder_instead,
    **{f"cut to {share:.0%}": cut(share) for share in (0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999)},
    **{f"bit {seed}": flip(seed) for seed in range(20)},
}
assert len(DAMAGES) >= 40


@pytest.fixture
def copy(run, tmp_path):
    return Path(shutil.copytree(run, tmp_path / "copy"))


def without_hashes(folder):
    """The folder of a run of a version that recorded no hash."""
    record = json.loads((folder / "record.json").read_text())
    del record["weights"], record["checkpoints"]
    (folder / "record.json").write_text(json.dumps(record))
    (folder / "weights.sha256.json").unlink()


def in_shares(folder):
    """The run as two workers with shares of the model would have left it."""
    tensors = final_weights.read_weights(folder)
    layout = {name: Placed(number % 2, tensor.nbytes) for number, (name, tensor) in enumerate(tensors.items())}
    for rank in (0, 1):
        own = {name: tensors[name] for name, placed in layout.items() if placed.rank == rank}
        final_weights.save_weights(WeightShare(own, layout), str(folder), rank=rank)
    found = final_weights.complete(str(folder))
    record = json.loads((folder / "record.json").read_text())
    (folder / "record.json").write_text(json.dumps({**record, "weights": {n: vars(s) for n, s in found.items()}}))


def command(capsys, *words):
    """Exit code and what is printed to stderr by a command."""
    capsys.readouterr()
    code = run_command(list(map(str, words)))
    return code, capsys.readouterr().err


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_refused_in_one_sentence(copy, damage):
    damage(copy / "weights.pt")
    with pytest.raises(
        CheckpointError, match=r"weights\.pt is changed or damaged .*weights\.sha256\.json has its hash"
    ):
        scaleray.load(copy)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_without_a_recorded_hash_no_damage_is_a_traceback(copy, damage):
    without_hashes(copy)
    damage(copy / "weights.pt")
    with contextlib.suppress(CheckpointError):  # a change of a number cannot be seen
        scaleray.load(copy)


def test_a_run_that_recorded_no_hash_is_loaded_and_says_so(copy, run, caplog):
    without_hashes(copy)
    scaleray.load(copy)
    assert caplog.messages == [
        f"{copy} recorded no hash of its final weights (an older version, or an unsuccessful end): not checked"
    ]
    assert not find_parts(copy).weights.has_hash and find_parts(run).weights.has_hash


@pytest.mark.parametrize("file", ["model-00001-of-00002.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("damage", ["empty", "appended", "text", "bit 3", "cut to 90%"])
def test_a_damaged_share_is_refused(copy, file, damage):
    in_shares(copy)
    scaleray.load(copy)
    DAMAGES[damage](copy / "weights" / file)
    with pytest.raises(CheckpointError):
        scaleray.load(copy)


def test_exchanged_weights_with_a_list_of_their_own_are_not_those_of_the_record(copy):
    (copy / "weights.pt").write_bytes((copy / "weights.pt").read_bytes() + b"\0")
    final_weights.complete(str(copy))
    with pytest.raises(CheckpointError, match=r"different in weights\.sha256\.json and record\.json"):
        scaleray.load(copy)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"weights.pt": 1}', '{"weights.pt": {"sha256": "0"}}'])
def test_a_damaged_list_is_one_sentence(copy, content):
    (copy / "weights.sha256.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"weights\.sha256\.json is damaged"):
        scaleray.load(copy)


def test_the_record_alone_is_enough_to_find_a_change(copy):
    (copy / "weights.sha256.json").unlink()
    DAMAGES["negated"](copy / "weights.pt")
    with pytest.raises(CheckpointError, match=r"record\.json has its hash"):
        scaleray.load(copy)


def test_the_copy_in_mlflow_is_checked_too(trained, tmp_path):
    from mlflow import MlflowClient

    client = MlflowClient(trained.tracking_uri)
    names = {file.path for file in client.list_artifacts(trained.run_id, "model")}
    assert names == {"model/weights.pt", "model/weights.sha256.json"}
    copy = Path(client.download_artifacts(trained.run_id, "model", str(tmp_path)))
    assert final_weights.read_weights(copy, recorded=trained.weights)
    DAMAGES["negated"](copy / "weights.pt")
    with pytest.raises(CheckpointError):
        final_weights.read_weights(copy, recorded=trained.weights)


READERS = {
    "evaluate": ["evaluate", "{run}"],
    "predict": ["predict", "{run}", "--local", "--split", "val", "--out", "{out}/answers.jsonl"],
    "export": ["export", "{run}", "--out", "{out}/exported.safetensors"],
    "export of plain weights": ["export", "{run}", "--out", "{out}/plain.pt"],
    "checkpoint import": ["checkpoint", "import", "{run}/weights.pt", "{out}/imported"],
    "promote": ["promote", "{run}", "--model", "exchanged"],
    "workload.weights": ["train", "--local", "--workload.name", "{name}", "--workload.weights", "{run}/weights.pt",
                         "--checkpoint.storage-path", "{out}/runs", "--stop.after", "1 steps",
                         "--batch.global-size", "8", "--optimizer.learning-rate", "0.1", "--tracking.uri", "{uri}"],
    "workload.weights of a run": ["train", "--local", "--workload.name", "{name}", "--workload.weights", "{run}",
                                  "--checkpoint.storage-path", "{out}/runs", "--stop.after", "1 steps",
                                  "--batch.global-size", "8", "--optimizer.learning-rate", "0.1", "--tracking.uri", "{uri}"],
}  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses_exchanged_weights(copy, trained, tmp_path, capsys, reader, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", trained.tracking_uri)
    shutil.rmtree(copy / "checkpoints")  # so that the final weights are what is read
    DAMAGES["negated"](copy / "weights.pt")
    values = {"run": copy, "out": tmp_path, "uri": trained.tracking_uri, "name": trained.config["workload"]["name"]}
    code, text = command(capsys, *(word.format(**values) for word in READERS[reader]))
    assert code == 2 and "weights.pt is changed or damaged" in text and "Traceback" not in text


def test_weights_without_a_hash_are_not_promoted(copy, run, trained, capsys, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", trained.tracking_uri)
    without_hashes(copy)
    code, text = command(capsys, "promote", copy, "--model", "old", "--uri", trained.tracking_uri)
    assert code == 2 and "no recorded hash" in text
    assert not find_parts(copy, step=24).weights.has_hash and find_parts(run, step=24).weights.has_hash


def test_no_checkpoint_takes_the_place_of_recorded_weights(copy):
    (copy / "weights.pt").unlink()
    with pytest.raises(CheckpointError, match=r"final weights of points are missing: its record names weights\.pt"):
        scaleray.load(copy)
    assert scaleray.load(copy, step=24).step == 24


READERS_OF_CHECKPOINTS = {
    **{name: [*words, "--step", "24"] for name, words in READERS.items() if "{run}" in words and words[0] != "train"},
    "workload.weights of a run": READERS["workload.weights of a run"],
    "checkpoint verify": ["checkpoint", "verify", "{run}", "--step", "24"],
}


@pytest.mark.parametrize("reader", READERS_OF_CHECKPOINTS)
def test_every_reader_refuses_a_checkpoint_whose_hashes_were_rewritten(copy, trained, tmp_path, capsys, reader):
    assert forge_checkpoint(copy) == 24
    values = {"run": copy, "out": tmp_path, "uri": trained.tracking_uri, "name": trained.config["workload"]["name"]}
    code, text = command(capsys, *(word.format(**values) for word in READERS_OF_CHECKPOINTS[reader]))
    assert code == 2 and "manifest.json is not the file written by the run" in text and "Traceback" not in text


def test_checkpoint_verify_names_the_checkpoint_whose_hashes_were_rewritten(copy):
    forge_checkpoint(copy)
    found = scaleray.verify_checkpoints(copy)
    assert {one["step"] for one in found["checkpoints"] if not one["good"]} == {24}


def test_a_proven_checkpoint_has_files_of_the_recorded_hashes(copy):
    manifest = Catalog.at(str(copy))[0].newest()
    file = copy / "checkpoints" / next(iter(manifest.files))
    file.write_bytes(file.read_bytes() + b"\0")  # no tensor's digest covers it
    with pytest.raises(CheckpointError, match="bytes instead of"):
        scaleray.load(copy, step=24)


def test_a_checkpoint_that_the_record_does_not_name_has_no_hash(copy):
    record = json.loads((copy / "record.json").read_text())
    del record["checkpoints"]["step-000000024"]
    (copy / "record.json").write_text(json.dumps(record))
    assert [find_parts(copy, step=step).weights.has_hash for step in (16, 24)] == [True, False]
