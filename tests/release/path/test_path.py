"""A path with commands that a stand-in answers: what comes next, what is kept, and what a person may do."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest

import scaleray
from scaleray.cli.main import run_command
from scaleray.errors import ConfigError, UsageError
from scaleray.release.path import commands as of_commands
from scaleray.release.path import endurance
from scaleray.release.path.go import runbook
from scaleray.release.path.path_state import find_path, locked, read, start_path
from tests.recorded_runs import a_run
from tests.release.path.conftest import to_the_gates


def test_a_path_begins_with_as_many_trainings_on_one_worker_as_there_are_seeds(path):
    assert [task.key for task in path.tasks[:2]] == ["baseline/baseline-0", "baseline/baseline-1"]
    assert all(task.command[task.command.index("--scale.workers") + 1] == "1" for task in path.tasks[:2])
    job = (Path(path.folder) / "job.yaml").read_text()
    assert f"name: {Path(path.folder).parents[1]}/job.py:Job" in job
    assert "test/accuracy >= 0.9" in (Path(path.folder) / "policy.yaml").read_text()


def test_each_call_does_one_task_and_until_does_a_step(path, commands):
    after = scaleray.next_on_path(path.folder)
    assert [task.status for task in after.tasks[:2]] == ["done", "open"]
    figures = after.tasks[0].figures
    assert {"samples_per_s": 100.0, "test/accuracy": 0.95, "steps": 40.0}.items() <= figures.items(), figures
    after = scaleray.next_on_path(path.folder, until="distribute")
    assert {task.key: task.status for task in after.tasks if task.step in ("baseline", "distribute")} == {
        "baseline/baseline-0": "done", "baseline/baseline-1": "done", "distribute/doctor": "done",
        "distribute/verify": "done", "distribute/resume": "done", "distribute/plan": "skipped",
        "distribute/first-0": "done",
    }  # fmt: skip
    assert after.next_task().key == "optimise/study"


def test_only_what_can_be_without_ray_is_local(path):
    local = {task.key for task in path.tasks if "--local" in task.command}
    assert local == {
        "baseline/baseline-0", "baseline/baseline-1", "distribute/doctor", "distribute/verify", "distribute/resume",
        "optimise/study",
    }  # fmt: skip


def test_it_stops_where_a_person_must_decide_and_goes_on_when_one_has(path, commands):
    after = scaleray.next_on_path(path.folder, until="produce")
    assert after.next_task().key == "optimise/decide" and "a person decides" in after.next_task().words
    number = len(commands.ran)
    assert scaleray.next_on_path(path.folder).next_task().key == "optimise/decide" and len(commands.ran) == number
    with pytest.raises(UsageError, match="--reason is required"):
        scaleray.skip_on_path("optimise/decide", " ", name=path.folder)
    scaleray.skip_on_path("optimise/decide", "fast enough", name=path.folder)
    after = scaleray.next_on_path(path.folder, until="produce")
    assert after.next_task() is None and after.task("optimise/decide").words == "fast enough"
    gate, promote = (next(words for words in commands.ran if words[0] == name) for name in ("gate", "promote"))
    assert gate[gate.index("--study") + 1] == "/study" and gate[gate.index("--certificates") + 1] == "/verify"
    assert promote[promote.index("--as") + 1] == "champion" and len(promote[1 : promote.index("--against")]) == 2
    assert [(one.what, one.why) for one in after.decisions] == [("skip optimise/decide", "fast enough")]


def test_a_study_that_was_skipped_is_not_named_to_the_gates(path, commands):
    for key in ("optimise/study", "optimise/decide"):
        scaleray.skip_on_path(key, "no time", name=path.folder)
    scaleray.next_on_path(path.folder, until="validate")
    gate = commands.ran[-1]
    assert gate[0] == "gate" and "--study" not in gate and "{study}" not in gate


def test_a_command_that_fails_stops_the_path_and_is_run_again(path, commands):
    commands.codes = [0, 1]
    after = scaleray.next_on_path(path.folder, until="distribute")
    assert (after.tasks[1].status, after.tasks[1].exit_code, len(commands.ran)) == ("failed", 1, 2)
    after = scaleray.next_on_path(path.folder)
    assert after.tasks[1].status == "done"
    assert commands.ran[-1][:2] == ["train", "--resume"], "its run is there and not finished"


@pytest.mark.parametrize(("code", "answer"), [(1, "fail"), (3, "inconclusive")])
def test_a_gate_that_does_not_pass_stops_the_path_before_anything_is_promoted(path, commands, code, answer):
    commands.printed["gate"] = {"summary": f"scaling {answer}; scaling: repeated runs: 2 of each; 5 are asked for"}
    to_the_gates(path)
    commands.codes = [0] * 6 + [code]  # four trainings, the fault's, the soak's
    after = scaleray.next_on_path(path.folder, until="produce")
    task = after.next_task()
    assert (task.key, task.status, task.exit_code) == ("validate/gate", "failed", code)
    assert task.words == f"scaling {answer}; scaling: repeated runs: 2 of each; 5 are asked for"
    assert "promote" not in [words[0] for words in commands.ran]


def test_without_a_baseline_no_gate_is_asked(path, commands):
    for seed in range(2):
        scaleray.skip_on_path(f"baseline/baseline-{seed}", "there is an older one", name=path.folder)
    to_the_gates(path)
    after = scaleray.next_on_path(path.folder, until="produce")
    task = after.next_task()
    assert (task.key, task.status, task.exit_code) == ("validate/gate", "failed", 2)
    assert "all its trainings were skipped" in task.words and "scaleray path redo baseline/baseline-0" in task.words
    assert {"gate", "promote"}.isdisjoint(words[0] for words in commands.ran)


def test_a_baseline_of_other_data_is_named_by_the_real_gate_and_nothing_is_promoted(path, commands, monkeypatch):
    def train(folder, resumed=()):
        rows = {"train": {"rows": 1437, "sha256": "other" if folder.name == "baseline-1" else "same"}}
        record = a_run(
            folder.name, data=rows, workers=1 if "baseline" in folder.name else 2, resumed_after=list(resumed)
        )
        (folder / "record.json").write_text(record.to_json())

    def answer(words, *, log, instead=commands):
        if words[0] != "gate":
            return instead(words, log=log)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            code = run_command([*words, "--json"])
        return code, json.loads(printed.getvalue()), ""

    monkeypatch.setattr(commands, "train", train)
    monkeypatch.setattr(of_commands, "run_command", answer)
    to_the_gates(path)
    for key in ("distribute/verify", "optimise/study", "validate/faults-0"):
        scaleray.skip_on_path(key, "the fingerprint comes first", name=path.folder)
    task = scaleray.next_on_path(path.folder, until="produce").next_task()
    assert (task.key, task.status, task.exit_code) == ("validate/gate", "failed", 1)
    assert "fingerprint fail" in task.words and "data.train.sha256" in task.words
    assert "promote" not in [words[0] for words in commands.ran]


def test_what_the_promotion_says_last_is_why_nothing_of_the_last_step_is_done(path, commands, monkeypatch):
    said = "TrackingError: the run in MLflow abc is deleted."

    def answer(words, *, log, instead=commands):
        return (2, {}, said) if words[0] == "promote" else instead(words, log=log)

    monkeypatch.setattr(of_commands, "run_command", answer)
    to_the_gates(path)
    after = scaleray.next_on_path(path.folder, until="produce")
    assert (after.next_task().key, after.next_task().words) == ("produce/promote", said)
    assert {task.status for task in after.tasks if task.step == "produce"} == {"failed", "open"}


def test_what_a_command_said_last_is_why_it_failed(path, commands):
    commands.codes = [1]
    assert scaleray.next_on_path(path.folder).tasks[0].words == "Error: it broke"


@pytest.mark.combination
def test_a_command_is_a_process_of_its_own_whose_words_are_kept(tmp_path, capfd):
    code, printed, said = of_commands.run_command(["gate", "nowhere"], log=tmp_path / "logs" / "one.log")
    assert (code, printed) == (2, {}) and said.startswith("TrackingError: ") and "nowhere" in said
    assert said in (tmp_path / "logs" / "one.log").read_text() and said in capfd.readouterr().err


class TestEndurance:
    def ready(self, path, commands):
        to_the_gates(path)
        return scaleray.next_on_path(path.folder, until="validate")

    def test_a_killed_training_must_come_to_the_same_end(self, path, commands):
        task = self.ready(path, commands).task("validate/faults-0")
        assert task.status == "done" and task.figures["resumed after step"] == 2 and task.figures["differs by"] == 0
        assert task.figures["samples_per_s"] == 100, "what any training measures is there too"
        assert ["train", "--resume", f"{path.folder}/runs/faults-0"] in commands.ran

    def test_another_end_fails(self, path, commands, monkeypatch):
        before = commands.train

        def train(folder, resumed=()):
            before(folder, resumed)
            if "faults" in folder.name:
                text = (folder / "record.json").read_text().replace("0.95", "0.85")
                (folder / "record.json").write_text(text)

        monkeypatch.setattr(commands, "train", train)
        task = self.ready(path, commands).task("validate/faults-0")
        assert task.status == "failed" and "allowed difference 0.01" in task.words

    def test_one_that_nothing_was_killed_of_shows_nothing(self, path, commands, monkeypatch):
        monkeypatch.setattr(endurance, "_killed", lambda *a: False)
        task = self.ready(path, commands).task("validate/faults-0")
        assert task.status == "failed" and "too short" in task.words

    def test_one_that_was_cut_off_before_its_checkpoint_is_killed_again(self, path, commands):
        cut = Path(path.folder) / "runs" / "faults-0"
        cut.mkdir(parents=True)
        (cut / "run.json").write_text("{}")
        assert self.ready(path, commands).task("validate/faults-0").status == "done"
        assert cut.with_name("faults-0.before-1").is_dir()

    def test_one_that_ended_unhurt_is_killed_at_the_next_call(self, path, commands, monkeypatch):
        def unhurt(words, folder, log):
            folder.mkdir(parents=True)
            commands.train(folder)
            return False

        killed = endurance._killed
        monkeypatch.setattr(endurance, "_killed", unhurt)
        assert self.ready(path, commands).task("validate/faults-0").status == "failed"
        monkeypatch.setattr(endurance, "_killed", killed)
        assert scaleray.next_on_path(path.folder).task("validate/faults-0").status == "done"

    def test_it_has_a_checkpoint_after_a_quarter_of_the_steps(self, path, commands):
        self.ready(path, commands)
        assert "{quarter}" in find_path(path.folder).task("validate/faults-0").command
        seen = []
        endurance._killed, before = lambda words, *a: seen.append(words) or False, endurance._killed
        try:
            scaleray.redo_on_path("validate/faults-0", name=path.folder)
            scaleray.next_on_path(path.folder)
        finally:
            endurance._killed = before
        assert seen[0][seen[0].index("--checkpoint.every") + 1] == "10 steps"

    def test_a_long_training_with_a_critical_alert_fails(self, path, commands, monkeypatch):
        before = commands.train

        def train(folder, resumed=()):
            before(folder, resumed)
            if "soak" in folder.name:
                record = json.loads((folder / "record.json").read_text())
                record["alerts"] = [{"name": "worker_lost", "severity": "critical"}]
                (folder / "record.json").write_text(json.dumps(record))

        monkeypatch.setattr(commands, "train", train)
        task = self.ready(path, commands).task("validate/soak-0")
        assert task.status == "failed" and "worker_lost" in task.words and task.figures["drift"] == 1.0
        assert task.command[task.command.index("--stop.after") + 1] == "30 steps", "three times the job's"


def test_what_is_done_again_sets_its_run_aside_and_opens_what_follows(path, commands):
    scaleray.next_on_path(path.folder, until="distribute")
    after = scaleray.redo_on_path("baseline/baseline-1", "a machine was slow", name=path.folder)
    assert [task.status for task in after.tasks[:3]] == ["done", "open", "open"]
    assert sorted(p.name for p in (Path(path.folder) / "runs").iterdir()) == [
        "baseline-0", "baseline-1.before-1", "first-0.before-1"
    ]  # fmt: skip
    assert scaleray.next_on_path(path.folder).tasks[1].status == "done"
    assert after.decisions[-1].why == "a machine was slow"


def test_a_study_that_is_done_again_measures_all_anew(path, commands):
    scaleray.next_on_path(path.folder, until="optimise")
    studied = [words for words in commands.ran if words[0] == "study"]
    assert len(studied) == 1 and "--force" not in studied[0]
    scaleray.redo_on_path("optimise/study", name=path.folder)
    scaleray.next_on_path(path.folder)
    assert commands.ran[-1] == [*studied[0], "--force"]


def test_what_was_skipped_can_be_done_after_all(path, commands):
    scaleray.skip_on_path("baseline/baseline-0", "later", name=path.folder)
    assert scaleray.redo_on_path("baseline/baseline-0", name=path.folder).tasks[0].status == "open"


def test_a_promotion_that_is_done_again_sets_its_pipeline_aside(path, commands):
    to_the_gates(path)
    scaleray.next_on_path(path.folder, until="produce")
    (Path(path.folder) / "pipeline").mkdir()
    after = scaleray.redo_on_path("produce/promote", name=path.folder)
    assert after.next_task().key == "produce/promote"
    assert (Path(path.folder) / "pipeline.before-1").is_dir() and not (Path(path.folder) / "pipeline").exists()


def test_the_sweep_says_what_to_decide_by(path, commands):
    commands.printed["sweep"] = {"summary": "goodput is highest at batch 16."}
    task = scaleray.next_on_path(path.folder, until="produce").next_task()
    assert task.key == "optimise/decide" and "goodput is highest at batch 16. Now a person decides" in task.words


def test_the_runbook_says_what_is_usual_and_what_every_alert_asks_for(path, commands):
    to_the_gates(path)
    after = scaleray.next_on_path(path.folder, until="produce")
    text = (Path(path.folder) / "runbook.md").read_text()
    assert after.next_task() is None and "Measured limits" not in text
    (Path(path.folder) / "pipeline").mkdir()
    (Path(path.folder) / "pipeline" / "pipeline.json").write_text('{"alert_limits": ["no_progress_s 40: 20 seen"]}')
    assert "- no_progress_s 40: 20 seen" in runbook(after)
    assert "| samples_per_s | 100.5 | 100.5 | 100 to 101 |" in text and "scaleray rollback digits@champion" in text
    assert "| no_progress | critical |" in text


def test_a_path_goes_on_where_its_folder_was_moved_to(path, commands, tmp_path):
    scaleray.next_on_path(path.folder)
    moved = tmp_path / "elsewhere" / "path-digits"
    moved.parent.mkdir()
    Path(path.folder).rename(moved)
    after = scaleray.next_on_path(str(moved))
    assert after.tasks[1].folder == f"{moved}/runs/baseline-1"
    assert str(path.folder) not in " ".join(word for task in read(moved).tasks for word in task.command)


def test_two_at_once_and_two_of_one_name_are_refused(path, tmp_path):
    with locked(path), pytest.raises(UsageError, match="is in use by another process"):
        scaleray.next_on_path(path.folder)
    with pytest.raises(UsageError, match="The path digits already exists"):
        start_path(
            tmp_path / "job.yaml", "a/b >= 1", workers=2, name="digits",
            overrides={"checkpoint.storage_path": str(tmp_path / "runs")},
        )  # fmt: skip


def test_bad_input_is_one_message(path, tmp_path):
    job = tmp_path / "job.yaml"
    with pytest.raises(ConfigError, match="--target"):
        start_path(job, "high", workers=2)
    with pytest.raises(UsageError, match="at least 2"):
        start_path(job, "a/b >= 1", workers=1)
    fresh = {"checkpoint.storage_path": str(tmp_path / "fresh")}
    with pytest.raises(ConfigError, match=r"convergence\.margn.*\n.*margin"):
        start_path(job, "a/b >= 1", workers=2, policy={"convergence": {"margn": 0.1}}, overrides=fresh)
    with pytest.raises(UsageError, match="it must be one of local, "):
        start_path(job, "a/b >= 1", workers=2, kind="mainframe", overrides=fresh)
    with pytest.raises(ConfigError, match="--soak"):
        start_path(job, "a/b >= 1", workers=2, soak="long", overrides=fresh)
    assert not (tmp_path / "fresh").exists(), "nothing is left behind"
    with pytest.raises(UsageError, match="it must be one of baseline"):
        scaleray.next_on_path(path.folder, until="the end")
    with pytest.raises(UsageError, match="it must be one of baseline/baseline-0"):
        scaleray.redo_on_path("baseline", name=path.folder)
    with pytest.raises(UsageError, match="The path nowhere was not found"):
        scaleray.next_on_path("nowhere")
    (Path(path.folder) / "path.json").write_text("{")
    with pytest.raises(UsageError, match=r"its path\.json cannot be read"):
        find_path(path.folder)
