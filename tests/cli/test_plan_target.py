"""`scaleray plan --rank time-to-target`, checkpoints in a plan, and what records say of noise."""

import json
import math
from dataclasses import replace

import pytest
import study_examples

from scaleray.cli.main import run_command
from scaleray.planner.ask.target import read_learned, target_of

SMALL = ["--model", "gpt2", "--cluster", "h100:4x2", "--global-batch", "64", "--strategies", "ddp"]
TRIAL = replace(
    study_examples.trial(0, "none", 64, 0.1, 0), samples_to_target=5000, noise_scale=300.0, noise_interval=(200.0, None)
)


def run(capsys, *words):
    code = run_command(["plan", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_batch_of_the_soonest_way_is_planned(capsys):
    words = ("--rank", "time-to-target", "--noise-scale", "100", "--target-steps", "1000", "--json")
    record = json.loads(run(capsys, *SMALL, *words)[1])
    ways = record["to_target"]
    trusted = [way for way in ways if way["num_gpus"] == 8 and way["is_trusted"]]
    soonest = min(trusted, key=lambda way: way["hours"]["value"])
    assert record["global_batch"] == soonest["batch_size"]
    reference = next(way for way in ways if (way["num_gpus"], way["batch_size"]) == (8, 64))
    assert reference["steps"] == 1000 and reference["samples"]["value"] == 64_000
    four_times = next(way for way in ways if (way["num_gpus"], way["batch_size"]) == (8, 256))
    assert four_times["samples"]["value"] == pytest.approx(64_000 * (100 + 256) / (100 + 64))
    assert any(way["is_on_frontier"] for way in ways)


def test_a_sweeps_record_tells_target_and_noise(capsys, tmp_path):
    slower = replace(TRIAL, number=1, samples_to_target=6000)
    large = replace(
        TRIAL, number=2, batch_size=256, samples_to_target=None, noise_scale=None, noise_interval=(900.0, None)
    )
    record = replace(study_examples.sweep(), trials=[TRIAL, slower, large])
    (tmp_path / "record.json").write_text(record.to_json())
    learned = read_learned(tmp_path)
    assert learned.samples == {64: 5000.0}, "the better of two trials"
    assert [(one.batch_size, one.scale.value, one.scale.high) for one in learned.noises] == [
        (64, 300.0, math.inf),
        (256, math.inf, math.inf),
    ]
    code, out, _ = run(capsys, *SMALL, "--rank", "time-to-target", "--from-run", str(tmp_path))
    assert code == 0 and "time to the target; samples to the target: 5,000 at a batch of 64" in out


def test_runs_and_studies_tell_the_noise(tmp_path):
    noise = {"effective": 300.0, "effective_low": 200.0, "effective_high": None}
    trained = study_examples.run_record(noise=noise, derived={"global_batch_size": 64})
    silent = replace(trained, noise={})
    curve = study_examples.curve("strong", (1, 2))
    first, second = (
        replace(at, point=replace(at.point, global_batch_size=batch, noise_scale=scale))
        for at, batch, scale in zip(curve.points, (32, 64), (50.0, None), strict=True)
    )
    study = replace(study_examples.study(), curves=[replace(curve, points=[first, second])])
    for record, sizes in ((trained, [64]), (study, [32]), (silent, [])):
        (tmp_path / "record.json").write_text(record.to_json())
        assert [one.batch_size for one in read_learned(tmp_path).noises] == sizes
    study_noise = target_of(batch_size=64, noise_scale=50.0, samples=1000.0, steps=None, from_run=None)
    assert study_noise.samples(64).value == 1000 and not study_noise.is_trusted(1024) and study_noise.is_trusted(128)


@pytest.mark.combination
def test_checkpoints_are_shown_where_asked_for(capsys, tmp_path):
    code, out, _ = run(capsys, *SMALL)
    assert code == 0 and "checkpoints:" not in out
    page = tmp_path / "plan.html"
    code, out, _ = run(capsys, *SMALL, "--checkpoint-minutes", "5", "--samples", "1e6", "--html", str(page))
    assert code == 0 and "of every 5 minutes" in out and "during training" in out and "interruption" not in out
    assert "Checkpoints and interruptions" in page.read_text()
    path = tmp_path / "cluster.yaml"
    path.write_text("gpu: h100\ngpus_per_node: 4\nnum_nodes: 2\ngpu_mtbf_hours: 100\nstorage_gb_per_s: 1\n")
    words = (
        "--model",
        "gpt2",
        "--cluster",
        str(path),
        "--global-batch",
        "64",
        "--strategies",
        "ddp",
        "--samples",
        "1e6",
    )
    code, out, _ = run(capsys, *words)
    assert code == 0 and "an interruption every 12.5 hours" in out and "best interval" in out
    waiting = json.loads(run(capsys, *words, "--checkpoints-wait", "--json")[1])["checkpoints"]
    assert waiting["stall_s"] == waiting["write_s"] and 0 < waiting["time_ratio"] < 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--rank", "time-to-target"], "--rank time-to-target needs the distance to the target."),
        (["--rank", "time-to-target", "--target-steps", "100"], "--rank time-to-target needs a noise scale."),
        (["--rank", "time-to-target", "--target-steps", "100", "--noise-scale", "-1"], "positive"),
        (["--rank", "time-to-target", "--target-steps", "100", "--target-samples", "100", "--noise-scale", "1"], "omit one"),
        (["--noise-scale", "100"], "--rank time-to-target"),
        (["--rank", "luck"], "time-to-target"),
        (["--checkpoint-minutes", "0"], "positive"),
        (["--collectives", "nowhere.txt"], "nowhere.txt"),
        (["--cluster", "nowhere.yaml"], "nowhere.yaml"),
    ],
)  # fmt: skip
def test_a_slip_is_one_message_and_exit_code_2(capsys, words, says):
    given = [word for word in SMALL if "--cluster" not in words or word not in ("--cluster", "h100:4x2")]
    code, _, err = run(capsys, *given, *words)
    assert code == 2 and says in err and "Traceback" not in err


@pytest.mark.combination
def test_a_page_shows_the_ways(capsys, tmp_path):
    page = tmp_path / "plan.html"
    code, _, _ = run(
        capsys,
        *SMALL,
        "--rank",
        "time-to-target",
        "--noise-scale",
        "100",
        "--target-samples",
        "1e5",
        "--html",
        str(page),
    )
    assert code == 0 and "Time to the target" in page.read_text() and "GPU hours" in page.read_text()
