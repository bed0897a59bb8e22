"""A submission from both sides: what is refused here, what is asked there, and what becomes of the job."""

import asyncio
import dataclasses
import json
import re
import sys
import zipfile
from types import SimpleNamespace

import pytest

from scaleray.cli import submit as command
from scaleray.cli.main import run_command
from scaleray.cli.output import Output
from scaleray.clusters.submit import jobs_api, submission, to_ray
from scaleray.clusters.submit.clusters import cluster_of
from scaleray.clusters.submit.jobs_api import Jobs
from scaleray.clusters.submit.package_versions import PROBE, SIGN, Versions
from scaleray.errors import ClusterError, ConfigError

URL = "http://10.0.0.1:8265"


class Client:
    """Ray's client of a cluster on which jobs do what the test wants. tails: what each connection to a log gives, and
    the error that it ends with."""

    def __init__(self, *tails):
        self.submitted, self.stopped, self.deleted, self.tails = [], [], [], list(tails)
        self.status, self.packed, self.message = "SUCCEEDED", {}, ""
        self.versions = dataclasses.asdict(Versions.here())

    def submit_job(self, **job):
        self.submitted.append(job)
        if package := job["runtime_env"].get("working_dir"):
            with zipfile.ZipFile(package) as file:
                self.packed = {name: file.read(name) for name in file.namelist()}
        return job["submission_id"]

    def get_job_info(self, name):
        if name not in [job["submission_id"] for job in self.submitted]:
            raise RuntimeError(f"Request failed with status code 404: Job {name} does not exist.")
        status = "SUCCEEDED" if name.startswith("scaleray-probe") else self.status
        return SimpleNamespace(
            submission_id=name, job_id="", status=SimpleNamespace(value=status), message=self.message, entrypoint="python x",
            start_time=1000, end_time=None, driver_exit_code=3 if status == "FAILED" else 0,
        )  # fmt: skip

    def list_jobs(self):
        return [self.get_job_info(job["submission_id"]) for job in self.submitted]

    def get_job_logs(self, name):
        return f"noise\n{SIGN}{json.dumps(self.versions)}\n"

    def stop_job(self, name):
        self.stopped.append(name)

    def delete_job(self, name):
        self.deleted.append(name)

    async def tail_job_logs(self, name):
        text, error = self.tails.pop(0)
        for part in text:
            await asyncio.sleep(0)
            yield part
        if error is not None:
            raise error


@pytest.fixture
def cluster(project, monkeypatch):
    client = Client()
    monkeypatch.setattr(jobs_api, "_check", lambda url: ("2.60.0", ""))
    monkeypatch.setattr(jobs_api, "_client_of", lambda url: client)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    client.versions["packages"]["ray"] = "2.60.0"
    return client


def submitted(*words):
    return run_command(["submit", "-c", "jobs/work.yaml", "--to", URL, *words])


@pytest.mark.combination
def test_a_job_is_the_command_in_the_working_directory(cluster, capsys):
    assert submitted("--scale.workers", "2", "--name", "mine") == 0
    probe, job = cluster.submitted
    assert probe["entrypoint"] == f'python -c "{PROBE}"' and cluster.deleted == 2 * [probe["submission_id"]]
    assert job["submission_id"] == "mine"
    assert job["entrypoint"] == "python -m scaleray train -c jobs/work.yaml --scale.workers 2"
    assert sorted(cluster.packed) == ["jobs/work.py", "jobs/work.yaml"]
    out = capsys.readouterr().out
    assert "2 files" in out and "scaleray jobs logs mine" in out and "torch" in out


def test_secrets_travel_by_name_and_are_never_printed(cluster, monkeypatch, capsys):
    monkeypatch.setenv("S3_KEY", "hunter2")
    assert submitted("--secret-env", "S3_KEY", "--json") == 0
    job = cluster.submitted[-1]
    assert job["runtime_env"]["env_vars"] == {**to_ray.time_to_save(None), "S3_KEY": "hunter2"}
    assert job["metadata"]["secrets"] == "S3_KEY"
    printed = capsys.readouterr()
    assert "hunter2" not in printed.out + printed.err
    assert "hunter2" not in repr(submission.prepare(jobs_yaml(), to=URL, secret_env=["S3_KEY"]))
    assert json.loads(printed.out)["name"] == job["submission_id"]


SECRETS = [
    (["--alerts.webhook", "https://hook.test/T0/hunter2"], "--alerts.webhook_env NAME --secret-env NAME"),
    (["--alerts.webhook=https://hook.test/T0/hunter2"], "--alerts.webhook_env NAME --secret-env NAME"),
    (["--tracking.uri", "http://me:hunter2@mlflow:5000"], "--secret-env NAME"),
    (["--tracking.uri=http://me:hunter2@mlflow:5000"], "--secret-env NAME"),
]


@pytest.mark.parametrize(("words", "instead"), SECRETS, ids=[words[0].partition("/")[0] for words, _ in SECRETS])
def test_a_secret_in_an_option_is_refused_before_the_cluster_hears_of_it(cluster, capsys, words, instead):
    assert submitted("--scale.workers", "2", *words) == 2
    printed = capsys.readouterr()
    assert "hunter2" not in printed.out + printed.err and not cluster.submitted
    assert words[0].partition("=")[0] in printed.err and instead in printed.err


@pytest.mark.parametrize("json_", [[], ["--json"]], ids=["table", "json"])
def test_a_secret_that_another_command_was_given_is_not_listed(cluster, capsys, monkeypatch, json_):
    monkeypatch.setenv("COLUMNS", "200")
    given = cluster.get_job_info
    leaky = (
        "python -m scaleray train --alerts.webhook 'https://hook.test/T0/hunter2' --tracking.uri=http://me:hunter2@m"
    )
    cluster.get_job_info = lambda name: SimpleNamespace(**{**vars(given(name)), "entrypoint": leaky})
    assert submitted("--name", "mine") == 0
    capsys.readouterr()
    assert run_command(["jobs", "list", "--to", URL, *json_]) == 0
    listed = capsys.readouterr().out
    assert "hunter2" not in listed and "https://hook.test/***" in listed


def jobs_yaml():
    from pathlib import Path

    return Path("jobs/work.yaml")


KINDS = {"ray": {"url": URL}, "kubernetes": {}, "slurm": {"folder": "/shared"}}


@pytest.mark.parametrize("kind", KINDS)
def test_settings_of_the_environment_travel_to_every_kind_of_cluster(project, clusters, monkeypatch, kind):
    clusters(there={"kind": kind, **KINDS[kind]})
    monkeypatch.setenv("SCALERAY_SCALE__WORKERS", "2")
    monkeypatch.setenv("SCALERAY_TRACKING__EXPERIMENT", "it's a b")
    monkeypatch.setenv("SCALERAY_TRACKING__URI", "http://me:hunter2@mlflow")
    prepared = submission.prepare(jobs_yaml(), ["--seed", "3"], to="there", secret_env=["SCALERAY_TRACKING__URI"])
    settings = ("--scale.workers=2", "--tracking.experiment=it's a b")
    assert prepared.command == ("train", "-c", "jobs/work.yaml", *settings, "--seed", "3")
    assert prepared.settings == ("scale.workers", "tracking.experiment")
    assert list(prepared.variables) == ["SCALERAY_TRACKING__URI"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("TRACKING__URI", "http://me:hunter2@mlflow"), ("ALERTS__WEBHOOK", "https://hooks.example.com/hunter2")],
)
def test_a_secret_of_the_environment_is_not_put_into_a_command(cluster, monkeypatch, capsys, name, value):
    monkeypatch.setenv(f"SCALERAY_{name}", value)
    assert submitted() == 2
    text = " ".join(capsys.readouterr().err.split())
    assert f"--secret-env SCALERAY_{name} sends it as a secret" in text and "hunter2" not in text
    assert submitted("--secret-env", f"SCALERAY_{name}") == 0
    job = cluster.submitted[-1]
    assert job["runtime_env"]["env_vars"][f"SCALERAY_{name}"] == value and "hunter2" not in job["entrypoint"]


@pytest.mark.parametrize(
    ("words", "limits"),
    [
        ([], {"RAY_JOB_STOP_WAIT_TIME_S": "110", "SCALERAY_CHECKPOINT__GRACE_S": "90"}),
        (["--checkpoint.grace_s", "200.5"], {"RAY_JOB_STOP_WAIT_TIME_S": "221"}),
    ],
)
def test_a_job_that_is_stopped_has_time_to_save_unless_the_config_says_how_long(cluster, words, limits):
    assert submitted(*words) == 0
    assert cluster.submitted[-1]["runtime_env"]["env_vars"] == limits


def test_versions_that_differ_start_nothing_unless_it_is_asked_for(cluster, capsys):
    cluster.versions["packages"]["torch"] = "1.9.0"
    assert submitted() == 2
    assert "has different versions: torch is 1.9.0 there" in capsys.readouterr().err
    assert all(job["submission_id"].startswith("scaleray-probe") for job in cluster.submitted)
    assert submitted("--allow-differences", "--name", "mine") == 0
    assert cluster.submitted[-1]["submission_id"] == "mine"


def test_another_ray_is_refused_before_even_the_versions_are_asked_for(cluster, monkeypatch, capsys):
    monkeypatch.setattr(jobs_api, "_check", lambda url: ("2.59.0", "3.11.0"))
    assert submitted() == 2
    assert "ray is 2.59.0 there" in capsys.readouterr().err and cluster.submitted == []


def test_packages_that_are_missing_are_named_with_what_brings_them(cluster, capsys):
    version = Versions.here().packages["scikit-learn"]
    cluster.versions["packages"].pop("scikit-learn")
    assert submitted() == 2
    text = capsys.readouterr().err
    assert (
        "lacks scikit-learn, which the job imports" in text
        and f'runtime_env={{"pip": ["scikit-learn=={version}"]}}' in text
    )
    assert submitted("--bring-missing") == 0
    assert cluster.submitted[-1]["runtime_env"]["pip"] == [f"scikit-learn=={version}"]


def test_a_cluster_whose_python_tells_nothing_is_one_error(cluster, monkeypatch):
    monkeypatch.setattr(cluster, "get_job_logs", lambda name: "sh: 1: python: not found")
    with pytest.raises(ClusterError, match="could not report its versions"):
        Jobs(URL).versions()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-c", "../other.yaml"], "is outside the working directory"),
        (["-c", "jobs/none.yaml"], "jobs/none.yaml does not exist"),
        (["-c", "jobs/work.yaml", "--max-mib", "0"], "it must be more than 0 MiB"),
        (["-c", "jobs/work.yaml", "--max-mib", "0.0001"], "to upload, more than --max-mib 0.0001"),
        (["-c", "jobs/work.yaml", "--secret-env", "NOT_SET"], "names variables that are not set here: NOT_SET"),
        (["-c", "jobs/work.yaml", "--secret-env", "NAME=hunter2"], "takes only names, but NAME has a value"),
        (["-c", "jobs/work.yaml", "--batch.global-sise", "4"], "batch.global_size"),
        (["-c", "jobs/work.yaml", "--workload.name", "/abs/work.py:Mine"], "does not exist on the cluster"),
        (["-c", "jobs/work.yaml", "--workload.name", "gone.py:Mine"], "gone.py does not exist"),
        (["-c", "jobs/work.yaml", "--working-dir", "none"], "is not a folder"),
        (["-c", "jobs/work.yaml", "--to", "nobody"], "has this name"),
        (["-c", "jobs/work.yaml", "--to", "10.0.0.1:6379"], "must begin with http:// or https://"),
    ],
)
def test_what_cannot_be_submitted_is_refused_here_with_one_message(project, capsys, words, said):
    (project.parent / "other.yaml").write_text((project / "jobs" / "work.yaml").read_text())
    to = [] if "--to" in words else ["--to", URL]
    assert run_command(["submit", *words, *to]) == 2
    text = capsys.readouterr().err
    assert said in " ".join(text.split()) and "hunter2" not in text and "Traceback" not in text


def test_clusters_have_names_in_a_file_of_the_users_own(project, monkeypatch):
    with pytest.raises(ConfigError, match="no cluster is configured"):
        cluster_of(None)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")  # of a cluster that is joined
    with pytest.raises(ConfigError, match="no cluster is configured"):
        cluster_of(None)
    monkeypatch.setenv("RAY_ADDRESS", "http://10.0.0.9:8265/")
    assert cluster_of(None).url == "http://10.0.0.9:8265"
    settings = project.parent / "settings" / "scaleray"
    settings.mkdir(parents=True)
    (settings / "clusters.yaml").write_text("mine: http://10.0.0.2:8265\n")
    assert cluster_of("mine").url == "http://10.0.0.2:8265"
    with pytest.raises(ConfigError, match="it has mine"):
        cluster_of("other")
    (settings / "clusters.yaml").write_text("mine: http://10.0.0.2:8265\nother: {kind: slum}\n")
    with pytest.raises(ConfigError, match=r"clusters.yaml:2 other\.kind"):
        cluster_of("other")
    (settings / "clusters.yaml").write_text("- mine\n")
    with pytest.raises(ConfigError, match="write NAME: URL"):
        cluster_of("mine")


def test_a_connection_that_is_lost_is_tried_again_and_nothing_is_written_twice(cluster):
    cluster.tails = [
        (["one ", "two "], OSError("reset")),
        (["one ", "two th"], RuntimeError("WebSocket closed")),
        (["one two three"], None),
    ]
    statuses = iter(["RUNNING", "RUNNING", "SUCCEEDED"])
    jobs, written, said = Jobs(URL), [], []
    jobs.submit("x", name="mine", runtime_env={})
    real = cluster.get_job_info

    def info(name):
        cluster.status = next(statuses)
        if cluster.status == "RUNNING" and not said:
            raise ConnectionError("away")
        return real(name)

    cluster.get_job_info = info
    assert jobs.follow("mine", written.append, said.append).status == "SUCCEEDED"
    assert "".join(written) == "one two three" and len(said) == 1 and "was lost; the job continues" in said[0]


def test_a_job_that_failed_gives_its_exit_code(cluster, capsys):
    cluster.tails, cluster.status = [(["oh\n"], None)], "FAILED"
    cluster.message = "it failed, last available logs (truncated to 20,000 chars):\noh\n"
    assert submitted("--wait", "--name", "mine") == 1
    out = capsys.readouterr().out
    assert out.count("oh\n") == 1 and "job mine: FAILED, exit code 3 (it failed)\n" in out


@pytest.mark.parametrize(("answer", "stopped"), [("s", ["mine"]), ("", []), (None, [])])
def test_ctrl_c_asks_and_leaves_the_job_alone_unless_it_shall_stop(cluster, monkeypatch, capsys, answer, stopped):
    cluster.tails = [(["one "], KeyboardInterrupt()), (["one two"], None)]
    jobs = Jobs(URL)
    jobs.submit("x", name="mine", runtime_env={})
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: answer is not None))
    monkeypatch.setattr("builtins.input", lambda words: answer)
    assert command._follow(jobs, "mine", Output(json=True)) == (0 if stopped else 130)
    assert cluster.stopped == stopped
    err = capsys.readouterr().err
    assert err.count("one") == 1 and ("two" in err) == bool(stopped)


@pytest.mark.parametrize("columns", ["40", "80", "120", "250"])
def test_the_list_has_status_and_time_at_every_width(cluster, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    name, given = "digits-20261127-031540-2c15", cluster.get_job_info
    long = "python -m scaleray train -c jobs/digits.yaml --checkpoint.storage_path=/shared/runs --stop.after '4 epochs' --seed 3"
    cluster.get_job_info = lambda name: SimpleNamespace(**{**vars(given(name)), "entrypoint": long})
    Jobs(URL).submit("x", name=name, runtime_env={})
    assert run_command(["jobs", "list", "--to", URL]) == 0
    head, _, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["job", "status", "began", "took", "command"]
    assert re.match(rf"{name} +[A-Z]+ +\d\d-\d\d \d\d:\d\d +\S.* python ", row) and len(row) <= max(int(columns), 100)


def test_jobs_are_listed_shown_and_stopped(cluster, capsys):
    Jobs(URL).submit("x", name="mine", runtime_env={})
    assert run_command(["jobs", "list", "--to", URL]) == 0 and "mine" in capsys.readouterr().out
    assert run_command(["jobs", "list", "--to", URL, "--json"]) == 0
    assert [job["name"] for job in json.loads(capsys.readouterr().out)["jobs"]] == ["mine"]
    assert run_command(["jobs", "logs", "mine", "--to", URL]) == 0 and "noise" in capsys.readouterr().out
    assert run_command(["jobs", "stop", "mine", "--to", URL]) == 0 and cluster.stopped == ["mine"]
    assert run_command(["jobs", "stop", "other", "--to", URL]) == 2
    assert "was not found on the cluster" in capsys.readouterr().err
    cluster.tails = [(["all"], None)]
    assert run_command(["jobs", "logs", "mine", "--follow", "--to", URL]) == 0 and capsys.readouterr().out == "all"
    cluster.tails = [(["all"], KeyboardInterrupt())]
    assert run_command(["jobs", "logs", "mine", "--follow", "--to", URL]) == 130
    assert "continues" in capsys.readouterr().err
