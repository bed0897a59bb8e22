"""`make watch`: what it says where a program is missing, and that it leaves nothing behind."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import yaml
from optional_programs import needs

from jobs import watch

ROOT = Path(__file__).parent.parent


def test_a_missing_program_is_one_message_that_says_how_to_install_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("PROMETHEUS", raising=False)
    assert watch.main([]) == 2
    said = capsys.readouterr().err
    assert "Prometheus is missing: prometheus is not on the PATH" in said
    assert "apt-get install prometheus prometheus-alertmanager" in said and "Traceback" not in said


def test_a_program_elsewhere_is_taken_from_the_environment(monkeypatch, capsys, tmp_path):
    own = tmp_path / "alertmanager-0.99"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setenv("ALERTMANAGER", str(own))
    assert watch.found(watch.ALERTMANAGER) == str(own)
    monkeypatch.setenv("PROMETHEUS", str(tmp_path / "not-there"))
    assert watch.main([]) == 2
    assert f"{tmp_path / 'not-there'} cannot be run" in capsys.readouterr().err


def test_a_program_that_does_not_come_up_is_shown_with_the_end_of_its_log(tmp_path):
    failing = tmp_path / "prometheus"
    failing.write_text("#!/bin/sh\necho no disk left\nexit 1\n")
    failing.chmod(0o755)
    with (
        pytest.raises(watch.ClusterError, match=r"(?s)Prometheus is not running.*no disk left"),
        watch.prometheus(str(failing), tmp_path),
    ):
        pytest.fail("it is not running")
    config = yaml.safe_load((tmp_path / "watch_prometheus.yml").read_text())
    assert config["scrape_configs"] == [] and "rule_files" not in config


def test_another_port_is_taken_where_the_usual_one_is_in_use_and_that_is_said():
    with socket.socket() as other:
        other.bind((watch.HOST, 0))
        other.listen()
        usual = other.getsockname()[1]
        taken = watch._port(usual)
        program = watch.Program("Prometheus", ("prometheus",), "PROMETHEUS", usual)
        assert taken != usual
        assert watch._instead_of(program, f"http://{watch.HOST}:{taken}") == f" ({usual} is in use)"
        assert watch._instead_of(program, f"http://{watch.HOST}:{usual}") == ""


def test_alerts_are_printed_as_they_come(capsys):
    alert = {
        "status": "firing",
        "labels": {"severity": "critical", "alertname": "NoProgress"},
        "annotations": {"summary": "no step for 9 min", "what_to_do": "Look at its stacks."},
    }
    with watch.heard_alerts() as port:
        body = json.dumps({"alerts": [alert]}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/", data=body, method="POST")
        urllib.request.urlopen(request, timeout=30).close()
    assert capsys.readouterr().out == "ALERT firing: critical NoProgress: no step for 9 min. Look at its stacks.\n"


@needs("prometheus", "prometheus-alertmanager|alertmanager")
def test_it_starts_says_where_everything_is_and_leaves_nothing_behind():
    import psutil

    before = {process.pid for process in psutil.process_iter()}
    done = subprocess.run(
        [sys.executable, "jobs/watch.py", "--seconds", "40"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "Prometheus    http://127.0.0.1:" in done.stdout and "Alertmanager  http://127.0.0.1:" in done.stdout
    assert "/targets  rules: " in done.stdout and "samples/s" in done.stdout and "ended, with everything" in done.stdout
    names = ("raylet", "gcs_server", "prometheus", "prometheus-alertmanager")
    assert [p.name() for p in psutil.process_iter() if p.pid not in before and p.name() in names] == []
