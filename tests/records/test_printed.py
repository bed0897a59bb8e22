"""What records look like where they are printed: some lines, whatever they hold."""

import pytest
import study_examples
from test_records import VALUES

from scaleray.records.certificate import EqualityCertificate
from scaleray.records.run_record import RunRecord

MANY = {f"key {number}": "x" * 200 for number in range(500)}


def run_record():
    metrics = {"val/loss": 0.5, "val/accuracy": 0.98}
    return RunRecord(
        **{**VALUES, "config": MANY, "environment": MANY, "metrics": metrics, "events": ["lost\nmore", "again\nmore"]}
    )


def certificate():
    facts = {
        "config": MANY,
        "environment": MANY,
        "own_precision": "fp32",
        "strategies": [],
        "world_sizes": [],
        "accumulation": [],
    }
    words = dict.fromkeys(
        ("config_hash", "environment_hash", "where", "date", "tracking_uri", "run_id", "mlflow_link"), "here"
    )
    return EqualityCertificate(
        passed=True, verdict="the same training", workload="x.py:X", bound=1e-9, precision="fp64", steps=20, duration_s=3.0,
        outcomes=[], run_dir="/runs/x", global_batch_size=8, data=MANY, **facts, **words,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (
            run_record(),
            [
                "digits: val/accuracy 0.98",
                "status: FINISHED",
                "2 workers, ddp, 40 steps",
                "val/accuracy 0.98",
                "events: 2",
                "again",
                "/x",
            ],
        ),
        (study_examples.study(), ["study ", "8 workers", "samples/s", "folder: "]),
        (study_examples.sweep(), ["sweep ", "trials", "folder: "]),
        (certificate(), ["passed: the same training", "20 steps in fp64", "/runs/x/certificate.json"]),
    ],
    ids=["run", "study", "sweep", "certificate"],
)
def test_a_record_prints_as_about_ten_lines(record, words):
    for text in (str(record), repr(record)):
        assert len(text.splitlines()) <= 12 and len(text) < 3000
        assert all(word in text for word in words), text
