"""MLPerf's test of reference convergence points, beside its own code where that is installed."""

import json
import re
from pathlib import Path

import pytest

from scaleray.release.gates.convergence import ReferencePoint, olympic


def test_the_mean_leaves_out_the_best_and_the_worst_and_the_spread_does_not():
    assert olympic([5.0, 1.0, 3.0, 100.0]) == 4.0
    point = ReferencePoint.of(32, [5.0, 1.0, 3.0, 100.0])
    assert point.number == 2 and point.stdev == pytest.approx(42.03, abs=0.01)


def test_without_any_spread_no_mean_below_the_reference_is_allowed():
    assert ReferencePoint.of(32, [4.0] * 6).slowest_allowed(4) == 4.0


@pytest.mark.combination
def test_every_shipped_record_of_mlperf_gives_what_its_own_code_gives():
    checker = pytest.importorskip("mlperf_logging.rcp_checker.rcp_checker", reason="mlperf-logging is not installed")
    compared, at_the_floor, no_longer_known = 0, [], []
    for file in sorted(Path(checker.__file__).parent.glob("*_*/rcps_*.json")):
        usage, rules = file.parent.name.split("_")
        benchmark = re.fullmatch(r"rcps_(.*)\.json", file.name).group(1)
        if benchmark not in checker.submission_runs[usage]:  # its own code makes nothing of these
            no_longer_known += [benchmark] * len(json.loads(file.read_text()))
            continue
        theirs = checker.RCP_Checker(usage, rules, benchmark, False)
        for record in theirs.rcp_data.values():
            left_out = 4 if benchmark == "unet3d" else 1
            point = ReferencePoint.of(record["BS"], record["Epochs to converge"], left_out=left_out)
            assert point.mean == pytest.approx(record["RCP Mean"], rel=1e-12)
            allowed, told = point.slowest_allowed(theirs.submission_runs - 2), record["Min Epochs"]
            compared += 1
            if allowed == 0.0:  # noise of 3.6 times the mean: any effort is allowed, of which a bisection finds no end
                at_the_floor.append((file.parent.name, benchmark, record["BS"]))
                assert told == pytest.approx(3.46e-5, rel=1e-3)
            else:
                assert allowed == pytest.approx(told, rel=1e-4, abs=0.0), (file, record["BS"])
    assert (compared, no_longer_known) == (579, ["dlrm"] * 12)
    assert at_the_floor == [("training_4.1.0", "gpt3", 3072)]
