"""A submission to Slurm: what sbatch is told, where the code lies, and what Slurm's words mean."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from scaleray.cli import submit as command
from scaleray.cli.main import run_command
from scaleray.cli.output import Output
from scaleray.clusters.submit.clusters import SlurmCluster
from scaleray.clusters.submit.slurm_jobs import SlurmJobs, status_of, to_text
from scaleray.errors import ClusterError

RUNNING = (
    "JobId=42 JobName=mine JobState=RUNNING Reason=None ExitCode=0:0 StartTime=2026-01-01T00:00:00 EndTime=Unknown\n"
)
DONE = RUNNING.replace("RUNNING", "COMPLETED")


@pytest.fixture
def shared(project):
    return project.parent / "shared"


@pytest.fixture
def slurm(stand_ins, clusters, shared):
    """A Slurm that takes each job, as its number 42."""
    stand_ins.add("sbatch", "squeue", "sacct", "scontrol", "scancel")
    stand_ins.answer("^sbatch", "42\n")
    clusters(lab={"kind": "slurm", "folder": str(shared), "options": ["--partition=gpu"]})
    return stand_ins


def submitted(*words):
    return run_command(["submit", "-c", "jobs/work.yaml", "--to", "lab", *words])


def queued(slurm):
    return next((words, environment) for name, words, _, environment in slurm.calls if name == "sbatch")


def test_a_job_is_the_batch_script_in_a_folder_of_its_own_with_the_code(slurm, shared, monkeypatch, capsys):
    monkeypatch.setenv("SCALERAY_TRACKING__URI", "sqlite:////x.db")
    monkeypatch.setenv("PRIVATE", "hunter2")
    assert submitted("--name", "mine", "--scale.workers", "16", "--tracking.experiment", "it's a b") == 0
    words, environment = queued(slurm)
    script = words.index("cluster/slurm/train.sbatch")
    options = ["--tracking.uri=sqlite:////x.db", "--scale.workers", "16", "--tracking.experiment", "it's a b"]
    assert words[script + 1 :] == ["-c", "jobs/work.yaml", *options]
    assert words[0] == "--partition=gpu" and "--job-name=mine" in words and f"--output={shared}/mine.out" in words
    [exported] = [word for word in words if word.startswith("--export=")]
    names = exported.partition("=")[2].split(",")
    assert "PRIVATE" not in names and "ALL" not in names and {"PATH", "HOME", "SUBCOMMAND"} <= set(names)
    assert environment["SUBCOMMAND"] == "train --resume auto"
    assert (
        environment["SCALERAY_CHECKPOINT__STORAGE_PATH"] == f"{shared}/runs" and environment["PWD"] == f"{shared}/mine"
    )
    assert (shared / "mine").stat().st_mode & 0o077 == 0 and (shared / "mine" / "jobs" / "work.py").is_file()
    assert (shared / "mine.id").read_text() == "42\n"
    text = (shared / "mine" / "cluster" / "slurm" / "train.sbatch").read_text()
    assert "#SBATCH --nodes=2" in text and "SUBCOMMAND" in text
    out = capsys.readouterr().out
    assert "Slurm's job 42" in out and "not compared, since the cluster has no `environment`" in out
    assert submitted("--name", "mine") == 2
    assert "its folder already contains a job of this name" in capsys.readouterr().err


def test_the_address_of_a_webhook_never_gets_there(slurm, capsys):
    assert submitted("--alerts.webhook=https://hook.test/T0/hunter2") == 2
    assert not [name for name, *_ in slurm.calls if name == "sbatch"]
    assert "alerts.webhook_env" in capsys.readouterr().err


def test_a_script_of_the_users_own_travels_unless_it_cannot_be_told_what_to_run(slurm, project, shared, capsys):
    own = project / "cluster" / "slurm"
    own.mkdir(parents=True)
    (own / "train.sbatch").write_text("#!/bin/bash\n# mine, with SUBCOMMAND\n")
    assert submitted("--name", "mine", "--command", "verify") == 0
    assert "mine, with" in (shared / "mine" / "cluster" / "slurm" / "train.sbatch").read_text()
    assert queued(slurm)[1]["SUBCOMMAND"] == "verify"
    (own / "train.sbatch").write_text("#!/bin/bash\n")
    assert submitted() == 2
    assert "scaleray cluster write --kind slurm --overwrite" in capsys.readouterr().err


def test_secrets_are_exported_by_name_and_no_list_of_processes_shows_them(slurm, shared, monkeypatch, capsys):
    monkeypatch.setenv("S3_KEY", "hunter2")
    assert submitted("--secret-env", "S3_KEY", "--name", "mine") == 0
    words, environment = queued(slurm)
    assert environment["S3_KEY"] == "hunter2" and any("S3_KEY" in word for word in words if "--export" in word)
    printed = capsys.readouterr()
    assert "hunter2" not in printed.out + printed.err and not any(
        "hunter2" in " ".join(w) for _, w, _, _ in slurm.calls
    )
    assert not any("hunter2" in path.read_text() for path in shared.rglob("*") if path.is_file())


def test_over_ssh_scripts_and_values_go_through_pipes(slurm, clusters, shared, monkeypatch):
    ssh = slurm.bin / "ssh"
    ssh.write_text(
        f"#!/bin/bash\necho \"$@\" >>'{slurm.folder}/ssh'\n"
        'for last; do :; done\nexec bash -c "${last/bash -lc/bash -c}"\n'
    )
    ssh.chmod(0o755)
    clusters(lab={"kind": "slurm", "folder": str(shared), "ssh": "me@login"})
    monkeypatch.setenv("S3_KEY", "hunter2")
    assert submitted("--secret-env", "S3_KEY", "--name", "mine") == 0
    told = (slurm.folder / "ssh").read_text()
    assert "me@login" in told and "BatchMode=yes" in told and "hunter2" not in told
    assert queued(slurm)[1]["S3_KEY"] == "hunter2" and (shared / "mine" / "jobs" / "work.yaml").is_file()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("me@login: Permission denied (publickey).", "refused your login"),
        ("ssh: Could not resolve hostname login", "no machine has this name"),
        ("ssh: connect to host login port 22: Connection timed out", "cannot be reached"),
    ],
)
def test_a_login_node_that_is_not_reached_is_one_message(slurm, clusters, shared, capsys, error, said):
    slurm.add("ssh")
    slurm.answer("^ssh", code=255, err=error)
    clusters(lab={"kind": "slurm", "folder": str(shared), "ssh": "me@login"})
    assert submitted() == 2
    text = capsys.readouterr().err
    assert said in " ".join(text.split()) and "Traceback" not in text


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size"
         " and/or time limits)", "a limit of your account or QOS is reached"),
        ("sbatch: error: QOSMaxSubmitJobPerUserLimit", "a limit of your account or QOS is reached"),
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
         "its controller cannot be reached"),
        ("sbatch: fatal: Could not establish a configuration source", "no Slurm controller can be found from here"),
        ("sbatch: error: invalid partition specified: gpu", "it has no such partition, account or nodes"),
        ("sbatch: error: Batch job submission failed: Requested node configuration is not available", "no such partition"),
        ("sbatch: error: something new", "Slurm reports: sbatch: error: something new"),
    ],
)  # fmt: skip
def test_a_job_that_slurm_does_not_take_is_one_message_and_leaves_no_folder(slurm, shared, capsys, error, said):
    slurm.first("^sbatch", code=1, err=error)
    assert submitted("--name", "mine") == 2
    text = capsys.readouterr().err
    assert said in " ".join(text.split()) and "Traceback" not in text
    assert not (shared / "mine").exists()


def test_without_slurms_commands_or_room_or_rights_it_is_one_message(stand_ins, clusters, shared, monkeypatch, capsys):
    clusters(lab={"kind": "slurm", "folder": str(shared)})
    assert submitted() == 2
    assert "Slurm's commands are not found" in capsys.readouterr().err
    shared.rename(shared.parent / "moved")
    shared.write_text("a file")
    assert submitted() == 2
    assert "the shared folder cannot be written" in capsys.readouterr().err
    clusters(lab={"kind": "slurm", "folder": "/dev/full"})
    full = SlurmJobs(SlurmCluster(name="lab", kind="slurm", folder="/dev"))
    with pytest.raises(ClusterError, match="you have no space left in the shared folder"):
        full._refuse(full._shell("echo x >/dev/full"))


def test_versions_of_the_named_environment_are_compared(slurm, clusters, shared, tmp_path, capsys):
    environment = tmp_path / "environment"
    (environment / "bin").mkdir(parents=True)
    told = {"python": "3.9.1", "packages": {"ray": "2.60.0", "torch": "2.13.0"}}
    python = environment / "bin" / "python"
    python.write_text(f"#!/bin/bash\necho 'scaleray-probe {json.dumps(told)}'\n")
    python.chmod(0o755)
    clusters(lab={"kind": "slurm", "folder": str(shared), "environment": str(environment)})
    assert submitted() == 2
    assert "Python is 3.9.1 there" in capsys.readouterr().err and not slurm.words("sbatch")
    python.write_text("#!/bin/bash\necho no such thing >&2; exit 127\n")
    assert submitted() == 2
    assert "has a Python that does not report versions: no such thing" in " ".join(capsys.readouterr().err.split())
    assert submitted("--bring-missing") == 2
    assert "--bring-missing needs a Ray cluster" in capsys.readouterr().err


def known(slurm, shared, *states):
    """A job 42, mine, in these states one after another."""
    shared.mkdir(exist_ok=True)
    (shared / "mine.id").write_text("42\n")
    for state in states[:-1]:
        slurm.answer("scontrol show job 42", state, times=1)
    slurm.answer("scontrol show job 42", states[-1])
    return SlurmJobs(SlurmCluster(name="lab", kind="slurm", folder=str(shared)))


def test_a_job_is_followed_by_its_log_and_says_why_it_waits(slurm, shared, monkeypatch):
    pending = RUNNING.replace("RUNNING", "PENDING").replace("Reason=None", "Reason=QOSMaxGRESPerUser")
    jobs = known(slurm, shared, pending, pending, RUNNING, DONE)
    log, written, said = shared / "mine.out", [], []
    real, lines = jobs._write_new, ["", "", "grüße\n".encode()[:3], "grüße\n".encode()[3:]]

    def write_new(*words):
        with log.open("ab") as file:
            file.write(lines.pop(0) or b"") if lines else None
        real(*words)

    lines[:2] = [b"", b""]
    monkeypatch.setattr(jobs, "_write_new", write_new)
    assert jobs.follow("mine", written.append, said.append).status == "SUCCEEDED"
    assert "".join(written) == "grüße\n"
    assert said == [
        "pending: QOSMaxGRESPerUser: a limit of your account, QOS or partition; sacctmgr show qos shows them"
    ]


def test_a_connection_that_is_lost_is_tried_again_and_nothing_is_written_twice(slurm, shared):
    jobs = known(slurm, shared, RUNNING, RUNNING, DONE)
    (shared / "mine.out").write_text("one\n")
    ssh = slurm.bin / "ssh"
    ssh.write_text(
        f"#!/bin/bash\ncount=$(cat '{slurm.folder}/count' 2>/dev/null || echo 0)\necho $((count + 1)) >'{slurm.folder}/count'\n"
        '[ "$count" != 5 ] || { echo "Connection reset by peer" >&2; exit 255; }\nfor last; do :; done\nexec bash -c "${last/bash -lc/bash -c}"\n'
    )
    ssh.chmod(0o755)
    jobs.cluster = SlurmCluster(name="lab", kind="slurm", folder=str(shared), ssh="login")
    written, said = [], []
    assert jobs.follow("mine", written.append, said.append).status == "SUCCEEDED"
    assert written == ["one\n"] and said == ["the connection to lab was lost; the job continues; reconnecting ..."]


def test_a_job_whose_number_could_not_be_written_does_not_break_the_list(slurm, shared, capsys):
    shared.mkdir()
    for name, text in (("full", ""), ("mine", "42\n"), ("torn", "4x\n")):
        (shared / f"{name}.id").write_text(text)
    slurm.answer("^squeue", RUNNING)
    assert run_command(["jobs", "list", "--to", "lab", "--json"]) == 0
    assert [job["name"] for job in json.loads(capsys.readouterr().out)["jobs"]] == ["mine"]


@pytest.mark.parametrize("name", ["a b", "-x", "../up", "42", "a,b", "%j", "x" * 101])
def test_a_name_that_a_folder_or_a_list_cannot_have_is_refused_before_anything_is_sent(slurm, shared, capsys, name):
    assert submitted("--name", name) == 2
    assert "--name" in capsys.readouterr().err and not shared.exists() and not slurm.calls


def test_code_that_does_not_fit_into_the_folder_leaves_nothing(slurm, shared, capsys):
    slurm.add("python3")
    slurm.answer("^python3", code=1, err="OSError: [Errno 28] No space left on device")
    assert submitted("--name", "mine") == 2
    assert "you have no space left in the shared folder" in capsys.readouterr().err
    assert list(shared.iterdir()) == []


def test_jobs_are_listed_by_squeue_and_sacct_and_found_by_name_or_number(slurm, shared, capsys):
    known(slurm, shared, RUNNING)
    (shared / "old.id").write_text("7\n")
    (shared / "mine.out").write_text("said\n")
    slurm.answer("^squeue --me", "JobId=42 JobState=PENDING Reason=Priority StartTime=N/A EndTime=N/A\n")
    slurm.answer("^sacct", "7|CANCELLED by 1000|0:15|2026-01-01T00:00:00|2026-01-01T00:01:00|None\n")
    assert run_command(["jobs", "list", "--to", "lab", "--json"]) == 0
    newest, oldest = json.loads(capsys.readouterr().out)["jobs"]
    assert (newest["name"], newest["status"], newest["message"]) == (
        "mine",
        "PENDING",
        "Priority: other jobs are ahead of it",
    )
    assert (oldest["name"], oldest["status"]) == ("old", "STOPPED") and oldest["ended_at"] - oldest["started_at"] == 60
    for name in ("mine", "42"):
        assert run_command(["jobs", "logs", name, "--to", "lab"]) == 0 and capsys.readouterr().out == "said\n"
    for name in ("other", "43"):
        assert run_command(["jobs", "logs", name, "--to", "lab"]) == 2
        assert "is neither the name nor the number of a job" in capsys.readouterr().err


def test_a_job_that_slurm_has_forgotten_is_over_and_a_controller_that_is_away_is_waited_for(slurm, shared):
    jobs = known(slurm, shared, DONE)
    slurm.first("scontrol show job 42", code=1, err="slurm_load_jobs error: Invalid job id specified")
    assert jobs.job("mine").status == "UNKNOWN" and jobs.job("mine").has_ended
    slurm.answer("^sacct", "42|COMPLETED|0:0|Unknown|Unknown|None\n")
    assert jobs.job("mine").status == "SUCCEEDED"
    away = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    slurm.first("scontrol show job 42", code=1, err=away, times=1)
    said = []
    assert jobs.follow("mine", [].append, said.append).status == "SUCCEEDED" and "was lost" in said[0]


def test_stopping_asks_a_training_to_save_first_and_ends_it_the_second_time(slurm, shared):
    known(slurm, shared, RUNNING.replace("RUNNING", "FAILED").replace("0:0", "1:0"))
    slurm.answer("^squeue --noheader --jobs=42", "RUNNING\n")
    assert run_command(["jobs", "stop", "mine", "--to", "lab"]) == 0
    assert slurm.words("scancel") == ["scancel --signal=USR1 --batch 42"] and (shared / "mine.stop").exists()
    assert SlurmJobs(SlurmCluster(name="lab", kind="slurm", folder=str(shared))).job("mine").status == "STOPPED"
    assert run_command(["jobs", "stop", "mine", "--to", "lab"]) == 0
    assert slurm.words("scancel")[-1] == "scancel 42"


@pytest.mark.parametrize(("answer", "stopped"), [("s", True), ("", False)])
def test_ctrl_c_asks_and_leaves_the_job_alone_unless_it_shall_stop(slurm, shared, monkeypatch, answer, stopped):
    jobs = known(slurm, shared, RUNNING, DONE)
    first = [KeyboardInterrupt()]
    real = jobs.job
    monkeypatch.setattr(jobs, "job", lambda name: (_ for _ in ()).throw(first.pop()) if first else real(name))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", lambda words: answer)
    assert command._follow(jobs, "mine", Output(json=True)) == (0 if stopped else 130)
    assert bool(slurm.words("scancel")) is stopped


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("JobState=COMPLETED ExitCode=0:0", "SUCCEEDED", ""),
        ("JobState=FAILED ExitCode=7:0", "FAILED", ""),
        ("JobState=TIMEOUT ExitCode=0:15", "FAILED", "timeout"),
        ("JobState=OUT_OF_MEMORY ExitCode=0:125", "FAILED", "out of memory"),
        ("JobState=REQUEUED Reason=BeginTime", "PENDING", "BeginTime: it is queued again"),
        ("42|NODE_FAIL|0:0|Unknown|Unknown|None", "FAILED", "node fail"),
        ("unknown", "UNKNOWN", "Slurm no longer lists it"),
        ("JobState=FAILED ExitCode=0:53\nsilent", "FAILED", "set the cluster's `folder` to one that all nodes see"),
    ],
)
def test_states_of_slurm_are_those_of_ray(line, status, message):
    found = status_of("mine", line, folder="/shared")
    assert found.status == status and message in found.message and bool(message) == bool(found.message)


def test_reasons_that_say_nothing_are_not_told():
    assert to_text("None") == to_text("") == ""
    assert "a limit of your account" in to_text("AssocGrpGRES") and to_text("Odd") == "Odd"


def test_the_batch_script_that_is_written_runs_what_it_is_told(project, tmp_path):
    """The words of the script up to what runs on the nodes, with a stand-in for that."""
    script = Path(__file__).resolve().parents[3] / "cluster" / "slurm" / "train.sbatch"
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "settings.sh").write_text("")
    (folder / "ray_on_all_nodes.sh").write_text('run_on_all_nodes() { echo "$@"; asked_to_leave=1; return 3; }\n')
    environment = {"SLURM_SUBMIT_DIR": str(folder), "SLURM_SCRIPTS": str(folder), "PATH": os.environ["PATH"]}
    (Path(f"{folder}.stop")).touch()
    for given, ran in ({"SUBCOMMAND": "study"}, "study"), ({}, "train --resume auto"):
        done = subprocess.run(
            ["bash", str(script), "-c", "a b"], env={**environment, **given},
            capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        assert done.stdout.splitlines()[0] == f"python -m scaleray {ran} -c a b", done.stderr
        assert done.returncode == 3 and "stopped: what was trained is saved" in done.stdout
