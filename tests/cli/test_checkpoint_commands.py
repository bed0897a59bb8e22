"""`scaleray checkpoint`: what it prints, what it changes, and one clear message for each slip."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import save_file
from saved_runs import catalog_of, flip, make_newer, make_saver, save, shards, snapshot

from scaleray.checkpoints.manifest import Manifest
from scaleray.checkpoints.storage import Store
from scaleray.cli.main import run_command
from scaleray.common import progress

BODY, HEAD = torch.arange(10_000.0), torch.ones(500)


@pytest.fixture
def run(tmp_path):
    """A run folder with four checkpoints, each built on the one before, and a copy of all."""
    catalog = catalog_of(tmp_path / "runs" / "mine", tmp_path / "copies")
    saver = make_saver(catalog)
    for step, loss in ((10, 0.5), (20, 0.1), (30, 0.4), (40, 0.3)):
        save(saver, step, {"body": BODY, "head": HEAD * step}, metrics={"val/loss": loss})
    folder = tmp_path / "runs" / "mine"
    (folder / "run.json").write_text(json.dumps({"config": {"checkpoint": {"copy_path": str(tmp_path / "copies")}}}))
    return folder


def command(capsys, *words):
    code = run_command(["checkpoint", *map(str, words)])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


def steps_of(folder):
    return [m.step for m in catalog_of(folder).complete()]


def test_list_shows_every_checkpoint_and_why_one_is_none(run, capsys):
    (run / "checkpoints" / "step-000000050").mkdir()
    make_newer(run / "checkpoints" / "step-000000020")
    code, out, _ = command(capsys, "list", run)
    assert code == 0
    header, *lines = out.splitlines()
    assert header.split() == ["step", "written", "at", "workers", "strategy", "written", "total", "chain", "metrics"]
    assert "50  not usable" in lines[0] and "not finished" in lines[0]
    assert (
        lines[1].split()[0] == "40" and "41.0 KiB" in lines[1] and "val/loss 0.3" in lines[1] and "2.0 KiB" in lines[1]
    )
    assert "20  not usable: the format" in lines[3]
    assert "full" in lines[4]
    assert lines[5].startswith("3 complete of 5")


def test_list_as_json(run, capsys):
    code, out, _ = command(capsys, "list", run, "--json")
    rows = json.loads(out)["checkpoints"]
    assert code == 0 and [row["step"] for row in rows] == [40, 30, 20, 10]
    assert rows[0]["metrics"] == {"val/loss": 0.3} and rows[0]["evaluated_at"] == 40
    assert rows[0]["chain"] == 3 and rows[0]["complete"]


def test_list_says_of_which_step_metrics_are(run, capsys):
    saver = make_saver(catalog_of(run))
    save(saver, 50, {"head": HEAD}, metrics={"val/loss": 0.05}, evaluated_at=40)
    lines = command(capsys, "list", run)[1].splitlines()
    assert lines[1].endswith("val/loss 0.05 (of step 40)") and lines[2].endswith("val/loss 0.3")
    assert json.loads(command(capsys, "list", run, "--json")[1])["checkpoints"][0]["evaluated_at"] == 40
    code, out, _ = command(capsys, "prune", run, "--keep-last", "1", "--best", "val/loss min", "--dry-run")
    assert code == 0 and "kept: steps 20, 50" in out


def test_prune_refuses_a_metric_that_no_checkpoint_has(run, capsys):
    before = snapshot(run)
    code, _, err = command(capsys, "prune", run, "--keep-last", "1", "--best", "val/los min")
    assert code == 2 and "there are: val/loss" in err
    assert snapshot(run) == before


def test_a_run_is_found_by_its_name(run, capsys, monkeypatch):
    monkeypatch.setenv("SCALERAY_CHECKPOINT__STORAGE_PATH", str(run.parent))
    assert command(capsys, "list", "mine")[0] == 0
    code, _, err = command(capsys, "list", "yours")
    assert code == 2 and str(run.parent) in err


def test_one_checkpoint_is_named_by_its_folder(run, capsys):
    one = run / "checkpoints" / "step-000000020"
    assert "1 complete of 1" in command(capsys, "list", one)[1]
    assert [c["step"] for c in json.loads(command(capsys, "verify", one, "--json")[1])["checkpoints"]] == [20]


def test_verify_finds_damage_and_heals_it_from_the_copy_that_the_run_names(run, capsys):
    code, out, _ = command(capsys, "verify", run)
    assert code == 0 and out.splitlines()[-1] == "step 10: good, 1 file"
    before = snapshot(run)
    flip(shards(run)[0], 100)
    code, out, _ = command(capsys, "verify", run)
    assert code == 1
    assert "step 40: DAMAGED" in out and "SHA-256" in out and "a good copy is" in out and "--heal" in out
    code, out, _ = command(capsys, "verify", run, "--step", "40", "--json")
    assert code == 1 and json.loads(out)["checkpoints"][0]["damages"][0]["healed_from"] is None
    code, out, _ = command(capsys, "verify", run, "--heal")
    assert code == 0 and "healed from" in out
    assert snapshot(run) == before
    assert command(capsys, "verify", run)[0] == 0


def test_verify_without_a_copy_says_that_there_is_none(run, capsys):
    flip(shards(run)[0], 100)
    (run / "run.json").unlink()
    code, out, _ = command(capsys, "verify", run, "--heal")
    assert code == 1 and "there is no good copy" in out


def test_a_copy_path_can_be_given(run, tmp_path, capsys):
    (run / "run.json").unlink()
    shards(run)[0].unlink()
    code, out, _ = command(capsys, "verify", run, "--heal", "--copy-path", tmp_path / "copies")
    assert code == 0 and "missing; healed from" in out


def test_prune_says_what_it_would_do_and_then_does_it(run, capsys):
    before = snapshot(run.parent.parent)
    words = ("prune", run, "--keep-last", "1", "--best", "val/loss min", "--keep-best", "1")
    code, out, _ = command(capsys, *words, "--dry-run")
    assert code == 0 and "would remove 2 checkpoints" in out and "steps 10, 30" in out and "kept: steps 20, 40" in out
    assert snapshot(run.parent.parent) == before
    code, out, _ = command(capsys, *words, "--json")
    assert code == 0 and json.loads(out) == {
        "removed": [30, 10],
        "kept": [40, 20],
        "bytes": json.loads(out)["bytes"],
        "dry_run": False,
        "schema_version": 1,
        "written": {},
    }
    assert steps_of(run) == [40, 20] == steps_of(run.parent.parent / "copies" / "mine")
    assert command(capsys, "verify", run)[0] == 0, "what the kept ones build on is still there"


def test_rebuild_makes_a_checkpoint_independent(run, capsys):
    assert "no longer depends on others" in command(capsys, "rebuild", run)[1]
    assert "already holds every byte itself" in command(capsys, "rebuild", run)[1]
    command(capsys, "prune", run, "--keep-last", "1")
    for path in (run / "checkpoints" / "step-000000010").glob("*"):
        os.utime(path, (0, 0))  # old enough to be nobody's unfinished work
    command(capsys, "prune", run, "--keep-last", "1")
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000000040"]
    assert command(capsys, "verify", run)[0] == 0


def test_weights_become_a_checkpoint(tmp_path, capsys):
    for ending, write in (("pt", torch.save), ("safetensors", save_file)):
        file, folder = tmp_path / f"w.{ending}", tmp_path / f"from {ending}"
        write({"body": BODY, "head": HEAD}, file)
        code, out, _ = command(capsys, "import", file, folder)
        assert code == 0 and "--workload.weights" in out
        assert "imported" in command(capsys, "list", folder)[1]
        assert command(capsys, "verify", folder)[0] == 0
        code, _, err = command(capsys, "import", file, folder)
        assert code == 2 and "already holds checkpoints" in err


def test_an_import_of_a_folder_says_that_it_needs_none(tmp_path, capsys):
    (tmp_path / "weights.pt").mkdir()
    assert "--workload.weights" in command(capsys, "import", tmp_path / "weights.pt", tmp_path / "new")[2]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["list", "{tmp}/nowhere"], ["nowhere", "does not exist"]),
        (["list", "{tmp}"], ["no complete checkpoint"]),
        (["list", "{tmp}/file"], ["no complete checkpoint|cannot be read"]),
        (["list", "s3:/"], ["does not exist"]),
        (["list", "nowhere://x"], ["cannot be read"]),
        (["verify", "{run}", "--step", "11"], ["step 11 is missing", "complete checkpoints: 40, 30, 20, 10"]),
        (["verify", "{run}/checkpoints/step-000000011"], ["no such checkpoint exists|does not exist"]),
        (["import", "{tmp}/nothing.pt", "{tmp}/new"], ["does not exist"]),
        (["import", "{tmp}/file", "{tmp}/new"], ["must end in"]),
        (["prune", "{run}", "--keep-last", "0"], ["--keep-last is 0", "at least 1"]),
        (["prune", "{run}", "--keep-every", "0"], ["--keep-every is 0"]),
        (["prune", "{run}", "--best", "val/loss"], ["--best", "min or max"]),
        (["prune", "{run}", "--keep-last", "two"], ["two"]),
        (["prune", "{run}/checkpoints/step-000000010"], ["a single checkpoint", "run folder"]),
        (["prune", "{tmp}"], ["no complete checkpoint"]),
        (["burn", "{run}"], ["burn"]),
    ],
)
def test_one_message_and_exit_code_2_and_nothing_changes(run, tmp_path, capsys, words, expected):
    (tmp_path / "file").write_text("not a folder")
    before = snapshot(tmp_path)
    code, _, err = command(capsys, *(word.format(tmp=tmp_path, run=run) for word in words))
    assert code == 2, err
    for options in expected:
        assert any(option in err for option in options.split("|")), err
    assert snapshot(tmp_path) == before


def test_a_newer_format_is_refused_by_every_command(run, tmp_path, capsys):
    make_newer(run / "checkpoints" / "step-000000040")
    make_newer(tmp_path / "copies" / "mine" / "checkpoints" / "step-000000040")
    before = snapshot(tmp_path)
    for words in (["verify", run], ["prune", run], ["rebuild", run]):
        code, _, err = command(capsys, *words)
        assert code == 2 and "newer scaleray" in err, words
    assert snapshot(tmp_path) == before
    assert command(capsys, "rebuild", run, "--step", "30")[0] == 0


def test_an_unfinished_folder_is_named(run, tmp_path, capsys):
    for place in (run, tmp_path / "copies" / "mine"):
        (place / "checkpoints" / "step-000000040" / "manifest.json").unlink()
    code, _, err = command(capsys, "rebuild", run, "--step", "40")
    assert code == 2 and "incomplete" in err and "complete checkpoints: 30, 20, 10" in err
    code, out, _ = command(capsys, "verify", run)
    assert code == 0 and "not a checkpoint" in out and "step-000000040" in out


def test_a_damaged_manifest_is_damage(run, tmp_path, capsys):
    """It was named as not a checkpoint, with exit code 0: a script never heard of a lost checkpoint."""
    for place in (run, tmp_path / "copies" / "mine"):
        flip(place / "checkpoints" / "step-000000040" / "manifest.json", 200)
    code, out, _ = command(capsys, "verify", run)
    assert code == 1 and "step 40: DAMAGED" in out and "manifest.json" in out and "not a checkpoint" not in out
    code, out, _ = command(capsys, "verify", run, "--json")
    found = json.loads(out)
    assert code == 1 and not found["good"] and [one["step"] for one in found["checkpoints"] if not one["good"]] == [40]


def test_a_place_that_may_not_be_read_is_named(run, capsys, monkeypatch):
    def refuse(self, name):
        raise PermissionError(13, "Permission denied", self.path(name))

    monkeypatch.setattr(Store, "read", refuse)
    for name in ("list", "verify", "prune", "rebuild"):
        code, _, err = command(capsys, name, run)
        assert code == 2 and "Permission denied" in err, name


def test_a_damaged_checkpoint_is_not_rebuilt(run, tmp_path, capsys):
    for file in shards(tmp_path):
        flip(file, 10)
    code, _, err = command(capsys, "rebuild", run)
    assert code == 2 and "damaged" in err and "verify" in err


def test_help_names_every_command(capsys):
    out = command(capsys, "--help")[1]
    for name in ("list", "verify", "prune", "rebuild", "import"):
        assert name in out


def test_what_reads_or_writes_every_byte_says_how_much_of_it_is_done(run, capsys, tmp_path):
    class Noting:
        def __init__(self):
            self.ended = []

        def begin(self, stage):
            pass

        def end(self, stage):
            self.ended.append((stage.name, stage.done, stage.total))

    save_file({"body": BODY, "head": HEAD}, tmp_path / "w.safetensors")
    noting = Noting()
    with progress.shown_by(noting):
        assert command(capsys, "verify", run)[0] == 0
        assert command(capsys, "import", tmp_path / "w.safetensors", tmp_path / "imported")[0] == 0
        assert command(capsys, "rebuild", run)[0] == 0
    names = [name for name, _, _ in noting.ended]
    assert names == [*(f"reading step {step}" for step in (40, 30, 20, 10)), "copying the weights", "writing step 40 again"]  # fmt: skip
    for name, done, total in noting.ended:  # a file has a header beside its tensors
        assert done == pytest.approx(total, rel=0.01), name


def test_a_manifest_from_elsewhere_prints_nothing_that_a_terminal_obeys(tmp_path, capsys):
    facts = {"metrics": {"val/\x1b[2J\nstep 4: good": 1.0}, "evaluated_at": 3}
    manifest = Manifest(3, 1, "ddp\x1b]0;X\x07", 0.0, {}, {}, {}, facts)
    file = tmp_path / "checkpoints" / manifest.name / "manifest.json"
    file.parent.mkdir(parents=True)
    file.write_text(manifest.to_json())
    code, out, _ = command(capsys, "list", tmp_path)
    assert code == 0 and "ddp ]0;X" in out and not {"\x1b", "\x07"} & set(out) and len(out.splitlines()) == 3
    code, _, err = command(capsys, "li\x1b[2Jst")
    assert code == 2 and err and "\x1b" not in err


def test_a_checkpoint_that_the_record_of_its_run_has_is_not_rebuilt(run, capsys):
    manifest = catalog_of(run).newest()
    (run / "record.json").write_text(json.dumps({"checkpoints": {manifest.name: manifest.sha256}}))
    before = snapshot(run)
    code, _, err = command(capsys, "rebuild", run)
    assert code == 2 and "cannot be rebuilt" in err and f"scaleray export {run} --step 40" in err
    assert snapshot(run) == before
