"""`scaleray gate` on folders of recorded runs: what it finds by itself, its exit codes, and bad input."""

import dataclasses
import json
import os
import shlex
import time
from pathlib import Path

import pyarrow.fs
import pytest

from scaleray.cli.gate import gate
from scaleray.common.filesystems import lock
from scaleray.errors import ConfigError, TrackingError, UsageError
from scaleray.records.alert_record import Alert
from scaleray.records.conditions import start_key
from scaleray.release.gate.evidence import collect
from scaleray.release.gate.gate import evaluate_evidence
from scaleray.release.gate.gate import gate as judge
from scaleray.release.gate.policy_file import policy_of, read_policy
from scaleray.release.gate.stored_evidence import read_evidence, store_evidence
from scaleray.release.gates.policy import Policy
from tests import study_examples
from tests.recorded_runs import a_certificate, a_run


def write(folder, record):
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(record.to_json())
    return str(folder)


def a_folder_of_runs(root, name, *, number=3, **more):
    return [
        write(root / f"{name}{seed}", a_run(f"{name}{seed}", config={"seed": seed, **more.pop("config", {})}, **more))
        for seed in range(number)
    ]


def test_runs_of_the_same_but_the_seed_beside_the_run_are_its_repeats(tmp_path):
    candidates = a_folder_of_runs(tmp_path, "candidate")
    baselines = a_folder_of_runs(tmp_path, "baseline", number=2, workers=1)
    write(tmp_path / "killed", a_run("killed", status="KILLED", config={"seed": 7}))
    evidence = collect(candidates[:1], against=baselines[:1])
    assert sorted(one.record.name for one in evidence.candidates) == ["candidate0", "candidate1", "candidate2"]
    assert sorted(one.record.name for one in evidence.baselines) == ["baseline0", "baseline1"]
    assert len(evidence.notes) == 3 and "candidate: killed runs that differ only in the seed" in evidence.notes[1]
    assert evidence.notes[1].endswith(": killed")


def test_a_seed_that_failed_is_a_repeat_unless_it_has_finished_as_well(tmp_path):
    candidates = a_folder_of_runs(tmp_path, "candidate")
    for name, seed in (("again", 1), ("diverged", 8)):
        write(tmp_path / name, a_run(name, status="FAILED", config={"seed": seed}))
    evidence = collect(candidates[:1])
    assert sorted(one.record.name for one in evidence.candidates) == [
        "candidate0", "candidate1", "candidate2", "diverged",
    ]  # fmt: skip
    assert "of which 1 failed" in evidence.notes[0]
    answer = judge(*candidates[:1], against=candidates[1:2], gates=["operations"])
    assert answer.answer == "fail" and "diverged is FAILED" in answer.gates[0].checks[0].words


def left(folder, seed, *, age_s, **more):
    """A folder with the run.json of a training that has no record; its files are so old."""
    run = a_run(config={"seed": seed, **more})
    key = start_key(run.config, run.workers, run.environment, run.data)
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"name": folder.name, "config": run.config, "repeats": key}))
    (folder / ".lock").touch()
    for path in (*folder.iterdir(), folder):
        os.utime(path, (time.time() - age_s, time.time() - age_s))
    return folder


def test_a_seed_that_left_no_record_has_failed_unless_it_may_still_run(tmp_path):
    candidates = a_folder_of_runs(tmp_path, "candidate", number=2)
    left(tmp_path / "dead", 7, age_s=60)
    left(tmp_path / "again", 1, age_s=60)
    left(tmp_path / "other", 9, age_s=60, stop={"after": "3 epochs"})
    left(tmp_path / "trains", 10, age_s=0)
    with open(left(tmp_path / "held", 11, age_s=60) / ".lock") as file:
        assert lock(file)
        evidence = collect(candidates[:1])
    assert [one.record.name for one in evidence.candidates] == ["candidate0", "candidate1", "dead"]
    assert "of which 1 failed" in evidence.notes[0]
    answer = judge(*candidates[:1], against=candidates[1:2], gates=["operations"])
    assert answer.answer == "fail" and "dead is FAILED" in answer.gates[0].checks[0].words
    words = shlex.split(answer.gates[0].command)
    again = judge(*words[2 : words.index("--against")], against=candidates[1:2], gates=["operations"])
    assert again.gates[0].checks == answer.gates[0].checks
    with pytest.raises(TrackingError):
        judge(candidates[0], str(tmp_path / "other"))


def test_a_seed_that_failed_before_its_workers_reported_is_a_repeat(tmp_path):
    candidates = a_folder_of_runs(tmp_path, "candidate", number=1)
    write(tmp_path / "early", a_run("early", status="FAILED", config={"seed": 8}, workers_told=[]))
    assert [one.record.name for one in collect(candidates).candidates] == ["candidate0", "early"]


def test_what_a_row_took_to_be_read_makes_no_other_run_of_a_repeat(tmp_path):
    runs = [
        write(tmp_path / f"run{seed}", a_run(f"run{seed}", config={"seed": seed}, data={"train": {"row_us": us}}))
        for seed, us in enumerate([8.1, 8.4, 7.9])
    ]
    assert len(collect(runs[:1]).candidates) == 3


def test_the_command_of_a_gate_asks_it_again_of_the_same_runs(tmp_path):
    candidates, baselines = (a_folder_of_runs(tmp_path / side, side) for side in ("candidate", "baseline"))
    first = judge(*candidates[:1], against=baselines[:1], gates=["convergence", "operations"])
    words = shlex.split(first.gates[0].command)
    assert words[:2] == ["scaleray", "gate"] and words[-2:] == ["--gates", "convergence"]
    split = words.index("--against")
    again = judge(*words[2:split], against=words[split + 1 : -2], gates=[words[-1]])
    assert again.gates[0].checks == first.gates[0].checks


def test_a_run_that_is_given_twice_and_a_copy_of_it_are_no_repeats(tmp_path):
    run, other = a_folder_of_runs(tmp_path, "candidate", number=2, run_id="0" * 32)
    with pytest.raises(UsageError, match="is given twice, as the candidate"):
        collect([run, run])
    with pytest.raises(UsageError, match="is given twice, as the candidate"):
        collect([run, other])
    (tmp_path / "apart").mkdir()
    write(tmp_path / "apart/one", a_run("one"))
    write(tmp_path / "apart/same-seed", a_run("same-seed"))
    assert len(collect([str(tmp_path / "apart/one")]).candidates) == 1


def test_a_run_beside_it_that_was_killed_and_went_on_is_a_fault_survived(tmp_path):
    (run,) = a_folder_of_runs(tmp_path, "candidate", number=1)
    policy = {"operations": {"min_faults_survived": 1, "no_alerts_of": []}}
    assert judge(run, gates=["operations"], policy=policy).answer == "inconclusive"
    write(tmp_path / "other", a_run("other", resumed_after=[7], config={"optimizer": {"learning_rate": 9.0}}))
    assert judge(run, gates=["operations"], policy=policy).answer == "inconclusive"
    write(tmp_path / "killed", a_run("killed", resumed_after=[7], config={"checkpoint": {"every": "5 steps"}}))
    found = judge(run, gates=["operations"], policy=policy)
    assert found.answer == "pass" and "faults: 1 runs next to it" in " ".join(found.notes)
    folder = tmp_path / "kept"
    evidence = collect([run])
    store_evidence(evidence, policy_of(policy, where="here"), folder)
    kept, held = read_evidence(folder)
    assert evaluate_evidence(kept, held, gates=["operations"]).gates[0].checks == found.gates[0].checks


def test_runs_that_are_named_are_all_there_are(tmp_path):
    candidates = a_folder_of_runs(tmp_path, "candidate")
    assert len(collect(candidates[:2]).candidates) == 2


def test_a_certificate_beside_the_run_is_found_and_one_of_another_kind_is_passed_over(tmp_path):
    (run,) = a_folder_of_runs(tmp_path, "candidate", number=1)
    for name, left_out in (("verify-1", ()), ("verify-resume", ("strategies", "world_sizes"))):
        (tmp_path / name).mkdir()
        values = {key: value for key, value in a_certificate().to_dict().items() if key not in left_out}
        (tmp_path / name / "certificate.json").write_text(json.dumps(values))
    record = judge(run, gates=["equality"])
    assert [check.answer for check in record.gates[0].checks] == ["pass", "inconclusive"], "MLflow has no copy of it"


@pytest.mark.combination
def test_what_lies_beside_a_run_in_a_bucket_is_found_and_so_are_its_alerts(tmp_path, bucket):
    """A bucket by its URI, as of a run on a cluster: repeats, faults, certificates, a study, and alerts."""
    runs = a_folder_of_runs(tmp_path, "candidate")
    for run in runs:
        alert = Alert("loss spike", "critical", "firing", 0.0, 9.0, "it rose")
        Path(run, "alerts.jsonl").write_text(json.dumps(dataclasses.asdict(alert)) + "\n" if run is runs[2] else "")
    (tmp_path / "verify-1").mkdir()
    (tmp_path / "verify-1" / "certificate.json").write_text(a_certificate().to_json())
    root = f"bucket/{tmp_path.name}"  # the server keeps what other tests have left in the bucket
    pyarrow.fs.copy_files(str(tmp_path), root, destination_filesystem=bucket)
    runs = [f"s3://{root}/candidate{seed}" for seed in range(3)]
    evidence = collect(runs[:1], against=runs[1:2])
    assert [one.record.name for one in evidence.candidates] == ["candidate0", "candidate2"]
    assert [one.name for one in evidence.certificates] == [f"s3://{root}/verify-1"]
    assert collect(runs[:2], certificates=[f"s3://{root}/verify-1"]).certificates == evidence.certificates
    assert judge(*runs[:2], gates=["operations"]).answer == "pass"
    found = judge(*runs, gates=["operations"])
    assert found.answer == "fail" and "loss spike" in found.gates[0].checks[-1].words
    store_evidence(collect(runs), policy_of({}, where="here"), tmp_path / "kept")
    kept, held = read_evidence(tmp_path / "kept")
    assert evaluate_evidence(kept, held, gates=["operations"]).gates[0].checks == found.gates[0].checks


@pytest.mark.parametrize("name", ["nowhere", "file:///nowhere", "candidate0/record.json"])
def test_a_certificate_that_is_none_is_one_error(tmp_path, name):
    (run,) = a_folder_of_runs(tmp_path, "candidate", number=1)
    where = name if "://" in name else str(tmp_path / name)
    with pytest.raises(TrackingError, match="has no certificate"):
        collect([run], certificates=[where])


def test_evaluations_that_nobody_has_are_no_target_missed(tmp_path):
    sides = [a_folder_of_runs(tmp_path / side, side, number=5) for side in ("candidate", "baseline")]
    found = judge(
        *sides[0], against=sides[1], policy={"convergence": {"target": "test/f1 >= 0.9"}}, gates=["convergence"]
    )
    assert found.answer == "inconclusive"
    assert "10 runs have no evaluation of its metric" in str(found.gates[0].checks)


def test_the_exit_code_and_the_json_say_the_same(tmp_path, capsys):
    runs = a_folder_of_runs(tmp_path, "candidate", number=1)
    (tmp_path / "candidate0" / "alerts.jsonl").write_text("")
    assert gate(*runs, gates="operations", json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["answer"], [one["gate"] for one in found["gates"]]) == ("pass", ["operations"])
    assert gate(*runs, gates="operations,convergence") == 3
    failed = write(tmp_path / "failed", a_run("failed", status="FAILED"))
    assert gate(failed, gates="operations,convergence") == 1
    assert "FAIL  every candidate has finished" in capsys.readouterr().out


def test_a_run_on_both_sides_is_refused(tmp_path):
    (run,) = a_folder_of_runs(tmp_path, "candidate", number=1)
    with pytest.raises(UsageError, match="cannot be both candidate and baseline"):
        collect([run], against=[run])


def test_a_study_as_run_is_refused_and_a_run_as_study(tmp_path):
    (run,) = a_folder_of_runs(tmp_path, "candidate", number=1)
    study = write(tmp_path / "study", study_examples.study())
    with pytest.raises(UsageError, match="gates apply to trainings"):
        collect([study, run])
    with pytest.raises(UsageError, match="it must be a scaling study"):
        collect([run], study=run)


def test_what_to_do_next_can_be_typed_as_it_stands(tmp_path):
    run = write(tmp_path / "run", a_run("run", run_dir=str(tmp_path / "run"), config={"seed": 6}))
    found = judge(run, gates=["equality", "scaling", "convergence"])
    remedies = [check.remedy for gate in found.gates for check in gate.checks if check.remedy]
    config = f"-c {tmp_path}/run/config.yaml"
    assert f"scaleray study {config} --world-sizes 1,2 --mode strong --repeats 3, then --study NAME" in remedies
    assert f"train more runs with other seeds: scaleray train {config} --seed 7" in remedies
    assert not any("FILE" in remedy or " N" in remedy.replace("--study NAME", "") for remedy in remedies)


def test_a_study_alone_is_asked_for_scaling_and_equality_and_the_others_are_named(tmp_path, capsys):
    study = write(tmp_path / "study", study_examples.study(modes=("strong",)))
    record = judge(study, policy={"fingerprint": {"allow_uncommitted": True}})
    assert [one.gate for one in record.gates] == ["equality", "scaling"] and record.run == "digits-study"
    assert record.notes == [
        f"fingerprint, convergence, operations apply to a training, not to a study: scaleray gate RUN --study {study}"
    ]
    assert record.gates[1].checks[0].what == "efficiency of 8 workers (strong) above 0.7"
    assert record.gates[1].command == f"scaleray gate {study} --gates scaling"
    assert gate(study, gates="scaling", json=True) == 3
    assert json.loads(capsys.readouterr().out)["gates"][0]["gate"] == "scaling"
    with pytest.raises(UsageError, match="a study has only the gates equality and scaling"):
        judge(study, gates=["operations"])
    with pytest.raises(UsageError, match="for which --against and --study are not allowed"):
        judge(study, against=[study])
    with pytest.raises(UsageError, match="no curve of weak scaling"):
        judge(study, policy={"scaling": {"mode": "weak"}})


def test_an_unknown_gate_and_no_run_name_what_there_is(tmp_path):
    with pytest.raises(ConfigError, match="it must be one of fingerprint, equality"):
        judge(str(tmp_path), gates=["fingerprints"])
    with pytest.raises(UsageError, match="Give the RUN of a training or a study"):
        gate()


def test_a_file_that_is_no_certificate_is_one_error(tmp_path):
    (run,) = a_folder_of_runs(tmp_path, "candidate", number=1)
    with pytest.raises(TrackingError, match=r"has no certificate\.json"):
        collect([run], certificates=[run])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("convergence: {margn: 0.1}", r"yaml:1 convergence.margn.*unknown key(?s:.*)did you mean convergence.margin"),
        ("convergense: {}", r"yaml:1 convergense.*unknown key(?s:.*)did you mean convergence"),
        ("scaling:\n\n  min_efficiency: 7", r"yaml:3 scaling.min_efficiency.*is 7"),
        ("convergence: {target: high}", r"convergence.target.*a metric, >= or <=, and a number"),
        ("- a", "is not a mapping with the sections fingerprint"),
        ("{", "cannot be read"),
    ],
)
def test_a_policy_with_a_slip_is_one_error_that_names_the_key(tmp_path, text, message):
    file = tmp_path / "policy.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_policy(file)


def test_a_policy_keeps_the_defaults_of_what_it_leaves_out(tmp_path):
    assert read_policy(None) == Policy()
    found = policy_of({"convergence": {"target": "test/accuracy >= 0.97", "margin": 0.1}}, where="here")
    assert found.convergence.margin == 0.1 and found.scaling == Policy().scaling
    with pytest.raises(ConfigError, match="does not exist"):
        read_policy(tmp_path / "nowhere.yaml")


def test_a_study_of_another_training_does_not_count(tmp_path):
    (run,) = a_folder_of_runs(tmp_path, "candidate", number=1)
    study = study_examples.study(modes=("strong",))
    study = dataclasses.replace(study, conditions=dataclasses.replace(study.conditions, config_hash="another"))
    record = judge(run, study=write(tmp_path / "study", study), gates=["scaling"])
    assert record.answer == "inconclusive" and "its config defines a different training" in " ".join(record.lines())
