"""A submission to Kubernetes: the objects that are made, what kubectl is told, and what its words mean."""

import base64
import io
import json
import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from file_rules import check_ray_manifest

from scaleray.cli import submit as command
from scaleray.cli.main import run_command
from scaleray.cli.output import Output
from scaleray.clusters.submit.clusters import KubernetesCluster
from scaleray.clusters.submit.kubernetes_jobs import KubernetesJobs
from scaleray.clusters.submit.kubernetes_objects import kubernetes_name, objects_of, too_new_fields
from scaleray.clusters.submit.submitted_job import LostConnectionError
from scaleray.errors import ClusterError, ConfigError

CLUSTER = {"kind": "kubernetes", "context": "lab", "image": "REGISTRY/scaleray:0.1.0-ray2.60.0-py311-cpu"}
NEEDED = "serviceaccount/scaleray\npersistentvolumeclaim/scaleray\nnetworkpolicy.networking.k8s.io/scaleray\n"
JOB = {"metadata": {"name": "mine", "uid": "u-1", "annotations": {"scaleray/command": "scaleray train"}}, "spec": {}}


def rayjob(deployment="", job="", **status):
    return {**JOB, "status": {"jobDeploymentStatus": deployment, "jobStatus": job, **status}}


@pytest.fixture
def kubectl(stand_ins, clusters):
    """A cluster that has all that a job needs, and takes it."""
    stand_ins.add("kubectl")
    stand_ins.answer("get rayjobs.ray.io -o name", "")
    stand_ins.answer("get serviceaccounts", NEEDED)
    stand_ins.answer("get deployments", "quay.io/kuberay/operator:v1.7.0")
    stand_ins.answer("create -o json", JOB)
    clusters(lab=CLUSTER)
    return stand_ins


def submitted(*words):
    return run_command(["submit", "-c", "jobs/work.yaml", "--to", "lab", *words])


def created(kubectl):
    return {document["kind"]: document for name, words, given, _ in kubectl.calls if "create" in words
            for document in yaml.safe_load_all(given)}  # fmt: skip


def test_a_job_is_a_rayjob_that_keeps_every_rule_and_the_code_in_a_config_map(kubectl, capsys):
    assert submitted("--name", "mine", "--scale.workers", "2", "--tracking.experiment", "it's $5; a & b") == 0
    made = created(kubectl)
    job, package = made["RayJob"], made["ConfigMap"]
    check_ray_manifest(job)
    assert job["metadata"]["name"] == package["metadata"]["name"] == "mine"
    assert job["spec"]["entrypoint"] == "bash /opt/scaleray-package/start.sh scaleray train --resume auto"
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert {"name": "package", "configMap": {"name": "mine"}} in head["volumes"]
    assert package["metadata"]["ownerReferences"] == [
        {"apiVersion": "ray.io/v1", "kind": "RayJob", "name": "mine", "uid": "u-1"}
    ]
    with zipfile.ZipFile(io.BytesIO(base64.b64decode(package["binaryData"]["working_dir.zip"]))) as code:
        assert sorted(code.namelist()) == ["jobs/work.py", "jobs/work.yaml"]
    last = package["data"]["start.sh"].splitlines()[-1]
    assert shlex.split(last)[4:] == [
        "-c", "jobs/work.yaml", "--scale.workers", "2", "--tracking.experiment", "it's $5; a & b",
    ]  # fmt: skip
    assert all(line.startswith("kubectl --context lab --namespace scaleray ") for line in kubectl.words())
    out = capsys.readouterr().out
    assert "torch and packages are unknown until the job runs" in out and "must have: scikit-learn" in out
    assert "scaleray jobs logs mine --to lab" in out


def test_the_address_of_a_webhook_never_gets_there(kubectl, capsys):
    assert submitted("--alerts.webhook=https://hook.test/T0/hunter2") == 2
    assert not created(kubectl)
    assert "alerts.webhook_env" in capsys.readouterr().err


def test_the_start_script_unpacks_the_code_and_runs_the_command_in_it(project, tmp_path):
    cluster = KubernetesCluster(name="lab", **CLUSTER)
    package = io.BytesIO()
    with zipfile.ZipFile(package, "w") as file:
        file.writestr("jobs/work.yaml", "x")
    made = objects_of(
        cluster, name="mine", command=["train", "-c", "a b.yaml"], package=package.getvalue(), folder=project
    )
    places = tmp_path / "mounts"
    places.mkdir()
    (places / "working_dir.zip").write_bytes(package.getvalue())
    (tmp_path / "told").mkdir()
    (tmp_path / "told" / "scaleray.py").write_text("import os, sys; print(os.getcwd(), sys.argv[1:])")
    script = made.package["data"]["start.sh"].replace("/opt/scaleray-package", str(places))
    script = script.replace("/mnt/scaleray", str(tmp_path / "shared")).replace(
        "python -m", f"{shlex.quote(sys.executable)} -m"
    )
    (places / "start.sh").write_text(script)
    done = subprocess.run(
        ["bash", str(places / "start.sh"), "scaleray", "train", "--resume", "auto"],
        env={"PYTHONPATH": str(tmp_path / "told"), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout.strip() == f"{tmp_path}/shared/code/mine ['train', '--resume', 'auto', '-c', 'a b.yaml']"


def test_other_commands_are_not_tried_again_and_kueue_holds_a_job_until_there_is_room(kubectl, clusters):
    clusters(lab={**CLUSTER, "queue": "team", "gpus": "8xh100", "nodes": 3})
    assert submitted("--command", "verify") == 0
    job = created(kubectl)["RayJob"]
    assert job["spec"]["backoffLimit"] == 0 and job["spec"]["entrypoint"].endswith("scaleray verify")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team" and job["spec"]["suspend"] is True
    [workers] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["replicas"] == 3
    assert workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"


def test_secrets_are_keys_of_a_secret_there_and_no_value_travels(kubectl, monkeypatch, capsys):
    monkeypatch.setenv("S3_KEY", "hunter2")
    kubectl.answer("get secret scaleray-env", "S3_KEY\n")
    assert submitted("--secret-env", "S3_KEY") == 0
    job = created(kubectl)["RayJob"]
    boxes = [job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]]
    boxes.append(job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0])
    wanted = {"name": "S3_KEY", "valueFrom": {"secretKeyRef": {"name": "scaleray-env", "key": "S3_KEY"}}}
    assert all(wanted in box["env"] for box in boxes)
    assert not any("hunter2" in given or "hunter2" in " ".join(words) for _, words, given, _ in kubectl.calls)
    assert submitted("--secret-env", "OTHER") == 2
    assert "The Secret scaleray-env has no key OTHER" in capsys.readouterr().err


def test_without_kubectl_the_job_is_written_with_the_command_that_applies_it(stand_ins, clusters, capsys):
    clusters(lab=CLUSTER)
    assert submitted("--name", "mine", "--json", "--wait") == 0
    printed = capsys.readouterr()
    path = Path.cwd() / "mine.yaml"
    assert {document["kind"] for document in yaml.safe_load_all(path.read_text())} == {"RayJob", "ConfigMap"}
    job = json.loads(printed.out)
    assert job["status"] == "WRITTEN"
    assert job["message"] == f"kubectl --context lab --namespace scaleray create -f {shlex.quote(str(path))}"


def test_a_manifest_of_the_users_own_is_taken_and_must_ask_for_a_token(kubectl, clusters, project, capsys):
    template = objects_of(
        KubernetesCluster(name="lab", **CLUSTER), name="x", command=["train"], package=b"", folder=project
    )
    (project / "mine.yaml").write_text(yaml.safe_dump(template.job))
    clusters(lab={**CLUSTER, "manifest": "mine.yaml"})
    assert submitted() == 0
    broken = json.loads(json.dumps(template.job))
    broken["spec"]["rayClusterSpec"]["authOptions"]["mode"] = "disabled"
    (project / "mine.yaml").write_text(yaml.safe_dump(broken))
    assert submitted() == 2
    assert "does not set authOptions.mode to token" in capsys.readouterr().err
    for text, said in (("kind: Pod", "not 0"), ("a: [", "not YAML"), (None, "cannot be read")):
        (project / "mine.yaml").unlink(missing_ok=True)
        if text is not None:
            (project / "mine.yaml").write_text(text)
        assert submitted() == 2
        assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("pattern", "answer", "said"),
    [
        ("get rayjobs", "Unable to connect to the server: dial tcp 10.0.0.1:6443: i/o timeout", "nothing answers there"),
        ("get rayjobs", "The connection to the server 10.0.0.1:6443 was refused", "nothing answers there"),
        ("get rayjobs", 'E1124 03:30:50.790820 7770 memcache.go:265] "Unhandled Error"\nThe connection to the server was refused',
         "nothing answers there: The connection to"),
        ("get rayjobs", "error: You must be logged in to the server (Unauthorized)", "token or certificate is not accepted"),
        ("get rayjobs", 'error: context "lab" does not exist', "kubectl does not have its context"),
        ("get rayjobs", "error: the server doesn't have a resource type \"rayjobs\"", "KubeRay is not installed there"),
        ("get service", 'Error (Forbidden): serviceaccounts is forbidden: User "me" cannot list', "you do not have permission"),
        ("create -o json", 'Error (Forbidden): rayjobs.ray.io "x" is forbidden: exceeded quota: team, requested: '
         "count/rayjobs.ray.io=1, used: 2, limited: 2", "the quota of the namespace is used up"),
        ("create -o json", 'RayJob in version "v1" cannot be handled: strict decoding error: unknown field '
         '"spec.preRunningDeadlineSeconds"', "its KubeRay is too old for"),
        ("create -o json", 'rayjobs.ray.io "x" already exists', "give another --name"),
        ("create -o json", "something new", "kubectl reports: something new"),
    ],
)  # fmt: skip
def test_what_a_cluster_does_not_take_is_one_message(kubectl, capsys, pattern, answer, said):
    kubectl.first(pattern, code=1, err=answer)
    assert submitted() == 2
    text = capsys.readouterr().err
    assert said in " ".join(text.split()) and "Traceback" not in text
    assert not any("ConfigMap" in given for _, _, given, _ in kubectl.calls)


def test_an_operator_that_is_too_old_is_refused_before_anything_is_created(kubectl, capsys):
    kubectl.first("get deployments", "quay.io/kuberay/operator:v1.4.2")
    assert submitted() == 2
    assert "upgrade the operator to 1.6.0 or newer" in capsys.readouterr().err and not kubectl.words("create")
    kubectl.first("get deployments", code=1, err="Error (Forbidden): deployments is forbidden")
    assert submitted() == 0
    assert "KubeRay's release cannot be read; it is assumed to be 1.7.0" in capsys.readouterr().out


def test_what_a_namespace_lacks_is_named(kubectl, capsys):
    kubectl.first("get serviceaccounts", "serviceaccount/scaleray\n")
    assert submitted() == 2
    text = capsys.readouterr().err
    assert (
        "The namespace scaleray lacks NetworkPolicy/scaleray, PersistentVolumeClaim/scaleray" in text
        and "apply -k" in text
    )


@pytest.mark.parametrize(
    ("image", "said"),
    [("scaleray:0.1.0-ray2.60.0-py312-cpu", "Python is 3.12 there"), ("scaleray:latest", "a tag other than latest")],
)
def test_an_image_of_other_versions_is_refused(kubectl, clusters, capsys, image, said):
    clusters(lab={**CLUSTER, "image": image})
    assert submitted() == 2
    assert said in capsys.readouterr().err and not kubectl.words("create")


def test_code_that_a_config_map_cannot_hold_is_refused(kubectl, project, capsys):
    (project / "data.bin").write_bytes(os.urandom(1_000_000))
    assert submitted() == 2
    assert "a ConfigMap, which holds at most 0.7 MiB" in " ".join(capsys.readouterr().err.split())


def test_a_job_without_its_code_is_deleted_again(kubectl, capsys):
    kubectl.first("create -o name", code=1, err='configmaps "x" is forbidden: exceeded quota: team')
    assert submitted("--name", "mine") == 2
    assert "the quota of the namespace is used up" in capsys.readouterr().err
    assert kubectl.words("delete rayjob mine")


def follower(kubectl):
    return KubernetesJobs(KubernetesCluster(name="lab", **CLUSTER))


def pods(*names, phase="Running"):
    return {"items": [
        {"metadata": {"name": name, "creationTimestamp": f"2026-01-01T00:00:0{n}Z"}, "status": {"phase": phase}}
        for n, name in enumerate(names)
    ]}  # fmt: skip


def test_a_job_is_followed_through_waiting_a_lost_connection_and_a_second_try(kubectl):
    quota = {"items": [{"involvedObject": {"kind": "RayCluster", "name": "mine-abcde"}, "reason": "FailedCreate",
                        "message": 'pods "mine-head" is forbidden: exceeded quota: team'}]}  # fmt: skip
    kubectl.answer("get events", quota)
    kubectl.answer("get rayjobs.ray.io mine", rayjob("Initializing", rayClusterName="mine-abcde"), times=2)
    kubectl.answer("get rayjobs.ray.io mine", rayjob("Running", "RUNNING"), times=1)
    kubectl.answer("get rayjobs.ray.io mine", code=1, err="Unable to connect to the server: EOF", times=1)
    kubectl.answer("get rayjobs.ray.io mine", rayjob("Retrying"), times=1)
    kubectl.answer("get rayjobs.ray.io mine", rayjob("Complete", "SUCCEEDED"))
    kubectl.answer("get pods -l job-name=mine", {"items": []}, times=2)
    kubectl.answer("get pods -l job-name=mine", pods("first"), times=1)
    kubectl.answer("get pods -l job-name=mine", pods("first", "second"))
    kubectl.answer("logs --follow pod/first", "one\ntwo\n")
    kubectl.answer("logs --follow pod/second", "three\n", times=1)
    kubectl.answer("logs --follow pod/second", "three\nfour\n")
    written, said = [], []
    ended = follower(kubectl).follow("mine", written.append, said.append)
    assert ended.status == "SUCCEEDED" and "".join(written) == "one\ntwo\nthree\nfour\n"
    assert said[0].startswith("pending: the quota of the namespace is used up") and "describe resourcequota" in said[0]
    assert [line for line in said if "was lost" in line] == [
        "the connection to lab was lost; the job continues; reconnecting ..."
    ]


@pytest.mark.parametrize(
    ("statuses", "status"),
    [
        (("Initializing", ""), "PENDING"),
        (("Suspended", ""), "PENDING"),
        (("Running", "RUNNING"), "RUNNING"),
        (("Complete", "SUCCEEDED"), "SUCCEEDED"),
        (("Complete", "STOPPED"), "STOPPED"),
        (("Failed", "FAILED"), "FAILED"),
        (("ValidationFailed", ""), "FAILED"),
        (("Retrying", "FAILED"), "PENDING"),
    ],
)
def test_the_two_statuses_of_a_rayjob_are_one(kubectl, statuses, status):
    kubectl.answer("get rayjobs.ray.io mine", rayjob(*statuses, message="why"))
    assert follower(kubectl).job("mine").status == status


@pytest.mark.parametrize(
    ("kind", "name", "is_mine"),
    [
        ("RayJob", "mine", True), ("Job", "mine", True), ("RayCluster", "mine-abcde", True), ("Pod", "mine-x1y2z", True),
        ("Pod", "mine-abcde-head-x1y2z", True), ("Workload", "rayjob-mine-0a1b2", True), ("RayJob", "mine-2", False),
        ("RayJob", "not-mine", False), ("RayCluster", "mine-2-abcde", False), ("Pod", "mine-2-abcde-head-x1y2z", False),
        ("Pod", "mine-2-x1y2z", False), ("Workload", "rayjob-mine-2-0a1b2", False), ("Pod", "examiner", False),
    ],
)  # fmt: skip
def test_a_job_waits_for_its_own_reasons_and_not_for_those_of_one_with_a_name_like_it(kubectl, kind, name, is_mine):
    event = {"involvedObject": {"kind": kind, "name": name}, "reason": "FailedScheduling", "message": "0/3 nodes"}
    kubectl.answer("get rayjobs.ray.io mine", rayjob("Initializing", rayClusterName="mine-abcde"))
    kubectl.answer("get events", {"items": [event]})
    assert ("0/3 nodes" in follower(kubectl).job("mine").message) is is_mine


def test_kueues_reason_is_told(kubectl):
    waits = {"items": [{"involvedObject": {"kind": "Workload", "name": "rayjob-mine-1"}, "reason": "Pending",
                        "message": "couldn't assign flavors to pod set workers: insufficient quota for nvidia.com/gpu"}]}  # fmt: skip
    kubectl.answer("get rayjobs.ray.io mine", rayjob("Suspended"))
    kubectl.answer("get events", waits)
    assert follower(kubectl).job("mine").message.startswith("Kueue waits until its quota has room")


def test_jobs_are_listed_shown_and_stopped_by_ray_so_that_they_save(kubectl, capsys):
    kubectl.answer("get rayjobs.ray.io -l", {"items": [rayjob("Running", "RUNNING", startTime="2026-01-01T00:00:00Z")]})
    kubectl.answer("get rayjobs.ray.io mine", rayjob("Running", "RUNNING", rayClusterName="c", jobId="j-1"))
    kubectl.answer("get pods -l ray.io/cluster=c", "pod/head\n")
    kubectl.answer("get pods -l job-name=mine", pods("one"))
    kubectl.answer("logs pod/one", "said\n")
    assert run_command(["jobs", "list", "--to", "lab", "--json"]) == 0
    [job] = json.loads(capsys.readouterr().out)["jobs"]
    assert job["status"] == "RUNNING" and job["entrypoint"] == "scaleray train" and job["started_at"] == 1767225600
    assert run_command(["jobs", "logs", "mine", "--to", "lab"]) == 0 and capsys.readouterr().out == "said\n"
    assert run_command(["jobs", "stop", "mine", "--to", "lab"]) == 0
    [stop] = kubectl.words("exec")
    assert stop.endswith("exec pod/head -- ray job stop --no-wait --address http://127.0.0.1:8265 j-1")
    kubectl.first("get rayjobs.ray.io mine", rayjob("Initializing"))
    assert run_command(["jobs", "stop", "mine", "--to", "lab"]) == 0 and kubectl.words("delete rayjob mine")
    kubectl.first("get rayjobs.ray.io none", code=1, err='Error from server (NotFound): rayjobs "none" not found')
    assert run_command(["jobs", "logs", "none", "--to", "lab"]) == 2
    assert "was not found in the namespace scaleray" in capsys.readouterr().err


def test_ctrl_c_asks_and_stops_the_job_only_if_told_to(kubectl, monkeypatch):
    kubectl.answer("get rayjobs.ray.io mine", rayjob("Running", "RUNNING"), times=2)
    kubectl.answer("get rayjobs.ray.io mine", code=1, err='rayjobs "mine" not found (NotFound)')
    kubectl.answer("get pods -l job-name=mine", pods("one"))
    jobs = follower(kubectl)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", lambda words: "s")
    first = [KeyboardInterrupt()]

    def interrupted(*words):
        if first:
            raise first.pop()

    monkeypatch.setattr(jobs, "_write_new", interrupted)
    assert command._follow(jobs, "mine", Output(json=True)) == 1  # stopped is not succeeded
    assert kubectl.words("delete rayjob mine")  # it had no pod to ask yet


def test_names_are_made_such_as_kubernetes_takes():
    assert kubernetes_name("digits-20260101-000000-ab12") == "digits-20260101-000000-ab12"
    assert kubernetes_name("My_model.v2") == "my-model-v2"
    assert kubernetes_name("2-steps") == "job-2-steps"
    long = kubernetes_name("a_very_long_name_of_a_config_that_goes_on-20260101-000000-ab12")
    assert len(long) <= 47 and long.endswith("20260101-000000-ab12")


def test_fields_that_an_older_operator_does_not_know_are_named(project):
    cluster = KubernetesCluster(name="lab", **CLUSTER)
    job = objects_of(cluster, name="mine", command=["train"], package=b"", folder=project).job
    assert too_new_fields(job, "1.7.0") == too_new_fields(job, "1.6.0") == {}
    assert too_new_fields(job, "1.5.1") == {"spec.preRunningDeadlineSeconds": "1.6.0"}


def test_the_real_kubectl_takes_every_command_and_says_that_nothing_answers(project, monkeypatch, clusters, capsys):
    config = project / "kubeconfig"
    config.write_text(yaml.safe_dump({
        "apiVersion": "v1", "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "contexts": [{"name": "lab", "context": {"cluster": "c", "user": ""}}],
    }))  # fmt: skip
    monkeypatch.setenv("KUBECONFIG", str(config))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    jobs = KubernetesJobs(KubernetesCluster(name="lab", **CLUSTER))
    made = objects_of(jobs.cluster, name="mine", command=["train"], package=b"", folder=project)
    for ask in (jobs.list, lambda: jobs.job("mine"), lambda: jobs.create(made), lambda: jobs.stop("mine")):
        with pytest.raises(LostConnectionError, match="nothing answers there"):
            ask()
    jobs.cluster = KubernetesCluster(name="lab", **{**CLUSTER, "context": "other"})
    with pytest.raises(ClusterError, match="kubectl does not have its context"):
        jobs.list()


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"kind": "kubernetes", "nodes": 0}, "lab.nodes"),
        ({"kind": "kubernetes", "namespcae": "x"}, "lab.namespcae"),
        ({"kind": "openshift"}, "it must be one of ray, kubernetes, slurm"),
        ({"kind": "slurm"}, "lab.folder"),
        ({"kind": "ray", "url": "10.0.0.1:8265"}, "lab.url"),
        (["a"], "write NAME: URL"),
    ],
)
def test_a_section_that_is_wrong_is_named_with_its_key(clusters, section, said):
    from scaleray.clusters.submit.clusters import cluster_of

    clusters(lab=section)
    with pytest.raises(ConfigError) as raised:
        cluster_of("lab")
    assert said in str(raised.value)
