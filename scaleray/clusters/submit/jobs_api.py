"""Submit jobs through a cluster's dashboard with Ray's own client, after a check that cannot hang."""

import asyncio
import contextlib
import functools
import http.client
import json
import logging
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

from scaleray.clusters.submit.clusters import clusters_file, is_named
from scaleray.clusters.submit.package_versions import PROBE, Versions, versions_in
from scaleray.clusters.submit.submitted_job import GIVE_UP_S, JobNow, LostConnectionError
from scaleray.common.http_client import HttpError, fetch
from scaleray.errors import ClusterError, first_line
from scaleray.launch.cluster import loopback
from scaleray.launch.cluster.connection import set_auth_mode
from scaleray.launch.cluster.token import headers, is_given

ANSWER_S = 10.0
REQUEST_S = 120.0
"""Timeout in seconds for a request of Ray's client; on a loaded head, starting a job takes longest."""
SILENCE_S = 60.0
"""Seconds without output of a job before reconnecting, since a connection that is dropped in transit, for example while
a laptop sleeps, reports no error."""
PROBE_S = 120.0
"""Timeout in seconds for a cluster's versions, which a new process on it reports."""
PROBE_NAME = "scaleray-probe-"


class Jobs:
    """Jobs of one cluster. url: its dashboard. Every method raises ClusterError."""

    def __init__(self, url: str) -> None:
        self.url = self.place = url
        set_auth_mode(url)
        self.ray_version, self.python_version = _check(url)
        self._probes: list[str] = []
        self._written: dict[str, int] = {}
        """Number of characters of each log that `follow` has written."""
        self._client = self._asked(lambda: _client_of(url))

    def versions(self) -> Versions:
        """Return the cluster's versions, from a separate job that is deleted immediately."""
        name = self.submit(f'python -c "{PROBE}"', name=f"{PROBE_NAME}{time.time_ns():x}", runtime_env={})
        try:
            deadline = time.monotonic() + PROBE_S
            while not (job := self.job(name)).has_ended:
                if time.monotonic() > deadline:
                    self.stop(name)
                    raise ClusterError.problem(
                        "The cluster", f"at {self.url} did not start a job within {PROBE_S:.0f} s", job.message
                    )
                time.sleep(0.3)
            found = versions_in(self.logs(name))
            if found is None:
                problem = job.message or "it printed nothing"
                raise ClusterError.problem("The cluster's Python", f"could not report its versions: {problem}")
            return Versions(found.python, {**found.packages, "ray": self.ray_version})
        finally:
            self._probes.append(name)
            self.forget_probes()

    def forget_probes(self) -> None:
        """Delete probe jobs. Call it again later, since Ray's job monitor may record their end after the deletion."""
        for name in self._probes:
            with contextlib.suppress(ClusterError):
                self._asked(functools.partial(self._client.delete_job, name))

    def submit(
        self, entrypoint: str, *, name: str, runtime_env: Mapping[str, Any], metadata: Mapping[str, str] | None = None
    ) -> str:
        """Start a job and return its name."""
        given: str = self._asked(
            lambda: self._client.submit_job(
                entrypoint=entrypoint, submission_id=name, runtime_env=dict(runtime_env), metadata=dict(metadata or {})
            )
        )
        return given

    def job(self, name: str) -> JobNow:
        """State of a job on the cluster."""
        return _job_now(self._asked(lambda: self._client.get_job_info(name), name=name))

    def list(self) -> list[JobNow]:
        """All submitted jobs, newest first."""
        every = [_job_now(one) for one in self._asked(self._client.list_jobs) if one.submission_id]
        found = [job for job in every if not job.name.startswith(PROBE_NAME)]
        return sorted(found, key=lambda job: -(job.started_at or 0.0))

    def logs(self, name: str) -> str:
        """Output of a job so far."""
        text: str = self._asked(lambda: self._client.get_job_logs(name), name=name)
        return text

    def stop(self, name: str) -> None:
        """Stop a job, as `ray job stop` does."""
        self._asked(lambda: self._client.stop_job(name), name=name)

    def follow(self, name: str, write: Callable[[str], None], say: Callable[[str], None]) -> JobNow:
        """Write a job's output until it ends. Lost connections are retried, and nothing is written twice. say: receives
        messages about them."""
        lost_at = None
        while True:
            try:
                asyncio.run(self._tail(name, write))
                if (job := self.job(name)).has_ended:
                    return job
                lost_at = None
                time.sleep(1.0)
            except LostConnectionError:
                if lost_at is None:
                    lost_at = time.monotonic()
                    say(f"the connection to {self.url} was lost; the job continues; reconnecting ...")
                if time.monotonic() - lost_at > GIVE_UP_S:
                    raise
                time.sleep(2.0)

    async def _tail(self, name: str, write: Callable[[str], None]) -> None:
        """Write new lines of a log until the connection ends or is silent for a while."""
        passed = 0
        parts = aiter(self._client.tail_job_logs(name))
        try:
            while True:
                async with asyncio.timeout(SILENCE_S):
                    text = await anext(parts)
                begin, passed = passed, passed + len(text)
                written = self._written.get(name, 0)
                if passed > written:  # every connection repeats the whole log
                    write(text[max(0, written - begin) :])
                    self._written[name] = passed
        except (StopAsyncIteration, TimeoutError):
            return
        except Exception as exc:  # errors of aiohttp, and RuntimeErrors of Ray
            if not _is_lost(exc):
                raise self._problem(exc, name) from exc

    def _asked(self, ask: Callable[[], Any], *, name: str = "") -> Any:
        try:
            return ask()
        except ClusterError:
            raise
        except Exception as exc:  # errors of requests, and RuntimeErrors of Ray with the server's message
            raise self._problem(exc, name) from exc

    def _problem(self, exc: Exception, name: str) -> ClusterError:
        text = str(exc)
        if name and ("does not exist" in text or "404" in text):
            return ClusterError.problem(
                "JOB", f"{name} was not found on the cluster at {self.url}", "scaleray jobs list"
            )
        if type(exc).__name__ == "AuthenticationError":
            return _refused(self.url)
        return LostConnectionError.problem("The cluster", f"at {self.url} responded: {first_line(exc)[:300]}")


def _client_of(url: str) -> Any:
    from ray.job_submission import JobSubmissionClient

    class Client(JobSubmissionClient):
        """Ray's client with a timeout, and with the token only for addresses to which it may be sent."""

        def _do_request(self, method: str, endpoint: str, **named: Any) -> Any:
            self._headers = _headers(url)
            limits = {"timeout": (ANSWER_S, REQUEST_S), "allow_redirects": False}
            return super()._do_request(method, endpoint, **{**limits, **named})

    client = Client(url)
    for name in ("dashboard_sdk", "job.sdk"):  # this command reports packages and connections itself
        logging.getLogger(f"ray.dashboard.modules.{name}").setLevel(logging.WARNING)
    return client


def _job_now(job: Any) -> JobNow:
    return JobNow(
        name=job.submission_id or job.job_id,
        status=str(getattr(job.status, "value", job.status)),
        message=(job.message or "").strip(),
        entrypoint=job.entrypoint or "",
        started_at=job.start_time / 1000 if job.start_time else None,
        ended_at=job.end_time / 1000 if job.end_time else None,
        exit_code=job.driver_exit_code,
    )


def _is_lost(exc: Exception) -> bool:
    """Whether an error is one of the connection, after which the job may continue."""
    return isinstance(exc, OSError) or "WebSocket" in str(exc) or type(exc).__module__.startswith("aiohttp")


def _check(url: str) -> tuple[str, str]:
    """Return a dashboard's versions of Ray and Python, the latter possibly empty. Raises ClusterError."""
    version = str(_get(url, "/api/version").get("ray_version", ""))
    if not version:
        raise ClusterError.problem("--to", f"{url} is not a Ray dashboard", "check host and port, usually 8265")
    with contextlib.suppress(ClusterError):
        about = _get(url, "/api/v0/cluster_metadata").get("data") or {}
        return version, str(about.get("pythonVersion", ""))
    return version, ""


def _headers(url: str) -> dict[str, str]:
    """Headers with the token, if it may be sent to this address. The user's own token is sent only to this machine and
    to clusters in the user's file; one from the environment is sent to any cluster."""
    is_here = urllib.parse.urlsplit(url).hostname in loopback.NAMES
    return headers() if is_here or is_given() or is_named(url) else {}


def _get(url: str, path: str) -> dict[str, Any]:
    try:
        values = json.loads(fetch(url + path, timeout_s=ANSWER_S, headers=_headers(url)))
        return values if isinstance(values, dict) else {}
    except HttpError as exc:
        if exc.status is None:
            what = "cannot be reached"
            if isinstance(exc.cause, http.client.HTTPException):
                what = "does not speak HTTP"
            elif isinstance(exc.cause, TimeoutError):
                what = f"did not answer within {ANSWER_S:g} s"
            hint = "check the address, and that the head is up and can be reached from here"
            raise ClusterError.problem("--to", f"{url} {what}: {exc.cause}", hint) from exc
        if exc.status in (401, 403):
            raise _refused(url) from exc
        if exc.status == 404:
            return {}
        if 300 <= exc.status < 400:
            hint = "give the address to which it redirects"
            raise ClusterError.problem("--to", f"{url} redirects ({exc.status})", hint) from exc
        raise ClusterError.problem(
            "--to", f"{url} responded with {exc.status} {exc.cause.reason}", "check the head's logs"
        ) from exc
    except ValueError:
        return {}


def _refused(url: str) -> ClusterError:
    has_token = bool(_headers(url))
    withheld = f" (yours is sent once {clusters_file()} has this address)" if headers() and not has_token else ""
    return ClusterError.problem(
        "The cluster",
        f"at {url} " + ("rejected the token" if has_token else "requires a token"),
        f"put the cluster's token into RAY_AUTH_TOKEN, or its file's path into RAY_AUTH_TOKEN_PATH{withheld}",
    )
