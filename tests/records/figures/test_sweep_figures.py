"""Figures of sweeps where there is little to draw."""

import pytest
import study_examples
from matplotlib.figure import Figure

from scaleray.sweeps import sweep_figure


@pytest.mark.parametrize(("evaluations", "marker"), [(1, "o"), (4, "None")])
def test_a_trial_that_was_evaluated_once_is_a_dot_as_it_has_no_line(monkeypatch, evaluations, marker):
    monkeypatch.setattr(sweep_figure, "draw", lambda name, title, caption, paint, **more: paint)
    one = {"batches": (64,), "rules": ("linear",), "factors": (1.0,), "seeds": (0,)}
    paint = sweep_figure.curves(study_examples.sweep(**one, evaluations=evaluations), "samples")
    ax = Figure().add_subplot()
    paint(ax)
    assert ax.lines[0].get_marker() == marker and len(ax.lines[0].get_xdata()) == evaluations
