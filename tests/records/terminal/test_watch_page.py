"""The page of a run that is watched, on terminals of any width."""

import dataclasses
import io

import pytest
from live_states import ALERT, live_state
from rich.console import Console

from scaleray.live.terminal.watch_lines import runs_table, state_line
from scaleray.live.terminal.watch_page import sparkline, watch_page
from scaleray.records.live_state import RankNow


def drawn(view, width, **more):
    console = Console(file=io.StringIO(), width=width, **more)
    console.print(view)
    return console.file.getvalue()


def page(state, width=80, **more):
    return drawn(watch_page(state, width=width), width, **more)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_page_fits_and_has_what_matters_at_any_width(width):
    text = page(live_state(), width)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    for words in (
        "RUNNING",
        "120 of 460 steps",
        "3 min 20 s left",
        "0.231",
        "79% of the 1000 predicted",
        "val/accuracy 0.97",
        "CRITICAL straggler",
        "goodput 87% (share of the time in steps)",
    ):
        assert words in flat, words
    assert "loss_spike" not in flat  # it is over
    assert [line.split()[0] for line in text.splitlines() if line.lstrip()[:2] in ("0 ", "1 ")] == ["0", "1"]


def test_who_is_late_is_marked_and_what_takes_long_is_said():
    text = page(live_state(), force_terminal=True, color_system="standard", no_color=False)
    assert "\x1b[1;33m30 ms" in text  # 30 of 81 ms
    assert "for 8 s" in page(live_state())  # step 121


def test_of_many_ranks_those_to_look_at_are_shown_and_the_others_counted():
    ranks = [RankNow(n, "node", 120, "forward", 0.1, 0.1, 0.08, 0.0001 * (n % 7), {}) for n in range(1024)]
    ranks[700] = RankNow(700, "node", 120, "forward", 0.1, 12.0, 0.08, 0.0, {})
    ranks[300] = RankNow(300, "node", 120, "forward", 0.1, 0.1, 0.08, 0.05, {})
    text = page(live_state(ranks=ranks))
    assert (
        "silent for 12 s" in text
        and "50 ms" in text
        and "1,016 more ranks, none later than 600 µs" in " ".join(text.split())
    )
    assert len(text.splitlines()) < 45


def test_a_run_that_starts_has_a_page_before_anything_is_known():
    text = page(
        live_state(
            status="STARTING",
            step=0,
            epoch=None,
            left_s=None,
            loss=None,
            curve=[],
            metrics={},
            samples_per_s=None,
            phases={},
            ranks=[],
            alerts=[],
            events=[],
            goodput=None,
        )
    )
    assert "STARTING" in text and "0 of 460 steps" in text and "loss" not in text.split() and "speed" not in text


def test_a_run_that_was_killed_says_for_how_long_nothing_was_heard():
    text = page(live_state(status="LOST", seen_at=1.0))
    assert "LOST" in text and "it was killed" in " ".join(text.split())


def test_a_run_that_ended_says_why_and_nothing_of_what_ranks_do():
    text = page(live_state(status="FAILED", verdict="a worker was lost\nand more"))
    assert "a worker was lost" in text and "and more" not in text and "doing" not in text


def test_a_terminal_without_unicode_gets_no_other_characters():
    buffer = io.BytesIO()
    console = Console(file=io.TextIOWrapper(buffer, encoding="ascii", errors="replace"), width=80, legacy_windows=False)
    console.print(watch_page(live_state(), width=80))
    console.file.flush()
    text = buffer.getvalue()
    assert b"120 of 460 steps" in text and b"?" not in text and b"# forward" in text


def test_names_of_the_user_are_never_taken_for_markup():
    text = page(live_state(name="a[red]b", events=["[bold]x[/]"], metrics={"val/[u]": 1.0}, notes=["[/]"]))
    assert "a[red]b" in text and "[bold]x[/]" in text and "val/[u]" in text and "\n[/]" in text


def test_a_line_in_a_pipe_says_how_far_the_run_is_and_what_is_wrong():
    line = state_line(live_state())
    assert line.startswith(
        "language_model-w002-b64-20261123-201500-ab12 RUNNING | step 120/460 | loss 0.2310 | 790 samples/s"
    )
    assert (
        "rank 1 30 ms late" in line
        and line.endswith("critical: rank 1 makes the others wait 30 ms a step")
        and "\n" not in line
    )


@pytest.mark.parametrize("width", [40, 80, 120])
def test_all_runs_are_a_table_with_their_alerts(width):
    text = drawn(
        runs_table(
            [
                live_state(name="first"),
                live_state(name="second", kind="sweep", unit="trials", done=3, total=12, left_s=None),
            ],
            width=width,
        ),
        width,
    )
    assert max(map(len, text.splitlines())) <= width
    assert "26%" in text and "25%" in text and "first: rank 1 makes the others" in " ".join(text.split())
    assert "no run is active here" in drawn(runs_table([], width=width), width)


def test_a_sparkline_falls_with_its_values_and_marks_what_is_no_number():
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1], 8) == "█▇▆▅▄▃▂▁"
    assert sparkline([1, None, float("nan"), 2], 4) == "▁xx█" and sparkline([None], 9) == "x"
    assert sparkline([3, 3, 3], 9, ascii_only=True) == "___" and sparkline([], 9) == "" and sparkline([1], 0) == ""


def test_a_sparkline_of_many_decades_is_logarithmic():
    assert sparkline([1000, 100, 10, 1], 4) == "█▆▃▁"


def test_a_sparkline_is_as_wide_as_there_is_room_and_each_character_a_mean():
    assert len(sparkline(list(range(1000)), 60)) == 60
    assert sparkline([0, 2, 9, 11], 2) == "▁█"


ODD = "a[/]b\x1b[31m\r\nc"


def test_names_and_words_of_others_are_neither_markup_nor_obeyed():
    alert = dataclasses.replace(ALERT, summary="[/red]\x1b[2J")
    state = live_state(name=ODD, alerts=[alert], events=["[/]\x1b[2J gone"], status="FAILED", verdict="bad\x1b[2J [/]")
    for text in (state_line(state) + "\n", drawn(runs_table([state], width=80), 80), page(state)):
        assert "a[/]b [31m" in text and "[/red]" in text and "\x1b" not in text and "\r" not in text


def test_runs_of_one_name_are_told_apart_in_the_table():
    states = [live_state(name="same", run_id=run_id) for run_id in ("1234567890", "abcdefghij")]
    states.append(live_state(name="other", run_id="ffff"))
    rows = [line.split("  ")[0] for line in drawn(runs_table(states, width=80), 80).splitlines()]
    assert [row for row in rows if row.startswith(("same", "other"))][:3] == [
        "same (12345678)",
        "same (abcdefgh)",
        "other",
    ]


def test_a_page_and_the_table_begin_with_the_result_and_say_why_a_run_failed():
    state = live_state(
        name="run", judged_by="val/accuracy", best=0.98, status="FAILED", verdict="rank 1 died\nthen all"
    )
    words = [line.split()[0] for line in page(state).splitlines() if line.strip()]
    assert words.index("result") < words.index("progress")
    assert "val/accuracy 0.97, best 0.98" in page(state)
    rows = drawn(runs_table([state], width=100), 100)
    assert "val/accuracy 0.97, best 0.98" in rows and "run: rank 1 died\n" in rows.replace(" \n", "\n")
    assert "best" not in page(live_state(judged_by="val/accuracy", best=0.97))


def test_ranks_of_a_finished_run_have_its_last_step():
    """The last sample of a rank may be some steps older."""
    ranks = [RankNow(n, "node", 452 + n, "", 0.1, 0.1, 0.08, 0.0, {}) for n in range(2)]
    text = page(live_state(status="FINISHED", step=460, ranks=ranks))
    assert [line.split()[2] for line in text.splitlines() if line.lstrip()[:2] in ("0 ", "1 ")] == ["460", "460"]
