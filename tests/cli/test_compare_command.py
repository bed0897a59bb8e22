"""`scaleray compare`: differences, figures and verdicts of written records, and one clear message for each slip."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import study_examples
from made_up_steps import measured
from rich.console import Console

from scaleray.cli.main import run_command
from scaleray.live.steps_file import STEP_COLUMNS
from scaleray.profiling.run_profile import run_profile
from scaleray.records.run_record import RunRecord
from scaleray.studies.compare.printed_comparison import show_comparison

ENVIRONMENT = {
    "environment": {"python": "3.11.7", "packages": {"torch": "2.13.0"}, "git": {"commit": "aaa", "is_dirty": False}},
    "topology": [{"node": "10.0.0.1", "cpus": 4.0, "gpus": 0}],
    "workers": [{"rank": r, "node": "10.0.0.1", "device": "cpu", "cpu": "EPYC"} for r in range(2)],
}
CONFIG = {
    "workload": {"name": "digits"}, "batch": {"global_size": 64}, "optimizer": {"learning_rate": 0.1}, "seed": 0,
    "tracking": {"uri": None}, "checkpoint": {},
}  # fmt: skip


def training(
    root: Path,
    name: str,
    *,
    step_time_s: float = 0.1,
    seed: int = 0,
    steps: int = 120,
    loss_at: dict[int, float] | None = None,
    batch: int = 64,
    config: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
    with_steps: bool = True,
) -> str:
    """A run folder with a record and the steps of a training; each launch has a speed of its own within 1 %."""
    folder = root / name
    folder.mkdir()
    draw = np.random.default_rng(seed)
    record = RunRecord(
        name=name,
        status="FINISHED",
        verdict="done",
        workers=2,
        strategy="ddp",
        steps=steps,
        final_loss=0.1,
        metrics={"val/loss": 0.2},
        samples_per_s=batch / step_time_s,
        tokens_per_s=None,
        step_time_s=step_time_s,
        input_wait_share=0.01,
        time_to_first_step_s=3.0,
        training_time_s=steps * step_time_s,
        total_time_s=20.0,
        peak_memory_bytes=[2**20, 2**21],
        nonfinite_steps=0,
        sample_order="exact",
        config={**CONFIG, **(config or {})},
        config_hash="",
        derived={},
        data={"train": {"rows": 100, "sha256": "d1"}},
        environment=environment or ENVIRONMENT,
        environment_hash="",
        tracking_uri=f"sqlite:///{root}/none.db",
        experiment_id="1",
        run_id=name,
        mlflow_link="",
        run_dir=str(folder),
    )
    (folder / "record.json").write_text(record.to_json())
    if with_steps:
        launch = step_time_s * np.exp(0.01 * draw.normal())
        with open(folder / "steps.csv", "w", newline="") as file:
            rows = csv.DictWriter(file, STEP_COLUMNS, restval="")
            rows.writeheader()
            for step in range(1, steps + 1):
                time = launch * np.exp(0.03 * draw.normal()) * (5 if step == 1 else 1)
                loss = (loss_at or {}).get(step, 1 / step)
                is_last_of_epoch = step % 20 == 0
                rows.writerow(
                    {
                        "step": step,
                        "loss": repr(loss),
                        "num_samples": 8 if is_last_of_epoch else batch,
                        "world_size": 2,
                        "step_time_s": time / (4 if is_last_of_epoch else 1),
                        "input_wait_s": 0.0,
                        "is_finite": True,
                    }
                )
    return str(folder)


def compare(capsys, *words: str) -> tuple[int, str, str]:
    code = run_command(["compare", *words])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


def compared(capsys, *words: str) -> dict[str, Any]:
    code, out, _ = compare(capsys, *words, "--json")
    assert code == 0
    return json.loads(out)


def repeated(root: Path, name: str, number: int = 3, *, first_seed: int = 0, **more: Any) -> list[str]:
    """Launches of one training."""
    return [training(root, f"{name}{n}", seed=first_seed + n, **more) for n in range(number)]


NEWER = {**ENVIRONMENT, "environment": {**ENVIRONMENT["environment"], "git": {"commit": "bbb"}}}


@pytest.mark.combination
def test_a_slower_training_is_found_with_its_interval(tmp_path, capsys):
    fast = repeated(tmp_path, "fast")
    slow = repeated(tmp_path, "slow", first_seed=10, step_time_s=0.12, environment=NEWER)
    (verdict,) = compared(capsys, *fast, *slow)["verdicts"]
    assert (verdict["runs"], verdict["base"], verdict["what"]) == ("D, E, F", "A, B, C", "step time")
    assert verdict["time_ratio"]["low"] < 1.2 < verdict["time_ratio"]["high"]
    assert (verdict["verdict"], verdict["basis"]) == ("slower", "launches")
    assert "slower by" in verdict["words"] and "beyond noise" in verdict["words"]


def test_where_a_slower_training_loses_its_time_is_said_by_its_profile(tmp_path, capsys):
    runs = [training(tmp_path, "fast"), training(tmp_path, "slow", step_time_s=0.21, seed=1)]
    for run, input_s in zip(runs, (0.0001, 0.02), strict=True):
        path = Path(run, "record.json")
        record = RunRecord.read(path)
        profile = run_profile([measured(rank, num_steps=60, input=input_s) for rank in (0, 1)])
        path.write_text(dataclasses.replace(record, profile=profile).to_json())
    (verdict,) = compared(capsys, *runs)["verdicts"]
    assert verdict["words"].endswith("; most of it is input: 19.9 ms a step more")


def test_between_single_launches_a_slower_one_is_inconclusive_and_it_says_how_many_would_tell(tmp_path, capsys):
    fast, slow = training(tmp_path, "fast"), training(tmp_path, "slow", step_time_s=0.21, seed=1)
    found = compared(capsys, fast, slow)
    (verdict,) = found["verdicts"]
    assert (verdict["verdict"], verdict["basis"], verdict["repeats"]) == ("inconclusive", "steps", 2)
    assert "takes 2.1" in verdict["words"] and "beyond noise" not in verdict["words"]
    assert "at least 2 launches of each" in verdict["words"]
    assert any("single launches" in note for note in found["notes"])


def test_two_trainings_of_the_same_are_not_called_different(tmp_path, capsys):
    runs = [training(tmp_path, name) for name in "ab"]
    found = compared(capsys, *runs)
    assert found["differences"] == []
    assert "no difference beyond noise" in found["verdicts"][0]["words"]
    assert "losses of B and A: equal to the bit in all 120 common steps" in found["notes"]


def test_repeats_are_turns_so_that_the_noise_between_launches_counts(tmp_path, capsys):
    base = [training(tmp_path, f"base{n}", seed=n, config={"seed": n}) for n in range(3)]
    new = [training(tmp_path, f"new{n}", seed=10 + n, environment=NEWER) for n in range(3)]
    found = compared(capsys, base[0], new[0], base[1], new[1], base[2], new[2])
    (verdict,) = found["verdicts"]
    assert (verdict["runs"], verdict["base"]) == ("B, D, F", "A, C, E")
    assert [run["group"] for run in found["runs"]] == ["A", "B", "A", "B", "A", "B"]
    single = compared(capsys, base[0], new[0])["verdicts"][0]
    width = [v["time_ratio"]["high"] - v["time_ratio"]["low"] for v in (verdict, single)]
    assert width[0] > width[1]
    assert not any("single launches" in note for note in found["notes"])
    assert {"section": "code", "key": "git.commit", "values": ["aaa", "bbb"] * 3} in found["differences"]


def test_differences_are_named_by_key_with_every_value(tmp_path, capsys):
    first = training(tmp_path, "first")
    other = {**ENVIRONMENT, "topology": [*ENVIRONMENT["topology"], {"node": "10.0.0.2", "cpus": 8.0, "gpus": 0}]}
    second = training(
        tmp_path, "second", config={"optimizer": {"learning_rate": 0.2}, "new": {"key": 1}}, environment=other
    )
    found = {(d["section"], d["key"]): d["values"] for d in compared(capsys, first, second)["differences"]}
    assert found["config", "optimizer.learning_rate"] == [0.1, 0.2]
    assert found["config", "new.key"] == ["missing", 1]
    assert found["topology", "nodes"] == [["1 x cpus 4.0, gpus 0"], ["1 x cpus 4.0, gpus 0", "1 x cpus 8.0, gpus 0"]]
    assert len(found) == 3
    local = training(tmp_path, "local", environment={**ENVIRONMENT, "topology": [{"node": "10.0.0.1"}]})
    (nodes,) = compared(capsys, first, local)["differences"]
    assert nodes["values"] == [["1 x cpus 4.0, gpus 0"], ["1"]]


def test_the_first_step_whose_loss_differs_is_named(tmp_path, capsys):
    first, second = training(tmp_path, "a"), training(tmp_path, "b", loss_at={7: 1 / 7 + 1e-7, 9: 0.5})
    note = next(n for n in compared(capsys, first, second)["notes"] if n.startswith("losses"))
    assert note.startswith("losses of B and A: differ first at step 7, by 7.0e-07 of A's; most at step 9, by 3.5e+00")


def test_other_batches_are_compared_by_the_time_of_a_sample(tmp_path, capsys):
    small = training(tmp_path, "small")
    large = training(tmp_path, "large", batch=128, step_time_s=0.15, config={"batch": {"global_size": 128}})
    verdict = compared(capsys, small, large)["verdicts"][0]
    assert verdict["what"] == "time per sample"
    assert verdict["time_ratio"]["value"] == pytest.approx(0.75, abs=0.02)


def test_a_training_without_steps_has_figures_and_no_verdict(tmp_path, capsys):
    found = compared(capsys, training(tmp_path, "a"), training(tmp_path, "b", with_steps=False))
    assert found["verdicts"][0]["time_ratio"] is None
    assert "no result: B has no step times" in found["verdicts"][0]["words"]
    assert {"name": "val/loss", "values": [0.2, 0.2], "shown": ["0.2", "0.2"]} in found["figures"]


def test_a_drifting_training_is_compared_with_a_word_about_it(tmp_path, capsys):
    steady, drifting = training(tmp_path, "a"), training(tmp_path, "b")
    lines = (tmp_path / "b" / "steps.csv").read_text().splitlines()
    at = STEP_COLUMNS.index("step_time_s")
    rows = [line.split(",") for line in lines[1:]]
    for number, row in enumerate(rows):
        row[at] = str(float(row[at]) * (1 + number / 100))
    (tmp_path / "b" / "steps.csv").write_text("\n".join([lines[0], *(",".join(row) for row in rows)]) + "\n")
    verdict = compared(capsys, steady, drifting)["verdicts"][0]
    assert any("B was not steady" in caveat for caveat in verdict["caveats"])


def test_studies_are_compared_point_by_point(tmp_path, capsys):
    for name, more in (("one", {}), ("two", {"step_1": 0.3})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text(study_examples.study(name=name, **more).to_json())
    found = compared(capsys, str(tmp_path / "one"), str(tmp_path / "two" / "record.json"))
    assert found["kind"] == "scaling study"
    assert len(found["verdicts"]) == 8
    assert found["verdicts"][0]["what"] == "step time of 1 worker (strong)"
    ratios = [v["time_ratio"]["value"] for v in found["verdicts"]]
    assert ratios == pytest.approx([1.25] * 8, rel=1e-6)  # drawn with the same numbers
    assert any("by chance" in note for note in found["notes"])
    assert {"strong 8: samples/s", "weak 8: efficiency", "strong: next doubling"} <= {
        f["name"] for f in found["figures"]
    }


def test_studies_without_a_common_point_say_so(tmp_path, capsys):
    for name, modes in (("one", ("strong",)), ("two", ("weak",))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text(study_examples.study(name=name, modes=modes).to_json())
    verdict = compared(capsys, str(tmp_path / "one"), str(tmp_path / "two"))["verdicts"][0]
    assert "no mode and number of workers in common" in verdict["words"]


def test_sweeps_are_compared_trial_by_trial(tmp_path, capsys):
    record = study_examples.sweep(batches=(32, 64, 128))
    slower = [dataclasses.replace(t, samples_per_s=t.samples_per_s and t.samples_per_s / 1.1) for t in record.trials]
    for name, one in (("one", record), ("two", dataclasses.replace(record, trials=slower))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text(one.to_json())
    found = compared(capsys, str(tmp_path / "one"), str(tmp_path / "two"))
    assert found["verdicts"][0]["time_ratio"]["value"] == pytest.approx(1.1)
    assert found["verdicts"][0]["verdict"] == "inconclusive"
    assert "slower by 10.0 %" in found["verdicts"][0]["words"]
    assert "best batch size" in {f["name"] for f in found["figures"]}


def test_the_terminal_shows_tables_and_ends_with_the_verdicts(tmp_path, capsys):
    runs = [
        training(tmp_path, "a"),
        training(tmp_path, "b", step_time_s=0.25, config={"optimizer": {"learning_rate": 0.2}}),
    ]
    code, out, _ = compare(capsys, *runs)
    assert code == 0
    assert out.splitlines()[0] == f"A: training a ({runs[0]})"
    assert "optimizer.learning_rate" in out and "peak memory" in out
    assert out.splitlines()[-1].startswith("B against A, step time: inconclusive: takes 2")


def test_json_is_alone_on_stdout(tmp_path, capsys):
    _, out, err = compare(capsys, training(tmp_path, "a"), training(tmp_path, "b"), "--json")
    assert json.loads(out)["kind"] == "training"
    assert "Figures" in err


def test_a_pipeline_can_fail_on_a_regression(tmp_path, capsys):
    fast = repeated(tmp_path, "fast")
    slow = repeated(tmp_path, "slow", first_seed=10, step_time_s=0.12, environment=NEWER)
    assert compare(capsys, *fast, *slow, "--fail-if-slower", "5")[0] == 1
    assert compare(capsys, *fast, *slow, "--fail-if-slower", "50")[0] == 0
    assert compare(capsys, *slow, *fast, "--fail-if-slower", "5")[0] == 0


def test_two_launches_of_one_config_fail_no_pipeline_however_noisy_the_machine(tmp_path, capsys):
    fast, slow = training(tmp_path, "fast"), training(tmp_path, "slow", step_time_s=0.21)
    code, _, err = compare(capsys, fast, slow, "--fail-if-slower", "5")
    assert code == 3
    assert "it is unclear whether B is slower than A by more than 5 %: inconclusive" in err
    assert compare(capsys, fast, slow)[0] == 0  # nothing was asked
    assert compare(capsys, fast, slow, "--fail-if-slower", "500")[0] == 0
    assert compare(capsys, slow, fast, "--fail-if-slower", "5")[0] == 0


def test_a_pipeline_that_cannot_judge_is_not_passed(tmp_path, capsys):
    runs = training(tmp_path, "a"), training(tmp_path, "b", with_steps=False)
    assert compare(capsys, *runs, "--fail-if-slower", "5")[0] == 3


def test_launches_of_one_config_show_what_launches_differ_by(tmp_path, capsys):
    runs = [
        training(tmp_path, name, step_time_s=time, seed=n)
        for n, (name, time) in enumerate(zip("abc", (0.1, 0.2, 0.15), strict=True))
    ]
    verdicts = compared(capsys, *runs)["verdicts"]
    assert [(v["verdict"], v["basis"]) for v in verdicts] == [("no difference", "launches")] * 2
    assert compare(capsys, *runs, "--fail-if-slower", "5")[0] == 0


def study_folder(root: Path, name: str, *, code: str = "beefca4e", **more: Any) -> str:
    record = study_examples.study(name=name, modes=("strong",), sizes=(1, 2), **more)
    record = dataclasses.replace(record, conditions=dataclasses.replace(record.conditions, code_hash=code))
    (root / name).mkdir()
    (root / name / "record.json").write_text(record.to_json())
    return str(root / name)


def test_one_study_beside_another_is_inconclusive_and_two_of_each_are_not(tmp_path, capsys):
    one, other = study_folder(tmp_path, "one"), study_folder(tmp_path, "other", step_1=0.48, code="new")
    assert {v["verdict"] for v in compared(capsys, one, other)["verdicts"]} == {"inconclusive"}
    more = study_folder(tmp_path, "again", step_1=0.245), study_folder(tmp_path, "later", step_1=0.49, code="new")
    found = compared(capsys, one, other, *more)
    assert [(v["runs"], v["base"], v["verdict"]) for v in found["verdicts"]] == [("B, D", "A, C", "slower")] * 2
    assert compare(capsys, one, other, "--fail-if-slower", "5")[0] == 3


def test_slips_have_one_clear_message(tmp_path, capsys):
    run = training(tmp_path, "run")
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "record.json").write_text(study_examples.study().to_json())
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "record.json").write_text("{}")
    none = f"sqlite:///{tmp_path}/none.db"
    for words, message in (
        ((), "Give at least two RUNs, not 0."),
        ((run,), "Give at least two RUNs, not 1."),
        ((run, str(tmp_path / "study")), "run is a training"),
        ((run, run), "is given more than once"),
        ((run, str(tmp_path / "nothing"), "--uri", none), "no folder with a record.json"),
        ((run, str(tmp_path / "broken"), "--uri", none), "broken"),
        ((run, run, "--fail-if-slower", "-1"), "must be a percentage"),
    ):
        code, out, err = compare(capsys, *words)
        assert (code, out) == (2, ""), words
        assert message in err, err
        assert len(err.splitlines()) <= 3
    assert not (tmp_path / "none.db").exists()


def test_verdicts_are_broken_between_words_on_a_terminal(monkeypatch, capsys):
    words = "B takes 12.3 % longer for a step than A (95 % interval 8.1 to 16.6 %), as its workers wait for their input"
    comparison = SimpleNamespace(runs=[], differences=[], figures=[], notes=[words], verdicts=[words])
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("scaleray.studies.compare.printed_comparison.tables", lambda comparison: [])
    show_comparison(Console(force_terminal=True), comparison)
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 60 and " ".join(" ".join(shown).split()).endswith(f"{words} {words}")
