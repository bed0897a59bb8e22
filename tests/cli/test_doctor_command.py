"""The command `doctor`: its table, exit codes, JSON, what the planner and MLflow get, and what it refuses."""

from __future__ import annotations

import io
import json
import socket
from dataclasses import replace

import pytest
from emulated_nodes import NAMES, healthy, with_node
from rich.console import Console

from scaleray.cli.main import run_command
from scaleray.clusters.doctor import doctor as doctor_module
from scaleray.clusters.doctor.doctor import evaluate
from scaleray.clusters.doctor.printed_findings import show_preflight
from scaleray.records.doctor_record import DoctorRecord

RED = with_node(healthy(gpus=0), NAMES[1], shm_bytes=64 * 2**20)
YELLOW = with_node(healthy(gpus=0), NAMES[1], port_range=1000)


def record_of(measured):
    return DoctorRecord(checks=evaluate(measured), measured=measured, address="10.0.0.1:6379", duration_s=21.0)


@pytest.fixture
def seen(monkeypatch):
    """Let the command find these measurements, and give what it was asked."""
    asked = {}

    def set_to(measured):
        def examined(subject, **options):
            asked.update(subject=subject, **options)
            return record_of(measured)

        monkeypatch.setattr(doctor_module, "_examined", examined)
        return asked

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return set_to


@pytest.mark.parametrize(
    ("measured", "words", "code"),
    [(healthy(), "", 0), (YELLOW, "", 0), (YELLOW, "--strict", 1), (RED, "", 1), (RED, "--strict", 1), (healthy(), "--strict", 0)],
)  # fmt: skip
def test_the_exit_code_is_that_of_the_worst_check(seen, capsys, measured, words, code):
    seen(measured)
    assert run_command(["doctor", "--local", *words.split()]) == code
    assert record_of(measured).verdict in capsys.readouterr().out


def test_json_has_the_version_every_check_and_nothing_else_on_stdout(seen, capsys):
    seen(RED)
    assert run_command(["doctor", "--local", "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["schema_version"] == 1 and len(printed["checks"]) == len(evaluate(RED))
    [shm] = [check for check in printed["checks"] if check["name"] == "/dev/shm"]
    assert shm["verdict"] == "red" and "64.0 MiB" in shm["found"] and "--shm-size" in shm["remedy"]
    assert len(printed["measured"]["nodes"]) == 4


def test_what_is_looked_at_is_what_the_config_says_unless_an_option_does(seen, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(
        "workload: {name: m:W}\nbatch: {global_size: 8}\noptimizer: {learning_rate: 0.1}\nstop: {after: 4 steps}\n"
        f"checkpoint: {{storage_path: {tmp_path}/runs}}\n"
    )
    asked = seen(healthy())
    run_command(["doctor", "-c", str(tmp_path / "run.yaml"), "--network", "100G"])
    assert asked["subject"].storage_path == f"{tmp_path}/runs" and asked["subject"].network == "100G"
    run_command(["doctor", "-c", str(tmp_path / "run.yaml"), "--storage", "s3://bucket/runs", "--address", "a:1"])
    assert asked["subject"].storage_path == "s3://bucket/runs" and asked["address"] == "a:1"
    run_command(["doctor", "-c", str(tmp_path / "run.yaml"), "--checkpoint.storage-path", f"{tmp_path}/other"])
    assert asked["subject"].storage_path == f"{tmp_path}/other"


@pytest.mark.combination
def test_measured_all_reduces_are_what_plan_reads(seen, tmp_path, capsys):
    seen(healthy())
    file = tmp_path / "measured.csv"
    assert run_command(["doctor", "--local", "--collectives", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["written"] == {"collectives": str(file)}
    words = ["plan", "--model", "gpt2", "--cluster", "h100:8x4", "--global-batch", "256", "--json"]
    assert run_command([*words, "--collectives", str(file)]) == 0
    with_them = json.loads(capsys.readouterr().out)
    assert run_command(words) == 0
    assert with_them != json.loads(capsys.readouterr().out), "they change what is predicted"


def test_without_all_reduces_there_is_nothing_to_write(seen, tmp_path, capsys):
    seen(replace(healthy(), all_reduces=[], not_measured={"links": "3 GPUs are in use"}))
    assert run_command(["doctor", "--local", "--collectives", str(tmp_path / "x.csv")]) == 2
    assert "3 GPUs are in use" in capsys.readouterr().err and not (tmp_path / "x.csv").exists()


def test_mlflow_has_the_record_and_the_all_reduces_where_a_uri_is_said(seen, uri, capsys):
    import mlflow

    seen(YELLOW)
    assert run_command(["doctor", "--local", "--uri", uri, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    client = mlflow.MlflowClient(tracking_uri=uri)
    [run] = client.search_runs([client.get_experiment_by_name("scaleray").experiment_id])
    assert run.info.run_id in printed["mlflow_link"] and run.info.status == "FINISHED"
    assert run.data.tags["scaleray.preflight"] == "yellow"
    assert {one.path for one in client.list_artifacts(run.info.run_id)} == {"doctor.json", "collectives.csv"}
    kept = DoctorRecord.read(client.download_artifacts(run.info.run_id, "doctor.json"))
    assert kept.checks == evaluate(YELLOW)


def test_the_table_fits_80_columns_and_has_every_remedy():
    record = record_of(with_node(RED, NAMES[2], python="3.12.0", disks=[]))
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    show_preflight(console, record)
    shown = console.file.getvalue()
    table = shown.partition("not applicable")[0]
    assert max(len(line) for line in table.splitlines()) <= 80
    words = " ".join("".join(c if c.isalnum() or c in "-./" else " " for c in table).split())
    for check in record.checks:
        if check.verdict != "not applicable":
            assert check.verdict in table and check.name.split()[0] in words
    assert "--shm-size" in table and "10.0.0.3" in table
    assert "not applicable (no node has GPUs): GPU drivers, GPUs visible, GPUs idle" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--local", "--address", "a:1"], "--address and --local cannot be combined"),
        (["--network", "fast"], "fast"),
        (["--address", "http://10.0.0.1:8265"], "this is the dashboard"),
        (["-c", "nowhere.yaml"], "nowhere.yaml"),
        (["--local", "--uri", "ftp://somewhere"], "tracking.uri"),
    ],
)
def test_what_cannot_be_looked_at_is_one_message(words, said, capsys, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert run_command(["doctor", *words]) == 2
    message = capsys.readouterr().err.strip()
    assert said in message and len(message.splitlines()) <= 3


def test_an_address_at_which_nobody_listens_is_said_at_once(capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    assert run_command(["doctor", "--address", address]) == 2
    message = capsys.readouterr().err
    assert address in message and "no Ray cluster answers there" in message and "Traceback" not in message
