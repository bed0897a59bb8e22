"""What a command shows while it works: on a terminal and in a pipe, for stages of any length."""

import io
import re

import pytest
from rich.console import Console

from scaleray.common import progress
from scaleray.common.progress import Stage
from scaleray.live.terminal.live_table import Terminal
from scaleray.records.phases import Phase, to_text
from scaleray.records.run_record import EvaluationRecord, Heartbeat, ModelRecord, StepRecord
from scaleray.records.terminal import progress_line
from scaleray.records.terminal.progress_line import StageDisplay, duration, so_far


class Clock:
    """Stands in the place of the monotonic clock; moves when told to."""

    def __init__(self, monkeypatch):
        self.now_s = 1000.0
        monkeypatch.setattr("time.monotonic", lambda: self.now_s)

    def wait(self, seconds):
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def display(*, is_terminal=False, width=100):
    return StageDisplay(Console(file=io.StringIO(), force_terminal=is_terminal, width=width))


def printed(shown):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.console.file.getvalue())


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.26, "0.3 s"), (9.94, "9.9 s"), (12.3, "12 s"), (130, "2 min 10 s"), (12_000, "3 h 20 min")],
)
def test_durations_are_no_finer_than_a_reader_wants(seconds, words):
    assert duration(seconds) == words


def test_a_stage_says_how_much_is_done_and_how_long_the_rest_will_take(clock):
    stage = Stage("measuring", total=12, unit="turns")
    clock.wait(30)
    assert so_far(stage) == "30 s, 0 of 12 turns" and stage.left_s is None
    stage.advance(4)
    assert so_far(stage) == "30 s, 4 of 12 turns, about 60 s left"
    stage.advance(8)
    assert stage.left_s == 0 and "left" not in so_far(stage)


def test_a_pipe_hears_of_what_is_long_and_not_of_what_is_short(clock):
    shown = display()
    with progress.shown_by(shown):
        with progress.stage("a blink"):
            clock.wait(0.2)
        with progress.stage("a moment"):
            clock.wait(1.4)
            shown.report_if_quiet()
        with progress.stage("hashing", total=100, unit="MiB") as hashing:
            for _ in range(20):
                shown.report_if_quiet()
                clock.wait(2)
                hashing.advance(5)
    assert printed(shown).splitlines() == [
        "  a moment: 1.4 s",
        "  hashing ...",
        "  hashing ... 18 s, 45.0 of 100.0 MiB, about 22 s left",
        "  hashing ... 34 s, 85.0 of 100.0 MiB, about 6.0 s left",
        "  hashing: 40 s",
    ]


def test_lines_of_others_count_as_signs_of_life(clock):
    shown = display()
    with progress.shown_by(shown), progress.stage("measuring"):
        for _ in range(30):
            clock.wait(1)
            shown.say("  [1/30] a turn")
            shown.report_if_quiet()
    assert "..." not in printed(shown) and printed(shown).count("measuring") == 1


def test_a_terminal_shows_every_stage_that_is_under_way_and_a_bar_where_the_whole_is_known(clock):
    shown = display(is_terminal=True)
    with (
        progress.shown_by(shown),
        progress.stage("verifying"),
        progress.stage("comparing", total=4, unit="variants") as inner,
    ):
        clock.wait(20)
        inner.advance()
        shown.console.print(shown.view())
        text = printed(shown)
        assert "verifying" in text and "20 s, 1 of 4 variants, about 60 s left" in text and "━" in text
    assert shown.console.print(shown.view()) is None and printed(shown).endswith("verifying: 20 s\n")


@pytest.mark.parametrize(("total", "has_bar"), [(46_000, True), (460_000_000, False)])
def test_a_long_training_takes_one_line_of_80_columns_with_a_bar_where_there_is_place(clock, total, has_bar):
    shown = display(is_terminal=True, width=80)
    with progress.shown_by(shown), progress.stage("training", total=total, unit="steps") as training:
        clock.wait(600)
        training.advance(total / 3)
        shown.console.print(shown.view())
        (line,) = printed(shown).splitlines()
    assert ("━" in line) == has_bar and line.rstrip().endswith("steps, about 20 min 0 s left")


def test_a_stage_ends_with_an_error_too_and_is_free_where_nobody_looks():
    shown = display()
    with pytest.raises(ValueError, match="planted"), progress.shown_by(shown), progress.stage("failing"):
        raise ValueError("planted")
    assert not shown.under_way
    with progress.stage("unseen", total=3) as unseen:
        unseen.advance()
    assert unseen.done == 1


def beat(step, phase, since_s):
    return Heartbeat(0, "here", 1, step, phase, since_s)


def step_record(step):
    return StepRecord(step, 0.5, 8.0, 8, 0.1, None, 0.01, 0.0, 0.1)


def test_a_run_says_what_is_long_in_coming_before_its_first_step_and_between_steps(clock):
    terminal = Terminal(Console(file=io.StringIO(), width=200), interval_s=2.0)
    terminal.expect_steps(100)
    terminal.show([beat(0, Phase.MODEL, 0.4)])
    clock.wait(7)
    terminal.show([beat(0, Phase.INPUT, 0.2)])
    clock.wait(0.3)
    terminal.show([step_record(1)])
    for phase in (Phase.FORWARD, Phase.EVALUATION, Phase.INPUT, Phase.EVALUATION):
        terminal.show([beat(10, phase, 0.1)])
        clock.wait(3)
    terminal.show([EvaluationRecord(10, {"val/loss": 0.5}, 9.0)])
    lines = terminal.console.file.getvalue().splitlines()
    assert lines[0] == "  building the model: 7.4 s"
    assert lines[1].startswith("step   1/100")
    assert lines[2:] == ["  evaluating: 9.1 s", "step  10/100 | val/loss 0.5"]


def test_the_model_of_a_run_is_shown_once():
    terminal = Terminal(Console(file=io.StringIO(), width=200), interval_s=2.0)
    terminal.show([ModelRecord(1_106_432, "cpu"), ModelRecord(1_106_432, "cpu")])
    assert terminal.console.file.getvalue() == "  model: 1,106,432 parameters on cpu\n"


def test_the_lines_of_a_pipe_say_when_the_training_will_be_over(clock):
    terminal = Terminal(Console(file=io.StringIO(), width=200), interval_s=2.0)
    terminal.expect_steps(101)
    terminal.show([step_record(1)])
    clock.wait(10)
    terminal.show([step_record(11)])
    assert terminal.console.file.getvalue().splitlines()[1].endswith("| about 90 s left")


def test_the_bar_of_a_resumed_run_counts_the_steps_before_and_its_time_left_does_not(clock):
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    terminal = Terminal(console, interval_s=2.0)
    terminal.expect_steps(101)
    terminal.show([step_record(51)])
    clock.wait(10)
    terminal.show([step_record(61)])
    (training,) = terminal.stages.under_way
    assert so_far(training) == "10 s, 61 of 101 steps, about 40 s left"


@pytest.mark.parametrize("phase", list(Phase))
def test_every_phase_has_words(phase):
    assert to_text(phase, 4) and str(phase) != to_text(phase, 4)
    assert to_text(Phase.INPUT, 0) == "reading the first batch"


def test_the_constants_of_a_pipe_are_those_that_the_docs_state():
    assert (progress_line.QUIET_S, progress_line.EVERY_S, progress_line.SAID_S) == (2.0, 15.0, 1.0)


def test_what_was_done_before_does_not_count_for_the_time_left(clock):
    with progress.stage("trials", total=10, before=6) as trials:
        clock.wait(20)
        assert trials.done == 6 and trials.left_s is None
        trials.advance(2)
        assert trials.left_s == 20


def test_brackets_in_names_of_stages_and_metrics_are_no_markup(clock):
    shown = display(is_terminal=True)
    with progress.shown_by(shown), progress.stage("reading /data[/x]/a[b]"):
        shown.console.print(shown.view())
    assert "reading /data[/x]/a[b]" in printed(shown)
    terminal = Terminal(Console(file=io.StringIO(), width=100, force_terminal=True), interval_s=2.0)
    terminal.show([EvaluationRecord(10, {"val/top[5]": 0.5, "val/[/x]": 0.5}, 9.0)])
    terminal.show([step_record(11)])
    terminal.console.print(terminal._shown)
    assert "val/top[5]" in printed(terminal) and "val/[/x]" in printed(terminal)


def test_the_table_that_stays_at_the_end_has_the_metrics_of_the_last_evaluation(clock):
    """It kept those of the one before, above a verdict with the last."""
    terminal = Terminal(Console(file=io.StringIO(), width=100, force_terminal=True), interval_s=2.0)
    terminal.expect_steps(11)
    terminal.show([EvaluationRecord(10, {"val/accuracy": 0.25}, 9.0)])
    terminal.show([step_record(11)])
    terminal.show([EvaluationRecord(11, {"val/accuracy": 0.75}, 9.0)])
    terminal.console.print(terminal._shown)
    assert "0.75" in printed(terminal) and "0.25" not in printed(terminal)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("  order: a permutation of each epoch", "  order: a permutation of\n    each epoch\n"),
        ("to continue: scaleray train --resume a-run", "to continue: scaleray train --resume a-run\n"),
        (f"record:  /home/{'a' * 50}/record.json", f"record:  /home/{'a' * 50}/record.json\n"),
        ("", "\n"),
    ],
)
def test_a_terminal_breaks_lines_between_words_and_keeps_what_is_copied(line, shown):
    terminal, pipe = display(is_terminal=True, width=26), display(width=26)
    for each in (terminal, pipe):
        each.say(line)
    assert printed(terminal) == shown and printed(pipe) == f"{line}\n"
