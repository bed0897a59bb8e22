"""Tables on terminals of every width: no figure is cut, no column is left out, and nothing is wider than the terminal."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
import study_examples
from rich.console import Console

from jobs.planner_evidence.tables import score_table
from jobs.planner_evidence.validate import Score
from scaleray.config.hardware.cluster_text import parse_cluster
from scaleray.planner.answers.advise import advise
from scaleray.planner.answers.outlook import outlook
from scaleray.planner.answers.plan_question import Question
from scaleray.planner.answers.to_target import Target, ways_to
from scaleray.planner.models.names import find_model
from scaleray.planner.report.plan_table import plan_view
from scaleray.planner.report.plan_text import curve_table, layout_table
from scaleray.planner.report.target_text import way_table
from scaleray.records.study_record import Estimate
from scaleray.records.terminal.terminal_tables import as_rich
from scaleray.records.text.study_sweep_tables import Table, study_tables, sweep_table

WIDTHS = [60, 80, 100, 120]
LLAMA = Question(model=find_model("llama-3-8b"), cluster=parse_cluster("h100:8x16,price=2.5"), global_batch=1024)


def printed(view, width):
    buffer = io.StringIO()
    Console(file=buffer, color_system=None, width=width).print(view)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def tables():
    advice = advise(LLAMA)
    question = replace(LLAMA, model=find_model("gpt2"), cluster=parse_cluster("h100:8x2,price=2"), strategies=("ddp",))
    target = Target(samples=lambda batch: Estimate(1e6, 9e5, 1.1e6), is_trusted=lambda batch: True, words="made up")
    figures = {name: 0.1234 for name in Score.__dataclass_fields__ if name != "name"}
    counts = {name: 1234 for name in figures if name.startswith("num")}
    return [
        layout_table(advice, 10),
        curve_table(outlook(advice)),
        way_table(ways_to(target, question, all_sizes=False), num_gpus=16),
        score_table("by source", [Score(name="korthikanti_2022_recompute", **figures | counts)]),
        *study_tables(study_examples.study()),
        sweep_table(study_examples.sweep()),
        Table("Figures", ("", *"ABCDEFGH"), (("step time", *["123 ms (122\u2013127 ms)"] * 8),)),
        Table(
            "Differences",
            ("of", "key", "A", "B"),
            (("config", "optimizer.learning_rate", "0.001", "a word that is long " * 5),),
            has_words=True,
        ),
    ]


@pytest.mark.parametrize("width", WIDTHS)
def test_no_figure_is_cut_and_no_column_left_out_at_any_width(tables, width):
    for table in tables:
        text = printed(as_rich(table, width=width), width)
        assert "\u2026" not in text and max(map(len, text.splitlines())) <= width, table.title
        words = set(text.replace("-", "- ").split())
        for number, column in enumerate(table.columns):
            assert set(column.replace("-", "- ").split()) <= words, (table.title, column)
            for row in table.rows:
                pieces = row[number].split() if table.is_text(number) else row[number].replace(" (", "\n(").split("\n")
                assert all(piece in text for piece in pieces), (table.title, column, row[number])


def test_a_column_that_has_no_room_stands_below_beside_the_first_one():
    table = Table("Figures", ("run", *"ABCDE"), (("one", *["1234567890123456"] * 5),))
    lines = printed(as_rich(table, width=60), 60).splitlines()
    assert sum(line.split()[:1] == ["run"] for line in lines) == sum(line.split()[:1] == ["one"] for line in lines) == 2
    assert "Figures, continued" in "\n".join(lines)


def test_values_to_compare_are_side_by_side_however_long_their_words():
    values = ("df0f18584f1db5250f24775acbdda4b1aac17f39", "d74545ed739593a53e1af4bc852d2d19c4948ffc")
    table = Table("Differences", ("of", "key", "A", "B"), (("code", "git.diff_sha256", *values),), has_words=True)
    first, *_ = [line.split() for line in printed(as_rich(table, width=80), 80).splitlines() if "code" in line]
    assert all(value.startswith(piece) for value, piece in zip(values, first[2:], strict=True))


def test_intervals_stand_beside_their_values_where_there_is_room_and_else_below():
    (table,) = study_tables(study_examples.study(modes=("strong",)), is_brief=True)
    assert "5.87\u20136.23" in printed(as_rich(table, width=80), 80)
    wide, narrow = (printed(as_rich(table, width=width), width) for width in (200, 80))
    assert re.search(r"\d \(5.87\u20136.23\)", wide) and not re.search(r"\d \(5.87\u20136.23\)", narrow)


@pytest.mark.parametrize("width", [80, 100])
def test_a_whole_plan_fits_its_terminal(width):
    advice = advise(LLAMA)
    lines = printed(plan_view(advice, outlook(advice), rows=10, width=width), width).splitlines()
    assert max(map(len, lines)) <= width and "\u2026" not in "".join(lines)
    (first,) = [line for line in lines if line.split()[:2] == ["1", "*"]]
    assert first.split()[2] == advice.best.layout.strategy.split()[0]
