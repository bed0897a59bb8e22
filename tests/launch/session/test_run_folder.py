"""The folder of a run that is not on this machine: what is written here first, and what is left of it."""

from __future__ import annotations

from pathlib import Path

from scaleray.launch.session.run_folder import RunFolder


def test_what_was_written_here_is_uploaded_and_nothing_stays(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    run = RunFolder("there", f"file://{there}", str(here))
    (here / "config.yaml").write_text("a: 1")
    (there / "weights.bin").write_bytes(b"12")
    [fetched] = run.local(["weights.bin"])
    assert Path(fetched).read_bytes() == b"12" and not (here / "weights.bin").exists()
    run.complete()
    assert {path.name for path in tmp_path.iterdir()} == {"there"}
    assert (there / "config.yaml").read_text() == "a: 1"


def test_a_local_run_stays_where_it_is(tmp_path):
    run = RunFolder("run", str(tmp_path), str(tmp_path))
    (tmp_path / "config.yaml").write_text("a: 1")
    run.complete()
    assert run.local(["config.yaml"]) == [f"{tmp_path}/config.yaml"]
    assert (tmp_path / "config.yaml").exists()
    run.remove_if_empty()
    assert (tmp_path / "config.yaml").exists()
