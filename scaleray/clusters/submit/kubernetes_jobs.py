"""Create, follow, list and stop RayJobs on Kubernetes through kubectl."""

import calendar
import contextlib
import dataclasses
import io
import json
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import yaml

from scaleray.clusters.submit.clusters import KubernetesCluster
from scaleray.clusters.submit.kubernetes_objects import COMMAND, SUBMITTED, Objects, service_names
from scaleray.clusters.submit.programs import ProgramOutput, run
from scaleray.clusters.submit.submitted_job import JobNow, LostConnectionError, follow_by_polling
from scaleray.errors import ClusterError

LOST = (
    "unable to connect to the server",
    "was refused",
    "timeout",
    "tls handshake",
    "no such host",
    ": eof",
    "no route",
)
SELECTED = ",".join(f"{key}={value}" for key, value in SUBMITTED.items())
ENDED_AS = {"Complete": "SUCCEEDED", "Failed": "FAILED", "ValidationFailed": "FAILED"}
WAITS = ("exceeded quota", "FailedScheduling", "ErrImagePull", "ImagePullBackOff", "insufficient quota", "FailedMount")


class KubernetesJobs:
    """RayJobs created by `scaleray submit` in one namespace. Every method raises ClusterError."""

    def __init__(self, cluster: KubernetesCluster) -> None:
        self.cluster = cluster
        self.place = cluster.name
        self._written: dict[str, int] = {}
        """Number of characters of each pod's log that `follow` has written."""
        self._deleted: set[str] = set()
        """Jobs that were stopped before their start."""

    def check_room(self, objects: Objects, secret_names: Sequence[str] = ()) -> str | None:
        """Check that the cluster answers, supports RayJobs and has the objects that pods need; return its operator's
        release, or None if it is not readable."""
        self._kubectl("get", "rayjobs.ray.io", "-o", "name")
        kinds = "serviceaccounts,persistentvolumeclaims,networkpolicies"
        there = self._kubectl("get", kinds, "-o", "name").split()
        known = {name.partition("/")[0].partition(".")[0] + "/" + name.rpartition("/")[2] for name in there}
        missing = [f"{kind}/{name}" for kind, name in service_names(objects) if f"{kind.lower()}/{name}" not in known]
        if missing:
            raise ClusterError.problem(
                "The namespace",
                f"{self.cluster.namespace} lacks {', '.join(missing)}",
                "kubectl apply -k cluster/kubernetes/admin, then kubectl apply -k cluster/kubernetes/base",
            )
        if secret_names:
            self._check_secret(secret_names)
        return self.cluster.kuberay or self._operator()

    def create(self, objects: Objects) -> None:
        """Create the objects of a submission. Kubernetes removes the code with its job."""
        if objects.others:
            self._kubectl("apply", "-f", "-", given=yaml.safe_dump_all(objects.others))
        made = json.loads(self._kubectl("create", "-o", "json", "-f", "-", given=yaml.safe_dump(objects.job)))
        owner = {"apiVersion": "ray.io/v1", "kind": "RayJob", "name": objects.name, "uid": made["metadata"]["uid"]}
        package = {**objects.package, "metadata": {**objects.package["metadata"], "ownerReferences": [owner]}}
        try:
            self._kubectl("create", "-o", "name", "-f", "-", given=yaml.safe_dump(package))
        except ClusterError:  # a job without its code could only fail
            with contextlib.suppress(ClusterError):
                self._kubectl("delete", "rayjob", objects.name, "--wait=false")
            raise

    def job(self, name: str) -> JobNow:
        """State of a job on the cluster, and the reason why it waits."""
        if name in self._deleted:
            return JobNow(name, "STOPPED", "deleted before it started")
        read = self._read(name)
        found = self._of(read)
        if found.status == "PENDING":
            ray_cluster = str((read.get("status") or {}).get("rayClusterName", ""))
            return dataclasses.replace(found, message=self._why_it_waits(name, ray_cluster) or found.message)
        return found

    def list(self) -> list[JobNow]:
        """All submitted jobs, newest first."""
        found = json.loads(self._kubectl("get", "rayjobs.ray.io", "-l", SELECTED, "-o", "json"))
        return sorted(map(self._of, found["items"]), key=lambda job: -(job.started_at or 0.0))

    def logs(self, name: str) -> str:
        """Output of a job so far; empty until its pods exist."""
        self._read(name)
        pod = self._printing(name)
        return "" if pod is None else self._kubectl("logs", pod)

    def stop(self, name: str) -> None:
        """Stop a job through Ray, so that a training saves first; delete a job that has not started."""
        status = self._read(name).get("status") or {}
        head = self._head(str(status.get("rayClusterName", "")))
        if head is None or not status.get("jobId") or self._of_status(status) != "RUNNING":
            self._kubectl("delete", "rayjob", name, "--wait=false")
            self._deleted.add(name)
            return
        words = ("ray", "job", "stop", "--no-wait", "--address", "http://127.0.0.1:8265", str(status["jobId"]))
        self._kubectl("exec", head, "--", *words)

    def follow(self, name: str, write: Callable[[str], None], say: Callable[[str], None]) -> JobNow:
        """Write a job's output until it ends; lost connections are retried."""
        return follow_by_polling(self.cluster.name, lambda: self.job(name), lambda: self._write_new(name, write), say)

    def _write_new(self, name: str, write: Callable[[str], None]) -> None:
        """Write new lines of a log until its pod or the connection ends."""
        pod = self._printing(name)
        if pod is None:
            return
        words = [*self._begin(limit=False), "logs", "--follow", pod]
        passed = 0
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            try:
                assert process.stdout is not None
                for line in io.TextIOWrapper(process.stdout, errors="replace"):
                    begin, passed = passed, passed + len(line)
                    written = self._written.get(pod, 0)
                    if passed > written:  # every connection repeats the whole log
                        write(line[max(0, written - begin) :])
                        self._written[pod] = passed
            finally:
                process.terminate()

    def _printing(self, name: str) -> str | None:
        """The newest pod that prints a job's log; each retry of a job has a new one."""
        found = json.loads(self._kubectl("get", "pods", "-l", f"job-name={name}", "-o", "json"))["items"]
        begun = [pod for pod in found if (pod.get("status") or {}).get("phase") in ("Running", "Succeeded", "Failed")]
        begun.sort(key=lambda pod: pod["metadata"].get("creationTimestamp", ""))
        return f"pod/{begun[-1]['metadata']['name']}" if begun else None

    def _head(self, ray_cluster: str) -> str | None:
        if not ray_cluster:
            return None
        selector = f"ray.io/cluster={ray_cluster},ray.io/node-type=head"
        names = self._kubectl("get", "pods", "-l", selector, "-o", "name").split()
        return names[0] if names else None

    def _why_it_waits(self, name: str, ray_cluster: str) -> str:
        """Text of the last warning about a job and its objects."""
        with contextlib.suppress(ClusterError, ValueError, KeyError):
            events = json.loads(self._kubectl("get", "events", "-o", "json"))["items"]
            mine = [one for one in events if _belongs(one.get("involvedObject") or {}, name, ray_cluster)]
            mine.sort(key=lambda one: str(one.get("lastTimestamp") or one.get("eventTime") or ""))
            for event in reversed(mine):
                text = f"{event.get('reason', '')}: {event.get('message', '')}"
                if any(sign in text for sign in WAITS):
                    return _to_text(text)
        return ""

    def _check_secret(self, names: Sequence[str]) -> None:
        # kubectl's template omits the values
        template = '{{range $name, $value := .data}}{{$name}}{{"\\n"}}{{end}}'
        there = self._kubectl("get", "secret", self.cluster.secret, "-o", f"go-template={template}").split()
        missing = [name for name in names if name not in there]
        if missing:
            raise ClusterError.problem(
                "The Secret",
                f"{self.cluster.secret} has no key {', '.join(missing)}",
                "on Kubernetes, --secret-env names keys of this Secret; submissions contain no values",
            )

    def _operator(self) -> str | None:
        """The operator's release according to its image; None if that is not readable."""
        words = ("deployments", "--all-namespaces", "-l", "app.kubernetes.io/name=kuberay-operator", "-o")
        with contextlib.suppress(ClusterError):
            images = self._kubectl("get", *words, "jsonpath={.items[*].spec.template.spec.containers[*].image}").split()
            for image in images:
                tag = image.rpartition(":")[2].removeprefix("v")
                if tag[:1].isdigit():
                    return tag
        return None

    def _read(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._kubectl("get", "rayjobs.ray.io", name, "-o", "json", job=name))
        return found

    def _of(self, found: dict[str, Any]) -> JobNow:
        status = found.get("status") or {}
        about = found["metadata"]
        return JobNow(
            name=about["name"],
            status=self._of_status(status),
            message=str(status.get("message", "")).strip(),
            entrypoint=(about.get("annotations") or {}).get(COMMAND, found["spec"].get("entrypoint", "")),
            started_at=_seconds(status.get("startTime") or about.get("creationTimestamp")),
            ended_at=_seconds(status.get("endTime")),
        )

    def _of_status(self, status: dict[str, Any]) -> str:
        """Ray's status for a RayJob's two statuses; the deployment's counts, since a job may be retried."""
        deployment, job = status.get("jobDeploymentStatus", ""), status.get("jobStatus", "")
        if deployment in ENDED_AS:
            return "STOPPED" if job == "STOPPED" else ENDED_AS[deployment]
        return "RUNNING" if deployment == "Running" and job == "RUNNING" else "PENDING"

    def _begin(self, *, limit: bool = True) -> tuple[str, ...]:
        """First words of every kubectl command. limit: whether the server must answer soon."""
        context = ("--context", self.cluster.context) if self.cluster.context else ()
        answer = ("--request-timeout=30s",) if limit else ()
        return ("kubectl", *context, "--namespace", self.cluster.namespace, *answer)

    def _kubectl(self, *words: str, given: str = "", job: str = "") -> str:
        said = run([*self._begin(), *words], given=given.encode())
        if said.code:
            self._refuse(said, job)
        return said.out

    def _refuse(self, said: ProgramOutput, job: str) -> NoReturn:
        """Raise the error that corresponds to a message of kubectl."""
        text = said.problem
        low = text.lower()
        where = f"kubectl's {f'context {self.cluster.context}' if self.cluster.context else 'current context'}"
        if said.code == 124 or any(sign in low for sign in LOST):
            raise LostConnectionError("--to", self.cluster.name, f"nothing answers there: {text}", f"check {where}")
        for signs, allowed, hint in PROBLEMS:
            if any(sign in low for sign in signs):
                raise ClusterError("--to", self.cluster.name, f"{allowed}: {text}", hint)
        if job and "notfound" in low.replace(" ", ""):
            hint = f"scaleray jobs list --to {self.cluster.name}"
            raise ClusterError.problem("JOB", f"{job} was not found in the namespace {self.cluster.namespace}", hint)
        raise ClusterError("--to", self.cluster.name, f"kubectl reports: {text}", f"check {where}")


PROBLEMS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("unauthorized", "must be logged in", "invalid bearer token", "credentials"),
        "its token or certificate is not accepted",
        "log in again, as your provider describes, and try: kubectl auth whoami",
    ),
    (
        ("exceeded quota",),
        "the quota of the namespace is used up",
        "kubectl describe resourcequota shows it; wait for jobs to end, or request fewer nodes or more quota",
    ),
    (
        ("unknown field", "strict decoding error"),
        "its KubeRay is too old for a field of the job",
        "upgrade the operator and its definitions, or set a manifest for that release as the cluster's `manifest`",
    ),
    (
        ("doesn't have a resource type", "no matches for kind", "could not find the requested resource"),
        "KubeRay is not installed there",
        "https://docs.ray.io/en/latest/cluster/kubernetes/getting-started.html",
    ),
    (("forbidden",), "you do not have permission", "ask the administrator; docs/cluster.md lists the permissions"),
    (
        ("does not exist",),
        "kubectl does not have its context",
        "kubectl config get-contexts lists all; set one as `context` in your file of clusters",
    ),
    (("already exists",), "it already has a job of this name", "give another --name"),
)
"""Parts of kubectl's messages, with their meaning and the remedy."""


def _belongs(about: dict[str, Any], name: str, ray_cluster: str) -> bool:
    """Whether an event concerns a job, the pod that submits it, its Ray cluster and pods, or Kueue's entry for it."""
    kind, given = about.get("kind"), str(about.get("name", ""))
    if kind in ("RayJob", "Job"):
        return given == name
    if kind == "Workload":
        return re.fullmatch(rf"rayjob-{re.escape(name)}-[0-9a-f]+", given) is not None
    if kind == "Pod" and re.fullmatch(rf"{re.escape(name)}-[a-z0-9]{{5}}", given):
        return True
    return bool(ray_cluster) and (given == ray_cluster or given.startswith(f"{ray_cluster}-"))


def _to_text(text: str) -> str:
    short = " ".join(text.split())[:300]
    if "exceeded quota" in text:
        return f"the quota of the namespace is used up ({short}); kubectl describe resourcequota shows it"
    if "insufficient quota" in text:
        return f"Kueue waits until its quota has room ({short})"
    return short


def _seconds(moment: str | None) -> float | None:
    """A Kubernetes timestamp in seconds since 1970."""
    if not moment:
        return None
    try:
        return float(calendar.timegm(time.strptime(moment, "%Y-%m-%dT%H:%M:%SZ")))
    except ValueError:
        return None
