"""A training that is watched from Python, in a notebook and elsewhere."""

from __future__ import annotations

import sys
from types import SimpleNamespace

from scaleray.live.terminal import notebook
from scaleray.records.run_record import EvaluationRecord, EventRecord, StepRecord


def step(number):
    return StepRecord(number, 0.5, 8, 8, 0.1, None, 0.01, 0.0, 0.1)


def test_a_notebooks_table_shows_the_newest_step_metrics_and_lines():
    drawn = []

    def display(shown, *, display_id):
        drawn.append(shown)
        return SimpleNamespace(update=drawn.append)

    table = notebook.NotebookTable(display)
    table.expect_steps(20)
    table.say("run <a>")
    table.show([step(3), EvaluationRecord(3, {"val/loss": 0.25}, 0.1), EventRecord("something", kind="warning")])
    table.draw()
    html = drawn[-1]._repr_html_()
    for words in ("3/20", "0.5000", "<th>val/loss</th>", "<td>0.25</td>", "run &lt;a&gt;", "warning: something"):
        assert words in html
    assert repr(drawn[-1]) == ""


def test_only_the_kernel_of_a_notebook_has_a_display(monkeypatch):
    shells = SimpleNamespace(get_ipython=lambda: SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython", shells)
    assert notebook.notebook_display() is None
    monkeypatch.setattr(shells, "get_ipython", lambda: SimpleNamespace(kernel=1), raising=False)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display="display"))
    assert notebook.notebook_display() == "display"


def test_nobody_is_shown_anything_where_nobody_looks(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    with notebook.watching(always=False) as display:
        display.say("a line")
    assert type(display) is notebook.Silent
    with notebook.watching(always=True) as display:
        display.say("a line")
    assert "a line" in capsys.readouterr().err
