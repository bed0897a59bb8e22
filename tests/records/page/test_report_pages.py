"""Pages of studies, sweeps and trainings: whole, small, of this machine alone, and true to their records."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import study_examples
from made_up_steps import measured

from scaleray.launch.run.run_page import MOST_EVALUATIONS, run_page, step_rows, write_run_report
from scaleray.profiling.run_profile import run_profile
from scaleray.records.page.drawing import PALETTE, readable, shades
from scaleray.records.page.page import Fact, Page, as_csv, render
from scaleray.records.text.headlines import study_headline
from scaleray.studies.speedup_figure import speedup
from scaleray.studies.study_page import _fits, study_page, write_study_report
from scaleray.sweeps.result import rule_sentences
from scaleray.sweeps.rule_limits import rule_table
from scaleray.sweeps.sweep_figure import MOST_LINES, noise
from scaleray.sweeps.sweep_maps import maps
from scaleray.sweeps.sweep_page import sweep_page, trial_rows, write_sweep_report

LARGEST_PAGE_BYTES = 1_000_000
NASTY = '<script>alert("1")</script> & $x_1$ \\frac |pipe| =1+1'


def a_run_page(count=300):
    evaluations = {
        "validation/loss": [(100, 0.5), (200, 0.4), (300, 0.3)],
        "validation/accuracy": [(100, 0.8), (300, 0.95)],
    }
    return run_page(
        study_examples.run_record(), rows=step_rows(study_examples.steps_csv(count)), evaluations=evaluations
    )


def test_the_page_of_a_training_begins_with_the_metric_that_it_is_judged_by():
    record = study_examples.run_record(
        metrics={"validation/loss": 0.3, "validation/accuracy": 0.91},
        config={"stop": {"watch": "validation/accuracy max"}},
    )
    at = [(100, 0.8), (200, 0.95), (300, 0.91)]
    page = run_page(record, rows=step_rows(study_examples.steps_csv(300)), evaluations={"validation/accuracy": at})
    assert page.figures[0] == Fact("validation/accuracy", "0.95", "best, after step 200; 0.91 at the end")
    assert page.drawings[0].name == "evaluation-validation-accuracy" and page.drawings[1].name == "loss"
    assert run_page(dataclasses.replace(record, metrics={}), rows=[], evaluations={}).figures[0].label == "Final loss"


def test_the_figure_of_step_times_has_the_median_of_the_record():
    record = study_examples.run_record(step_time_s=0.0117)
    page = run_page(record, rows=step_rows(study_examples.steps_csv(300)), evaluations={})
    (drawing,) = [one for one in page.drawings if one.name == "step-times"]
    assert "median 11.7 ms" in drawing.svg


def test_a_failed_training_says_why_in_its_headline():
    verdict = "rank 1 on node 10.0.0.7 died in step 12: the kernel killed it, as the node had no memory left for it"
    headline = run_page(study_examples.run_record(status="FAILED", verdict=verdict), rows=[], evaluations={}).headline
    assert headline.startswith("Failed: rank 1 on node 10.0.0.7 died in step 12") and len(headline) < 130


@pytest.mark.combination
def test_many_metrics_have_figures_up_to_a_number_and_the_page_says_how_many_have_none():
    """A report of 5,000 metrics took minutes after the training was done."""
    evaluations = {f"validation/m{number:04}": [(1, 0.5), (2, 0.4)] for number in range(100)}
    page = run_page(study_examples.run_record(), rows=[], evaluations=evaluations)
    assert sum(one.name.startswith("evaluation-") for one in page.drawings) == MOST_EVALUATIONS
    assert "60 metrics of 100 have no figure here: see evaluations.csv" in render(page)


@pytest.fixture(scope="module")
def pages():
    """(page, HTML) by name, made once."""
    made = {
        "study": study_page(study_examples.study(marks=("oversubscribed",))),
        "sweep": sweep_page(study_examples.sweep()),
        "large": sweep_page(study_examples.large_sweep(1000)),
        "run": a_run_page(),
    }
    return {name: (page, render(page)) for name, page in made.items()}


NAMES = ("study", "sweep", "large", "run")


class Tags(HTMLParser):
    """Checks that every tag is closed in order, and gathers what a browser would load."""

    VOID = ("meta", "link", "br", "img", "hr", "input")

    def __init__(self, text):
        super().__init__()
        self.open, self.loaded, self.ids, self.tags = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action", "data", "srcset", "poster"):
                self.loaded.append(value)
            if name == "id":
                self.ids.append(value)
            assert not name.startswith("on"), name
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.always("[run]")
@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_one_small_file_that_loads_nothing(pages, name):
    _, html = pages[name]
    tags = Tags(html)
    assert len(html.encode()) < LARGEST_PAGE_BYTES
    assert all(value.startswith(("#", "data:image/png;base64,")) for value in tags.loaded)
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(tags.tags)
    assert not re.search(r"url\((?!#)|@import", html)
    assert len(tags.ids) == len(set(tags.ids))  # an id of two figures would give one the other's clip
    wanted = {value[1:] for value in tags.loaded if value.startswith("#")} | set(re.findall(r"url\(#([^)]+)\)", html))
    assert wanted and wanted <= set(tags.ids)


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_is_well_formed_svg_with_words_for_those_who_do_not_see_it(pages, name):
    page, html = pages[name]
    figures = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    assert len(figures) == len(page.drawings) >= 4
    for text in figures:
        root = ElementTree.fromstring(text)
        assert root.tag.endswith("svg") and len(root.get("aria-label")) > 20
        _, _, width, height = map(float, root.get("viewBox").split())
        assert width > 100 and height > 100
        assert len(root.findall(".//{*}path")) > 5 and len(root.findall(".//{*}text")) > 5


def test_a_short_headline_stands_on_top_and_the_verdict_below_it(pages):
    record = study_examples.study()
    _, html = pages["study"]
    headline = "Use 8 workers: 6.05× as fast as 1, 76% of ideal (strong scaling)"
    assert re.search(r"<h1[^>]*>(.*?)</h1>", html).group(1) == headline == study_headline(record)
    assert html.index("<h1") < html.index(f'<p class="verdict">{record.curves[0].verdict}</p>') < html.index("<svg")
    assert html.count(record.curves[0].verdict) == 1
    assert pages["sweep"][0].headline == "Batch 512 is fastest, batch 32 cheapest to validation/loss <= 0.3"
    for page, text in pages.values():
        assert len(page.headline) < 110 and 'class="long"' not in text


@pytest.mark.combination
def test_every_figure_of_a_marked_study_shows_its_marks():
    marked = study_page(study_examples.study(modes=("strong",), marks=("oversubscribed", "emulated")))
    assert all(">oversubscribed · emulated<" in drawing.svg for drawing in marked.drawings)
    assert len(marked.drawings) == 8
    plain = speedup(study_examples.study(modes=("strong",)).curves[0])
    assert "oversubscribed" not in plain.svg


@pytest.mark.combination
def test_a_mark_of_single_points_names_them_and_reused_points_are_named():
    record = study_examples.study(modes=("strong",))
    curve = record.curves[0]
    points = list(curve.points)
    points[0] = dataclasses.replace(points[0], point=dataclasses.replace(points[0].point, reused_from="older-study"))
    points[3] = dataclasses.replace(points[3], point=dataclasses.replace(points[3].point, marks=["oversubscribed"]))
    changed = dataclasses.replace(record, curves=[dataclasses.replace(curve, points=points)], noise=[])
    page = study_page(changed)
    assert all("reused: 1 · oversubscribed: 8" in drawing.svg for drawing in page.drawings)
    assert page.marks == ["oversubscribed"]


def test_a_thousand_trials_say_what_is_drawn_of_them(pages):
    page, _ = pages["large"]
    curves = next(d for d in page.drawings if d.name == "curves-samples")
    assert re.search(rf"{MOST_LINES} of \d+ trials are drawn", curves.caption)
    # the figure's lines and those of its legend, axes and grid
    assert len(re.findall(r'id="curves-samples-line2d', curves.svg)) < 2 * MOST_LINES


def test_a_page_says_where_a_trainings_compute_was_emulated():
    for marks in (["emulated"], []):
        page = render(run_page(study_examples.run_record(marks=marks), rows=[], evaluations={}))
        assert ("emulated" in page) == bool(marks)


def test_the_page_of_a_training_says_what_limits_it():
    profile = run_profile([measured(rank, num_steps=60, input=0.01) for rank in (0, 1)])
    page = render(run_page(study_examples.run_record(profile=profile), rows=[], evaluations={}))
    assert "The input is the limit: 40% of a step on 2 workers; rows that are ready in time" in page


@pytest.mark.combination
def test_text_of_a_config_is_text_on_the_page_in_figures_and_files(tmp_path):
    record = study_examples.study(modes=("strong",))
    at = record.curves[0].points[0]
    at = dataclasses.replace(at, point=dataclasses.replace(at.point, strategy=NASTY, marks=[NASTY]))
    curve = dataclasses.replace(
        record.curves[0], points=[at, *record.curves[0].points[1:]], verdict=NASTY, best_law=None
    )
    nasty = dataclasses.replace(
        record, name=NASTY, command=NASTY, config={NASTY: NASTY}, curves=[curve], words=[NASTY], currency=NASTY
    )
    page, points, _ = write_study_report(nasty, tmp_path)
    html = page.read_text()
    Tags(html)
    assert "<script" not in html and "&lt;script&gt;" in html
    for text in re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL):
        ElementTree.fromstring(text)
    sweep = dataclasses.replace(study_examples.sweep(batches=(32, 64), rules=("sqrt",)), metric=NASTY, words=[NASTY])
    sweep = dataclasses.replace(sweep, trials=[dataclasses.replace(t, rule=NASTY, metric=NASTY) for t in sweep.trials])
    html = render(sweep_page(sweep))
    Tags(html)
    assert "<script" not in html
    rows = list(csv.DictReader(io.StringIO(points.read_text())))
    assert rows[0]["strategy"] == NASTY


def test_a_spreadsheet_takes_no_text_for_a_formula():
    assert list(csv.reader(io.StringIO(as_csv([{"a": "=1+1", "b": -1.5}, {"a": "@x", "b": None}])))) == [
        ["a", "b"],
        ["'=1+1", "-1.5"],
        ["'@x", ""],
    ]


@pytest.mark.combination
def test_csv_and_png_lie_beside_the_page_and_an_old_report_is_replaced(tmp_path):
    record = study_examples.study()
    folder = tmp_path / "new" / "folder"
    folder.mkdir(parents=True)
    (folder / "report.html").write_text("old")
    page, points, figures = write_study_report(record, folder)
    assert page.read_text().startswith("<!doctype html>")
    rows = list(csv.DictReader(points.open()))
    assert [(row["mode"], int(row["workers"])) for row in rows] == [
        (m, n) for m in ("strong", "weak") for n in (1, 2, 4, 8)
    ]
    assert float(rows[3]["efficiency"]) == record.curves[0].points[3].efficiency.value
    names = {path.name for path in figures.iterdir()}
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000 for path in figures.iterdir())
    assert {"speedup-strong.png", "time-weak.png", "noise-scale.png", "convergence-time-strong.png"} <= names
    assert not list(page.parent.rglob("*.part"))
    sweep = study_examples.sweep(batches=(32, 64), rules=("sqrt",))
    _, trials, settings, _ = write_sweep_report(sweep, tmp_path)
    assert len(list(csv.DictReader(trials.open()))) == len(sweep.trials) == 12
    assert len(list(csv.DictReader(settings.open()))) == 6


@pytest.mark.combination
@pytest.mark.filterwarnings("error::UserWarning")  # matplotlib's, where a figure has no room for what it must show
@pytest.mark.parametrize("sizes", [(1,), (3 * 2**k for k in range(11))])
def test_a_study_of_any_number_of_points_has_a_page(sizes):
    Tags(render(study_page(study_examples.study(sizes=tuple(sizes), modes=("strong",)))))


@pytest.mark.combination
def test_a_study_without_fit_price_noise_or_target_has_a_page_without_these():
    record = study_examples.study(modes=("weak",), price=None)
    curve = dataclasses.replace(record.curves[0], fits=[], best_law=None, next_doubling=None, verdict="")
    page = study_page(dataclasses.replace(record, curves=[curve], noise=[], words=[]))
    assert [d.name for d in page.drawings] == ["speedup-weak", "efficiency-weak", "time-weak", "steps-weak"]
    Tags(render(page))
    assert study_page(dataclasses.replace(record, curves=[], noise=[], words=[])).headline == "No curve was measured"


def test_a_law_that_no_point_tested_is_not_marked_as_drawn():
    curve = study_examples.study(modes=("strong",)).curves[0]
    untested = dataclasses.replace(
        curve,
        fits=[dataclasses.replace(fit, held_out_error=None) for fit in curve.fits[:1]],
        best_law=curve.fits[0].law,
    )
    names = [[row[0] for row in _fits(one).rows] for one in (untested, curve)]
    assert names[0] == [curve.fits[0].law] and f"{curve.best_law} (drawn)" in names[1]


def test_a_sweep_whose_trials_all_failed_says_why_once():
    record = study_examples.sweep(batches=(32,), rules=("sqrt",))
    failed = [
        dataclasses.replace(
            t,
            status="failed",
            error=f"ValueError: boom\nline {t.number}",
            value=None,
            curve=[],
            noise_scale=None,
            samples_to_target=None,
            time_to_target_s=None,
        )
        for t in record.trials
    ]
    page = sweep_page(dataclasses.replace(record, trials=failed, goodput=[], words=[]))
    html = render(page)
    Tags(html)
    assert page.drawings == [] and html.count("ValueError: boom") == 1


@pytest.mark.combination
def test_a_sweep_without_a_target_is_coloured_by_its_metric():
    record = study_examples.sweep(batches=(32, 64), rules=("sqrt", "none"))
    trials = [dataclasses.replace(t, samples_to_target=None, time_to_target_s=None) for t in record.trials]
    page = sweep_page(dataclasses.replace(record, trials=trials, target=None, goodput=[], direction="max"))
    chart = page.drawings[0]
    assert chart.caption.startswith("Colour: validation/loss")
    assert not any(d.name.startswith("target") for d in page.drawings)
    Tags(render(page))


@pytest.mark.combination
def test_more_rules_than_fit_side_by_side_get_a_map_each():
    record = study_examples.sweep(batches=(32, 64), rules=("sqrt",))
    trials = [dataclasses.replace(t, rule=f"rule {k}") for k in range(7) for t in record.trials]
    maps = [d for d in sweep_page(dataclasses.replace(record, trials=trials)).drawings if d.name.startswith("map")]
    assert [[f"rule {k}" in made.svg for k in range(7)] for made in maps] == [
        [k < 3 for k in range(7)],
        [k >= 3 for k in range(7)],
    ]


def test_a_map_of_equal_values_has_one_number_at_its_colours():
    record = study_examples.sweep(batches=(32, 64), rules=("sqrt",))
    equal = [dataclasses.replace(t, samples_to_target=15000) for t in record.trials]
    assert maps(dataclasses.replace(record, trials=equal))[0].svg.count("15k") == 1


@pytest.mark.combination
def test_where_a_rule_ended_is_in_the_map_and_in_a_table_beside_theory():
    record = study_examples.sweep()
    missed = [
        dataclasses.replace(t, samples_to_target=None, time_to_target_s=None, status="target missed")
        if t.rule == "linear" and t.batch_size >= 512
        else t
        for t in record.trials
    ]
    record = dataclasses.replace(record, trials=missed, words=[])
    rows = {row[0]: row for row in rule_table(record).rows}
    assert rows["linear"][1:3] == ("256", "missed the target at 512") and "SGD" in rows["linear"][3]
    assert rows["sqrt"][1:3] == ("2048", "held up to the largest batch tried")
    chart = maps(record)[0]
    assert (
        "shaded: from the first batch size at which" in chart.caption
        and "dotted: the critical batch size" in chart.caption
    )
    assert "shaded" not in maps(study_examples.sweep())[0].caption
    said = rule_sentences(record, reference_batch_size=64)
    page = sweep_page(dataclasses.replace(record, words=["Fastest: x.", *said]))
    assert page.words == ["Fastest: x."]  # the table says the rest


def test_noise_scales_have_their_intervals_and_open_ends_an_arrow():
    record = study_examples.sweep(batches=(32, 64), rules=("sqrt",), factors=(1.0,), seeds=(0,))
    first, second = record.trials
    plain = noise(record)
    assert "intervals" not in plain.caption
    trials = [
        dataclasses.replace(first, noise_scale=300.0, noise_interval=(200.0, 450.0)),
        dataclasses.replace(second, noise_scale=None, noise_interval=(250.0, None)),
    ]
    made = noise(dataclasses.replace(record, trials=trials))
    assert "95% intervals" in made.caption and "too large to resolve" in made.caption
    lines = [len(re.findall(r'id="noise-scale-line2d', drawn.svg)) for drawn in (plain, made)]
    assert lines[1] > lines[0]
    rows = trial_rows(dataclasses.replace(record, trials=trials))
    assert [(row["noise_scale_low"], row["noise_scale_high"]) for row in rows] == [(200.0, 450.0), (250.0, None)]


@pytest.mark.combination
def test_a_long_training_keeps_its_page_small_and_says_what_is_drawn():
    page = a_run_page(20_000)
    assert len(render(page).encode()) < LARGEST_PAGE_BYTES
    loss = next(d for d in page.drawings if d.name == "loss")
    assert "mean of about" in loss.caption


def test_a_training_without_steps_or_mlflow_has_a_page_all_the_same(tmp_path):
    page, figures = write_run_report(
        study_examples.run_record(metrics={}, events=[]), tmp_path, steps=None, evaluations={}
    )
    assert page.name == "report.html" and [p.name for p in figures.iterdir()] == ["memory.png"]


def test_rows_that_were_cut_are_left_out():
    text = study_examples.steps_csv(3) + "4,0.5"
    assert [row["step"] for row in step_rows(text)] == [1, 2, 3]


@pytest.mark.parametrize("colour", [*PALETTE, *shades(8), "#ffffff"])
def test_words_in_a_lines_colour_stand_out_from_white(colour):
    text = readable(colour)
    linear = [int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in linear]
    contrast = 1.05 / (0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05)
    assert contrast >= 4.45  # the colour is rounded to 8 bits
    assert readable("#0072b2") == "#0072b2"  # dark enough as it is


def test_an_empty_page_is_a_page():
    Tags(render(Page(kind="Study", name="n", when="now", headline="nothing")))


@pytest.mark.combination
def test_a_record_read_from_its_file_gives_the_same_page(tmp_path):
    record = dataclasses.replace(study_examples.study(modes=("weak",), price=None), noise=[])
    (tmp_path / "record.json").write_text(record.to_json())
    again = type(record).read(tmp_path / "record.json")
    assert json.loads(again.to_json()) == json.loads(record.to_json())
    assert render(study_page(again)) == render(study_page(record))
