"""Every rule raises its alert when it should and is silent when it should, in Prometheus as in the evaluator of one run."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from optional_programs import needs, program
from rule_cases import CASES, EVERY_S, GONE, GPU, RUN, Case, Points, noisy, still

from scaleray.common.watchers import Guard
from scaleray.config.alerts import RULES as NAMES
from scaleray.config.alerts import AlertLimits
from scaleray.live.rules.rule import Match
from scaleray.live.rules.rule_evaluator import BY_NAME, KEEP_S, RULES, RuleEvaluator
from scaleray.live.rules.rule_files import as_yaml, files, labels, panel_link, run_in_link, words
from scaleray.live.rules.series_history import MOST_POINTS, SeriesHistory


class Strict(Guard):
    """Lets errors of rules through."""

    def __call__(self, watcher, look, otherwise, *, part=""):
        return look()


STRICT = Strict()
IDS = [f"{case.rule}: {case.what}" for case in CASES]


def test_names_of_the_config_are_the_rules_and_each_has_a_case_that_fires_and_one_that_does_not():
    assert [rule.name for rule in RULES] == sorted(NAMES, key=list(BY_NAME).index) and len(NAMES) >= 16
    for fires in (True, False):
        assert {case.rule for case in CASES if case.fires is fires} == set(NAMES)


def test_each_rule_says_what_it_costs_and_what_to_do():
    for rule in RULES:
        shown = rule.to_text(Match(0.5, "rank 1"))
        assert "{" not in shown and rule.costs.endswith(".") and rule.advice.endswith("."), rule.name
        assert (rule.of != "") == ("{of}" in rule.summary), rule.name


def judged(case: Case) -> list[str]:
    """Names of the alerts that the evaluator has raised by the end of a case."""
    seen, evaluator = SeriesHistory(), RuleEvaluator(AlertLimits(), STRICT)
    for number in range(case.at_s // EVERY_S + 1):
        now = float(EVERY_S * number)
        for (metric, rank), points in case.series.items():
            if number < len(points) and not isinstance(points[number], str):
                seen.add(metric, points[number], at=now, of=rank)
        seen.advance(now)
        evaluator.check(seen)
    return [alert.name for alert in evaluator.firing]


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.is_judged], ids=[i for i, c in zip(IDS, CASES, strict=True) if c.is_judged]
)
def test_the_judge_of_one_run(case):
    assert (case.rule in judged(case)) is case.fires


def in_promtool(points: Points) -> str:
    """Points in promtool's notation; a series that is gone has a marker of that."""
    found, was_gone = [], False
    for point in points:
        found.append(
            "_" if point is None or (point == GONE and was_gone) else "stale" if point == GONE else repr(float(point))
        )
        was_gone = point == GONE
    return " ".join(found)


def as_promtool(case: Case) -> dict[str, Any]:
    """A case as a test of promtool, which wants all labels of an alert."""
    series = []
    for (metric, rank), points in case.series.items():
        of_rank = {"rank": rank, "node": "here"} if rank else {}
        if " to " in rank:
            of_rank = dict(zip(("source", "to"), rank.split(" to "), strict=True))
        of_series = GPU if rank.startswith("gpu") else {**RUN, **of_rank}
        kind = {"kind": "used"} if metric == "ray_scaleray_memory_bytes" else {}
        inside = ",".join(f'{key}="{value}"' for key, value in {**of_series, **kind}.items())
        series.append({"series": f"{metric}{{{inside}}}", "values": in_promtool(points)})
    rule = BY_NAME[case.rule]
    is_of_gpu = any(rank.startswith("gpu") for _, rank in case.series)
    expected = [{"exp_labels": {**({} if is_of_gpu else RUN), **case.labels, **labels(rule)}}] if case.fires else []
    looked_at = {"eval_time": f"{case.at_s}s", "alertname": rule.alertname, "exp_alerts": expected}
    name = f"{case.rule}: {case.what}"
    return {"interval": f"{EVERY_S}s", "name": name, "input_series": series, "alert_rule_test": [looked_at]}


@needs("promtool")
def test_prometheus_raises_each_alert_in_its_cases_alone(tmp_path):
    """A file for each rule: a rule is evaluated in its own cases only, which takes a twentieth of the time."""
    for rule in RULES:
        without_words = {key: value for key, value in as_yaml(rule).items() if key != "annotations"}
        groups = {"groups": [{"name": "scaleray", "interval": f"{EVERY_S}s", "rules": [without_words]}]}
        (tmp_path / f"{rule.name}.yaml").write_text(yaml.safe_dump(groups))
        cases = [as_promtool(case) for case in CASES if case.rule == rule.name]
        tests = {"rule_files": [f"{rule.name}.yaml"], "evaluation_interval": f"{EVERY_S}s", "tests": cases}
        (tmp_path / f"{rule.name}_test.yaml").write_text(yaml.safe_dump(tests, width=10_000))
    command = [program("promtool"), "test", "rules", *(f"{rule.name}_test.yaml" for rule in RULES)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs("promtool")
def test_promtool_finds_nothing_in_the_file_and_its_words_are_filled_in(tmp_path):
    """An alert's words need their numbers and ranks: one whole alert, as Prometheus makes it of the file."""
    (tmp_path / "alerts.yaml").write_text(files()["alerts.yaml"])
    checked = subprocess.run(
        [program("promtool"), "check", "rules", "alerts.yaml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    case, rule = next(case for case in CASES if case.rule == "straggler" and case.fires), BY_NAME["straggler"]
    test = as_promtool(case)
    expected = words(
        rule, rule.summary.format(of="rank 1 on here", value="30%"), panel=panel_link(rule, run_in_link("digits", "d1"))
    )
    test["alert_rule_test"][0]["exp_alerts"][0]["exp_annotations"] = expected
    tests = {"rule_files": ["alerts.yaml"], "evaluation_interval": f"{EVERY_S}s", "tests": [test]}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests, width=10_000))
    done = subprocess.run(
        [program("promtool"), "test", "rules", "tests.yaml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_file_of_the_repository_is_what_the_table_gives():
    kept = Path(__file__).parents[3] / "dashboards" / "alerts.yaml"
    assert kept.read_text() == files()["alerts.yaml"], "scaleray dashboards write brings it up to date"


def test_an_alert_that_comes_and_goes_is_raised_once_and_ends_when_it_stays_away():
    seen, evaluator = SeriesHistory(), RuleEvaluator(AlertLimits(), STRICT)
    told = []
    for number in range(60):
        now = 5.0 * number
        seen.add("ray_scaleray_disk_free_ratio", 0.02 if number < 20 and number % 4 else 0.5, at=now)
        seen.advance(now)
        told += evaluator.check(seen)
    assert [(alert.name, alert.state) for alert in told] == [
        ("disk_nearly_full", "firing"),
        ("disk_nearly_full", "resolved"),
    ]
    assert told[1].recorded_at - 95 == pytest.approx(KEEP_S) and told[0].since == told[1].since == 5.0


def test_a_rule_that_is_switched_off_is_not_judged_and_limits_are_those_given():
    seen = SeriesHistory()
    seen.add("ray_scaleray_disk_free_ratio", 0.3, at=0.0)
    seen.advance(0.0)
    assert RuleEvaluator(AlertLimits(), STRICT).check(seen) == []
    assert [alert.name for alert in RuleEvaluator(AlertLimits(disk_free_share=0.4), STRICT).check(seen)] == [
        "disk_nearly_full"
    ]
    assert RuleEvaluator(AlertLimits(disk_free_share=0.4), STRICT, without=["disk_nearly_full"]).check(seen) == []


def looked_at(losses, steps_a_look):
    """Alerts of losses that come so many between two looks, 8 ms apart."""
    seen, evaluator, told = SeriesHistory(), RuleEvaluator(AlertLimits(), STRICT), []
    for number, loss in enumerate(losses):
        seen.add("ray_scaleray_loss", loss, at=0.008 * number)
        if number % steps_a_look == steps_a_look - 1:
            seen.advance(0.008 * number)
            told += evaluator.check(seen)
    return told


@pytest.mark.parametrize("steps_a_look", [250, 1990, 5000])
@pytest.mark.parametrize("length", [3, 190])
def test_spikes_are_found_among_many_steps_between_two_looks(steps_a_look, length):
    """Three in a row anywhere among them are one spike, and its height is told, not that of a single value."""
    first = 2 * steps_a_look + steps_a_look // 3
    losses = noisy(2, 3 * steps_a_look)
    losses[first : first + length] = still(5, length)
    losses[first - 20] = 1e9
    (alert,) = looked_at(losses, steps_a_look)
    assert alert.name == "loss_spike" and 10 < alert.value < 50


def test_losses_that_fall_fast_between_two_looks_are_no_spike():
    assert (
        looked_at([2.0 + 3.0 * 0.998**number + loss / 50 for number, loss in enumerate(noisy(0, 15_000))], 5000) == []
    )


def test_what_was_seen_is_kept_until_it_is_looked_at_and_then_forgotten():
    seen = SeriesHistory()
    for number in range(3 * MOST_POINTS):
        seen.add("ray_scaleray_loss", 1.0, at=float(number))
        if number == MOST_POINTS - 1:
            seen.advance(float(number))
    seen.advance(3.0 * MOST_POINTS)
    assert len(seen.points("ray_scaleray_loss")[0]) == 3 * MOST_POINTS, "all but as many are new"
    seen.advance(3.0 * MOST_POINTS + 1)
    assert len(seen.points("ray_scaleray_loss")[0]) == MOST_POINTS


def test_links_lead_to_a_grafana_and_name_only_what_is_known():
    rule = BY_NAME["gpu_xid"]
    assert panel_link(rule, run_in_link("", "")).startswith("/d/") and "var-" not in panel_link(
        rule, run_in_link("", "")
    )
    link = panel_link(BY_NAME["loss_spike"], run_in_link("a&b", "d1"), "https://grafana.test/sub/")
    assert link.startswith("https://grafana.test/sub/d/") and link.endswith("&var-run=a%26b&var-run_id=d1")


@needs("promtool")
def test_alerts_of_gpus_lead_to_their_panel_without_a_run(tmp_path):
    (tmp_path / "alerts.yaml").write_text(files(grafana="http://grafana:3000")["alerts.yaml"])
    case, rule = next(case for case in CASES if case.rule == "gpu_xid" and case.fires), BY_NAME["gpu_xid"]
    test, panel = as_promtool(case), panel_link(rule, "", "http://grafana:3000")
    expected = words(rule, rule.summary.format(of="GPU 0 of here:9400", value="79"), panel=panel)
    test["alert_rule_test"][0]["exp_alerts"][0]["exp_annotations"] = expected
    tests = {"rule_files": ["alerts.yaml"], "evaluation_interval": f"{EVERY_S}s", "tests": [test]}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests, width=10_000))
    done = subprocess.run(
        [program("promtool"), "test", "rules", "tests.yaml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
