"""Figures that docs/monitoring.md tells: of rules and their cases, and of series."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from rule_cases import CASES

from scaleray.common import metric_names as names
from scaleray.live.rules.rule_evaluator import BY_NAME
from scaleray.live.state.measured_series import MOST_TRIALS, Measured, measured_series
from scaleray.live.state.rank_series import ComparedRanks, rank_series
from scaleray.records.phases import PARTS
from scaleray.records.published import RankSample
from scaleray.records.sweep_record import Trial

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "monitoring.md").read_text()
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if re.match(r"\| `\w+` \| \d", line)
]


def test_the_table_of_rules_has_all_of_them_with_the_numbers_of_their_cases():
    counted = Counter((case.rule, case.fires) for case in CASES)
    assert {row[0].strip("`"): (int(row[1]), int(row[2])) for row in ROWS} == {
        name: (counted[name, True], counted[name, False]) for name in BY_NAME
    }


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip("`"))
def test_each_rule_was_delivered_live_or_the_table_says_why_not(row):
    rule, _, _, planted, by_prometheus, by_itself = row
    if not by_prometheus:
        assert planted.startswith("not in this table")
        return
    is_judged = BY_NAME[rule.strip("`")].predicate is not None
    assert re.fullmatch(r"\d+ s", by_prometheus)
    assert re.fullmatch(r"\d+ s", by_itself) if is_judged else by_itself == "not evaluated"


def test_seconds_are_those_of_the_newest_results():
    measured = {}
    for path in sorted((ROOT / "jobs" / "benchmarks" / "results").glob("alerts*.json")):
        for rule, found in json.loads(path.read_text())["rules"].items():
            if None not in found["seconds"]:
                measured[rule] = [f"{seconds:.0f} s" for seconds in found["seconds"]]
    told = {row[0].strip("`"): [cell for cell in row[4:] if cell.endswith(" s")] for row in ROWS}
    assert len(measured) > 20 and {rule: told[rule] for rule in measured} == measured


def series_of(kind, trials):
    ranks = ComparedRanks()
    measured = Measured(kind, 1, 2, trials=trials, workers=2, disk_free=0.5)
    return measured_series(measured, ranks, run_name="a", run_id="1")


def test_the_numbers_of_series_are_those_of_the_code():
    told = re.search(
        r"At most (\d+) series a rank and (\d+) a run, and one more for each metric of its evaluations: ([\d,]+) for 1,024 "
        r"ranks\. A study has (\d+) and (\d+) for each point, a sweep (\d+) and at most (\d+) for each of its newest (\d+) "
        r"trials \((\d+)\)",
        " ".join(PAGE.split()),
    )
    a_rank, a_run, of_1024, study, a_point, sweep, a_trial, most, all_trials = (
        int(number.replace(",", "")) for number in told.groups()
    )
    memory = dict.fromkeys(("used", "resident", "peak", "rounding", "cached", "stranded", "largest_hole"), 9)
    phases = {part.value: 0.01 for part in PARTS}
    sample = RankSample(0, "n", 2, 8, 1e9, 0.1, phases, memory, 99)
    lateness = 1
    assert a_rank == len(rank_series(sample, run_name="a", run_id="1")) + lateness
    once = [metric.name for metric in names.TABLE if metric.is_in_prometheus and not metric.is_by_rank]
    of_measured = [name for name in once if name.startswith(("point/", "trial/", "live/measured"))]
    evaluations = 1
    assert a_run == len(once) - len(of_measured) - evaluations and of_1024 == 1024 * a_rank + a_run
    assert a_point == sum(name.startswith("point/") for name in of_measured)
    assert a_trial == sum(name.startswith("trial/") for name in of_measured)
    one = Trial(
        number=1, warmup="", seed=0, workers=2, status="finished", batch_size=8, rule="none", learning_rate=0.1,
        optimizer="sgd", value=1.0, samples_per_s=5.0, samples_to_target=9,
    )  # fmt: skip
    assert study == sweep == len(series_of("sweep", []))
    assert len(series_of("sweep", [one] * (most + 1))) == all_trials == sweep + a_trial * most and most == MOST_TRIALS
