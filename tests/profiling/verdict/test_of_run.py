"""The verdict on a recorded run: what it leaves out, and that everywhere the same one is told."""

from __future__ import annotations

import dataclasses
import html

import pytest
from study_examples import run_record

from scaleray.launch.profile.profile import profile_run
from scaleray.launch.run.record import end_tags
from scaleray.launch.run.run_page import run_page
from scaleray.profiling.verdict.findings import Limit
from scaleray.profiling.verdict.of_run import verdict_of_run
from scaleray.records.page.page import render
from scaleray.records.profile_record import Buckets, RankProfile, RunProfile, Spread

STEPS, TRACED = 40, 6


def spread(values):
    return Spread(sum(values), sorted(values)[len(values) // 2], max(values), list(values))


def run(*, waits_s, last_s=0.0, **changes):
    """A training of 40 steps of 0.1 s, which wait for their rows; the last six, which are traced, stand still in
    between."""
    waits = [waits_s] * STEPS
    still = [0.0] * (STEPS - TRACED) + [last_s] * TRACED
    phases = {"input": spread(waits), "forward": spread([0.1] * STEPS), "host": spread(still)}
    step = spread([0.1 + waits_s + one for one in still])
    profile = RunProfile(
        Buckets(2, 1, STEPS), [RankProfile(0, "here", "cpu", STEPS, step, phases, 0.0)], closes=True, gap=0.0, **changes
    )
    return dataclasses.replace(run_record(), workers=1, profile=profile)


@pytest.mark.parametrize(("traced", "steps", "share"), [(0, 30, 0.5), (TRACED, 24, 0.0)])
def test_steps_that_a_trace_slowed_are_not_judged(traced, steps, share):
    found = verdict_of_run(run(waits_s=0.0, last_s=0.5, traced_steps=traced))
    assert (found.steps, found.shares.get(Limit.HOST, 0.0)) == (steps, pytest.approx(share))


def test_a_record_of_before_traced_steps_were_noted_has_none():
    values = dataclasses.asdict(run(waits_s=0.0).profile)
    del values["traced_steps"]
    assert RunProfile.of(values).traced_steps == 0


def test_the_page_the_command_and_mlflow_tell_the_same_verdict(tmp_path):
    record = run(waits_s=0.05, last_s=0.5, traced_steps=TRACED)
    (tmp_path / "record.json").write_text(record.to_json())
    sentence = verdict_of_run(record).sentence
    assert sentence.startswith("the input is the limit: 33% of a step on 1 worker; ")
    assert profile_run(str(tmp_path)).verdict.sentence == sentence
    tags = end_tags(record)
    assert (tags["scaleray.limit"], tags["scaleray.where_time_goes"]) == ("input", sentence)
    rows = tags["mlflow.note.content"].splitlines()[2:]
    assert rows[: len(record.metrics)] == [f"| {name} | {value:.4g} |" for name, value in record.metrics.items()]
    assert rows[len(record.metrics) + 1] == f"| where the time goes | {sentence} |"
    page = html.unescape(render(run_page(record, rows=[], evaluations={})))
    section = page[page.index("<h2>Where the time went</h2>") :]
    lines = [sentence, *verdict_of_run(record).lines()[1:]]
    places = [section.index(line[1:]) for line in lines]
    assert places == sorted(places) and places[-1] < section.index("<figure"), "the answer stands before the figures"


def test_a_run_that_is_too_short_to_judge_says_so_in_mlflow_without_a_row_of_its_own():
    tags = end_tags(dataclasses.replace(run_record(), profile=None))
    assert tags["scaleray.limit"] == "incomplete" and "where the time goes" not in tags["mlflow.note.content"]
