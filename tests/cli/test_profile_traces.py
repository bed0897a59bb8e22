"""`scaleray profile TRACE`, and the options that trace: what is printed and written, and what is refused."""

from __future__ import annotations

import gzip
import json
import pickle

import pytest
from made_trace import MadeTrace, gloo_step, gpu_step

from scaleray.cli.main import run_command


def said_of(capsys, *words, code=0):
    assert run_command(["profile", *map(str, words)]) == code
    found = capsys.readouterr()
    assert "Traceback" not in found.err
    return found.out if code == 0 else found.err


@pytest.fixture
def folder(tmp_path):
    """Traces of two ranks, of which rank 1 comes 40 us late, and a snapshot of rank 0's memory."""
    gpu_step(0, left_barriers_at_ns=[0, 1, 2]).write(tmp_path / "rank0.json.gz")
    late = gpu_step(1, left_barriers_at_ns=[0, 1, 2])
    for event in late.events:
        if event["cat"] == "kernel" and event["name"].startswith("nccl"):
            event["ts"] += 40
    late.write(tmp_path / "rank1.json.gz")
    block = {"size": 2**20, "requested_size": 2**20, "state": "active_allocated", "category": "parameters"}
    hole = {"size": 3 * 2**20, "state": "inactive"}
    snapshot = {"rank": 0, "segments": [{"blocks": [block, hole]}]}
    (tmp_path / "memory0.json.gz").write_bytes(gzip.compress(json.dumps(snapshot).encode()))
    return tmp_path


@pytest.mark.combination
def test_a_folder_of_traces_becomes_tables_one_file_for_perfetto_and_a_page(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    said = said_of(capsys, folder)
    assert "2 of 2 ranks, one traced step" in said and "2 collectives matched by NCCL's sequence numbers" in said
    assert "compute takes 67 % of a step on rank 1" in said and "40 us" in said
    assert "Memory of the device" in said and "3 MiB" in said
    merged = json.loads(gzip.decompress((folder / "all_ranks.json.gz").read_bytes()))
    assert merged["scaleray"]["ranks"] == [0, 1]
    assert f"{folder}/all_ranks.json.gz: open it in https://ui.perfetto.dev" in said
    page = (folder / "report.html").read_text()
    assert "Parts of a step" in page and "Memory of rank 0" in page and "exposed communication" in page
    again = said_of(capsys, folder)
    assert again == said, "what was written is not read as a trace"


def test_json_has_every_number_of_the_tables(folder, capsys):
    shown = json.loads(said_of(capsys, folder, "--json"))
    first, second = shown["traces"]["ranks"]
    assert first["partition"]["compute_ns"] == 670_000 and second["rank"] == 1
    assert shown["traces"]["late_ns"] == {"0": 0.0, "1": 40_000.0}
    assert shown["memory"][0]["stranded_bytes"] == 3 * 2**20 and shown["memory"][0]["categories"] == {
        "parameters": 2**20
    }


def test_one_file_is_read_alone_whatever_program_wrote_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    made = gloo_step()
    made.values = {"traceEvents": []}  # neither a rank nor a version
    (tmp_path / "trace.json").write_text(made.text())
    monkeypatch.chdir(tmp_path)
    said = said_of(capsys, tmp_path / "trace.json")
    assert "n/a" in said and "compute takes 50 % of a step on rank 0" in said
    assert sorted(each.name for each in tmp_path.iterdir()) == ["report-trace", "trace.json"]


def test_a_pickled_snapshot_is_read_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    block = {"size": 2**20, "requested_size": 2**20, "state": "active_allocated", "frames": []}
    (tmp_path / "snapshot.pickle").write_bytes(pickle.dumps({"segments": [{"blocks": [block]}]}))
    assert "activations and others" in said_of(capsys, tmp_path / "snapshot.pickle")


def test_what_cannot_be_read_is_refused_with_one_message(folder, tmp_path, capsys):
    broken = tmp_path / "broken"
    broken.mkdir()
    whole = (folder / "rank0.json.gz").read_bytes()
    (broken / "rank0.json.gz").write_bytes(whole[: len(whole) // 2])
    assert "is cut off after event" in said_of(capsys, broken, code=2)
    assert "cannot be read as a trace" in said_of(capsys, tmp_path / "nothing.json", code=2)
    MadeTrace().kernel("gemm", 0, 5, launched=0).write(broken / "rank0.json.gz")
    assert "has no step marks" in said_of(capsys, broken, code=2)
    gpu_step(0).write(broken / "rank0.json.gz")
    gpu_step(1, world_size=8).write(broken / "rank1.json.gz")
    assert "the number of ranks in" in said_of(capsys, broken, code=2)


def test_ranks_that_are_not_there_and_options_without_a_trace_are_refused(tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text("workload: {name: x.py:X}\nbatch: {global_size: 4}\nstop: {after: 1 epochs}\n")
    train = ("-c", config, "--local", "--scale.workers", 2)
    said = said_of(capsys, *train, "--trace", "--ranks", "0,2", code=2)
    assert "--ranks is 2: the ranks of 2 workers are 0 to 1" in said
    assert "it must be a comma-separated list of rank numbers, slowest and one-a-node" in said_of(
        capsys, *train, "--trace", "--ranks", "all", code=2
    )
    assert "--ranks needs --trace or --memory" in said_of(capsys, *train, "--ranks", "0", code=2)
    assert "a training with -c FILE, or only a RUN" in said_of(capsys, tmp_path, "--trace", code=2)


def test_brackets_in_the_name_of_a_folder_are_printed_as_they_are(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    named = folder.with_name("traces [x]")
    folder.rename(named)
    assert f"report: {named}/report.html" in said_of(capsys, named)
