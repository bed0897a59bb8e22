"""The page of a path: every task, figure, decision and command."""

from __future__ import annotations

import html
import re
import shlex
from dataclasses import replace

import scaleray
from scaleray.launch.path.state import find_path, write
from scaleray.reports.records.path import path_page, write_path_page
from tests.launch.path.conftest import to_the_gates


def tables(path, title):
    return {
        section.title: table for section in path_page(path).sections for table in section.tables if table.title == title
    }


def test_the_page_has_every_task_with_its_command(path, commands, tmp_path):
    scaleray.next_on_path(path.folder, until="optimise")
    scaleray.skip_on_path("optimise/decide", "<fast> enough", name=path.folder)
    write_path_page(find_path(path.folder), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert all(task.what in page for task in path.tasks)
    assert "&lt;fast&gt; enough" in page and "scaleray verify -c" in page and "skip optimise/decide" in page


def test_commands_are_those_that_were_run(path, commands):
    path = write(replace(path, run_id=""))
    before = [row[1] for table in tables(path, "Commands").values() for row in table.rows]
    assert len(before) == sum(bool(task.command) for task in path.tasks) and "{" not in "".join(before)
    to_the_gates(path)
    after = scaleray.next_on_path(path.folder, until="produce")
    shown = {row[0]: row[1] for table in tables(after, "Commands").values() for row in table.rows}
    assert "{" not in "".join(shown.values())
    assert "--checkpoint.every '10 steps'" in shown["faults-0"]
    for name in ("gate", "promote"):
        assert shown[name].endswith("--study /study --certificates /verify") or " --study /study " in shown[name]
    assert shown["dashboards"].endswith(f"--alerts {shlex.quote(f'{path.folder}/pipeline/alerts.yaml')}")


def test_every_figure_of_every_task_and_trial_is_shown(path, commands, tmp_path):
    path = write(replace(path, run_id=""))
    (tmp_path / "runs/path-digits/policy.yaml").write_text("convergence: {min_runs: 2, metric_margin: 0.5}\n")
    curve = {"verdict": "it scales", "points": [{"point": {"workers": 2}, "efficiency": {"value": 0.8125}}]}
    commands.printed["study"] = {"curves": [curve]}
    commands.printed["promote"] = {"version": 7}
    scaleray.next_on_path(path.folder, until="optimise")
    scaleray.try_on_path("larger", {"batch.global_size": "16"}, name=path.folder)
    scaleray.skip_on_path("optimise/decide", "enough", name=path.folder)
    after = scaleray.next_on_path(path.folder, until="produce")
    found = tables(after, "Figures of the trainings")
    assert {name: len(table.columns) - 1 for name, table in found.items()} == {
        "Baseline": 2, "Distribute": 1, "Optimise": 4, "Validate": 6
    }  # fmt: skip
    trained = [task for task in after.tasks if task.act in ("train", "faults", "soak")]
    cells = [cell for table in found.values() for row in table.rows for cell in row[1:] if cell]
    of_trials = [task for trial in after.trials for task in trial.trainings]
    assert len(cells) == sum(len(task.figures) for task in [*trained, *of_trials]) > 40
    others = {row for table in tables(after, "Other figures").values() for row in table.rows}
    assert {("study", "efficiency on 2", "0.8125"), ("promote", "version", "7")} <= others
    commands_of = [row for table in tables(after, "Commands").values() for row in table.rows]
    tried = f"scaleray path try larger --batch.global-size 16 --name {shlex.quote(path.folder)}"
    assert ("try larger", tried) in commands_of
    assert [name for name, words in commands_of if "larger-" in words] == ["larger-0", "larger-1"]
    write_path_page(after, tmp_path / "page.html")
    assert re.search(r">\s*" + re.escape(tried), html.unescape((tmp_path / "page.html").read_text()))
