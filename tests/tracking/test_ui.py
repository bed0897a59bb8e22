"""MLflow's pages, served by `scaleray tracking ui`."""

from __future__ import annotations

import re

from scaleray.tracking import ui


def test_the_page_is_said_with_the_port_that_was_found_where_any_will_do(tmp_path, monkeypatch, capsys):
    commands = []

    class Server:
        def __init__(self, command, **_):
            commands.append(command)

        def wait(self):
            return 0

    monkeypatch.setattr(ui.subprocess, "Popen", Server)
    assert ui.serve(f"sqlite:///{tmp_path}/mlflow.db", port=0) == 0
    (said,) = re.findall(r"http://127\.0\.0\.1:(\d+)/", capsys.readouterr().out)
    (command,) = commands
    assert "--no-access-log" in command[command.index("--uvicorn-opts") + 1]
    assert int(said) > 0 and command[command.index("--port") + 1] == said
