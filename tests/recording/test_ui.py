"""MLflow's pages, served by `scaleray tracking ui`."""

from __future__ import annotations

import re

import pytest

from scaleray.errors import TrackingError
from scaleray.recording import ui


def test_the_page_is_said_with_the_port_that_was_found_where_any_will_do(tmp_path, monkeypatch, capsys):
    commands = []

    class Server:
        def __init__(self, command, **_):
            commands.append(command)

        def wait(self):
            return 0

    monkeypatch.setattr(ui.subprocess, "Popen", Server)
    assert ui.tracking_ui(uri=f"sqlite:///{tmp_path}/mlflow.db", port=0) == 0
    (said,) = re.findall(r"http://127\.0\.0\.1:(\d+)/", capsys.readouterr().out)
    (command,) = commands
    assert "--no-access-log" in command[command.index("--uvicorn-opts") + 1]
    assert int(said) > 0 and command[command.index("--port") + 1] == said


def test_a_users_filters_of_warnings_stay(monkeypatch):
    started = []
    monkeypatch.setattr(ui.subprocess, "Popen", lambda command, env: started.append(env) or Ended())
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    ui.tracking_ui(uri="postgresql://127.0.0.1/runs", port=0)
    assert started[0]["PYTHONWARNINGS"] == "error,ignore:starlette.middleware.wsgi is deprecated"


def test_a_password_is_on_no_command_line_and_in_no_message(monkeypatch, capsys):
    started = []
    monkeypatch.setattr(ui.subprocess, "Popen", lambda command, env: started.append((command, env)) or Ended())
    uri = "postgresql://me:hunter2@127.0.0.1/runs"
    ui.tracking_ui(uri=uri, port=0)
    ((command, environment),) = started
    assert "hunter2" not in " ".join(command) + capsys.readouterr().out
    assert environment["MLFLOW_BACKEND_STORE_URI"] == environment["MLFLOW_REGISTRY_STORE_URI"] == uri
    with pytest.raises(TrackingError, match="is already a server") as caught:
        ui.tracking_ui(uri="http://me:hunter2@127.0.0.1:9", port=0)
    assert "hunter2" not in str(caught.value)


class Ended:
    def wait(self):
        return 0
