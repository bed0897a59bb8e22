"""State of a run that its messages make."""

import io

import pytest
from live_states import step
from rich.console import Console

from scaleray.common import metric_names as names
from scaleray.live.state.run_series import RunSeries
from scaleray.live.state.run_state import MOST_POINTS, MOST_STEPS, Curve, RunState, Window
from scaleray.live.terminal.live_table import Terminal
from scaleray.live.terminal.notebook import NotebookTable
from scaleray.records.published import PublishedFacts
from scaleray.records.run_record import EventRecord


def test_a_curve_of_any_length_has_few_points_that_are_means_of_all_steps():
    curve = Curve()
    for number in range(1, 10_001):
        curve.add(number, float(number))
    steps, losses = zip(*curve.points, strict=True)
    assert len(losses) < MOST_POINTS and steps[-1] > 9_800
    assert sum(losses) / len(losses) == pytest.approx((steps[-1] + 1) / 2)


def test_a_loss_that_is_not_finite_is_no_number_in_the_curve():
    curve = Curve()
    for loss in (1.0, float("nan"), 2.0):
        curve.add(len(curve.points) + 1, loss)
    assert curve.points == [(1, 1.0), (2, None), (3, 2.0)]


def test_rates_are_those_of_the_last_half_minute_and_the_best_is_remembered():
    window = Window(tokens_per_sample=4)
    for number in range(1, 161):
        window.add(step(number, step_time_s=0.5 if number <= 80 else 1.0))
    rates = window.rates()
    assert rates["samples_per_s"] == pytest.approx(8.0) and rates["tokens_per_s"] == pytest.approx(32.0)
    assert rates["step_time_s"] == pytest.approx(1.0) and rates["input_wait_share"] == pytest.approx(0.1)
    assert window.best == pytest.approx(16.0)


def test_rates_of_many_short_steps_are_those_of_the_last_ones():
    window = Window()
    for number in range(2 * MOST_STEPS):
        slow = number >= MOST_STEPS
        window.add(step(number, step_time_s=0.002 if slow else 0.001, recorded_at=1000.0 + number / 1000))
    assert window.rates()["samples_per_s"] == pytest.approx(4000.0)


def test_a_rate_is_the_same_wherever_it_is_shown_at_one_moment():
    """The file of a run, its metrics page, its terminal and a notebook: one window of steps."""
    shown, drawn = io.StringIO(), []
    terminal = Terminal(Console(file=shown, width=200), interval_s=0.0)
    table = NotebookTable(lambda first, *, display_id: drawn.append(first))
    state = RunState()
    series = RunSeries(PublishedFacts(), state, run_name="a", run_id="1")
    for number in range(1, 101):  # faster and faster, over 100 s
        record = step(number, step_time_s=1.0, num_samples=number, recorded_at=1000.0 + number)
        state.take(record)
        terminal.show([record])
        table.show([record])
    in_file = state.live_state(name="a").samples_per_s
    (on_page,) = [one.value for one in series.of_run(0.0) if one.metric is names.SAMPLES_PER_S]
    assert in_file == on_page == pytest.approx(sum(range(70, 101)) / 31)
    assert f"{in_file:.3g} samples/s" in shown.getvalue().splitlines()[-1]
    assert f"<td>{in_file:.4g}</td>" in table.html()


def test_rates_begin_again_when_workers_were_lost():
    state = RunState()
    for message in (step(1, step_time_s=9.0), EventRecord("", kind="resumed", step=0), step(1, step_time_s=0.5)):
        state.take(message)
    assert state.live_state(name="a").samples_per_s is not None
    assert state.window.rates()["samples_per_s"] == pytest.approx(16.0)
