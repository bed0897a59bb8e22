"""Access to MLflow: find the tracking store, open it safely, write to one run, and link to it."""

import contextlib
import functools
import json
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from scaleray.common.filesystems import lock, shared_filesystem, unlock
from scaleray.common.http_client import HttpError, fetch
from scaleray.common.private_parts import EMPTY_ANSWERS
from scaleray.common.progress import stage
from scaleray.config.base import HIDDEN, without_password
from scaleray.errors import TrackingError, first_line
from scaleray.records.accepted_names import acceptable_name, acceptable_text
from scaleray.records.mlflow_operations import LogArtifact, LogDataset, LogMetrics, LogParams, Operation, SetTags

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")

T = TypeVar("T")
UI_ADDRESS = "http://127.0.0.1:5000"
ANSWER_S = 5.0
"""Seconds to wait for a server's answer when determining the reason for a failure."""
REDIRECTS = (301, 302, 303, 307, 308)
PAUSE_S = 1.0
"""Seconds to wait before another request to a server that gave no answer."""
KEY_TAG = "scaleray.key"
"""Tag that identifies a run before MLflow has given it an ID."""
LONGEST_PARAM = 6000  # MLflow cuts longer values without a word; the whole config is an artifact


def uri_of_environment() -> str | None:
    """Tracking URI from the environment: SCALERAY_TRACKING__URI, as for a config, or MLFLOW_TRACKING_URI."""
    return os.environ.get("SCALERAY_TRACKING__URI") or os.environ.get("MLFLOW_TRACKING_URI")


def resolve_uri(uri: str | None) -> str:
    """Tracking URI to use, always absolute: the given one (an option, or a config's `tracking.uri`), that of the
    environment, or an SQLite file in ~/scaleray. A saved URI, which lacks its password, is replaced by the
    environment's if only the password differs. Raises TrackingError."""
    if uri is not None and HIDDEN in uri:
        uri = _with_its_password(uri)
    uri = uri or uri_of_environment() or _file_at_home()
    if uri.startswith("sqlite:///"):
        return f"sqlite:///{Path(uri.removeprefix('sqlite:///')).expanduser().absolute()}"
    scheme = uri.partition("://")[0].lower() if "://" in uri else ""  # urllib refuses some passwords of databases
    if scheme not in ("http", "https", "databricks") and not scheme.startswith(("postgresql", "mysql", "mssql")):
        raise TrackingError(
            "tracking.uri",
            without_password(uri),
            "it must be sqlite:///FILE, http(s)://SERVER or a database URL",
            "MLflow 3 no longer stores runs in plain folders; use sqlite:///mlflow.db",
        )
    return uri


def _file_at_home() -> str:
    """URI of the SQLite file in ~/scaleray. Raises TrackingError for a home directory that several machines share."""
    file = Path.home() / "scaleray" / "mlflow.db"
    if kind := shared_filesystem(file):
        raise TrackingError.problem(
            "tracking.uri",
            f"is required: {Path.home()} is on {kind}, where SQLite loses data (https://sqlite.org/faq.html#q5)",
            "--tracking.uri http://SERVER:5000, or sqlite:////FILE on a disk of this machine",
        )
    return f"sqlite:///{file}"


def named_or_in_use(recorded: object, uri: str | None) -> str | None:
    """Address of MLflow for a file that names one: the one given by the user, or the one in use if it is the same;
    otherwise None. A foreign file must not decide which server receives credentials, or which database is given tables.
    """
    in_use = resolve_uri(uri)
    return in_use if uri is not None or without_password(in_use) == recorded else None


def _with_its_password(saved: str) -> str:
    given = uri_of_environment()
    if given is None or without_password(given) != saved:
        hint = "set MLFLOW_TRACKING_URI to the address with its password"
        raise TrackingError.problem("tracking.uri", f"{saved} was saved without its password", hint)
    return given


def check_reachable(uri: str, *, timeout_s: float = 5.0) -> None:
    """Raise TrackingError early if the store cannot be used. For a file, mlflow is not imported."""
    if uri.startswith("sqlite:///"):
        path = sqlite_path(uri)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "ab"):
                pass
        except OSError as exc:
            raise TrackingError.problem(
                "The MLflow database", f"{path} cannot be written: {exc.strerror}", "choose another with --tracking.uri"
            ) from exc
    elif uri.startswith("http"):
        with stage(f"looking for MLflow at {without_password(uri)}"), _timeout(timeout_s):
            _ask(uri)


def _tried_again(make: Callable[[], T]) -> T:
    """Result of `make`, called once more after an error, since an answer may have been lost."""
    try:
        return make()
    except TrackingError:
        raise
    except Exception:  # mlflow, its HTTP client and its database drivers share no base class
        time.sleep(PAUSE_S)
    return make()


def _ask(uri: str) -> None:
    """Query a server's experiments through MLflow's own client, which handles certificates, passwords and proxies.

    Raises TrackingError."""
    try:
        _tried_again(lambda: open_client(uri).search_experiments(max_results=1))
    except Exception as exc:  # as above: no common base class
        is_refused = any(f" {code}" in str(exc) for code in (401, 403))
        found = "refuses the credentials" if is_refused else "does not answer"
        start = "start it, correct --tracking.uri, or leave the key out to use a local SQLite file"
        login = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        why, hint = f"{found}: {_reason(exc, uri)}", login if is_refused else start
        if elsewhere := _redirect(uri):
            why, hint = f"redirects to {elsewhere}", "correct --tracking.uri, or log in as the server requires"
        # without the cause: MLflow's text may hold the password of the address
        raise TrackingError.problem("MLflow", f"at {without_password(uri)} {why}", hint) from None


def _redirect(uri: str) -> str:
    """Target of a server's redirect, up to the path; "" if there is none. MLflow's client follows redirects, so its
    error would be about the other server."""
    scheme, _, address = uri.partition("://")
    place = address.rpartition("@")[2].rstrip("/")
    try:
        fetch(f"{scheme}://{place}/api/2.0/mlflow/experiments/search", timeout_s=ANSWER_S, body=b"{}", most=1)
    except HttpError as exc:
        if exc.status in REDIRECTS:
            return without_password(str(exc.cause.headers.get("Location", "another address")).partition("?")[0])
    return ""


def _reason(exc: BaseException, uri: str) -> str:
    """First line of the innermost cause, with the user part of addresses removed."""
    while (cause := exc.__cause__ or exc.__context__) is not None:
        exc = cause
    user, at, _ = uri.partition("://")[2].rpartition("@")
    return first_line(exc).replace(user + at, "")[:300] if at else first_line(exc)[:300]


@contextlib.contextmanager
def _timeout(timeout_s: float) -> Iterator[None]:
    """Context with a timeout for MLflow's client, unless the user has set one."""
    name = "MLFLOW_HTTP_REQUEST_TIMEOUT"
    before = os.environ.get(name)
    os.environ.setdefault(name, f"{math.ceil(timeout_s)}")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)


def sqlite_path(uri: str) -> Path:
    """The file of an sqlite:/// URI."""
    return Path(uri.removeprefix("sqlite:///"))


def delete_run(uri: str, run_id: str) -> None:
    """Delete a run as on MLflow's own page, where it can be restored."""
    open_client(uri).delete_run(run_id)


def run_link(uri: str, experiment_id: str, run_id: str) -> str:
    """Address of the run's page. For a database, the address of `scaleray tracking ui`."""
    return f"{_ui(uri)}/#/experiments/{experiment_id}/runs/{run_id}?workflowType=machine_learning"


def experiment_link(uri: str, experiment_id: str) -> str:
    """Address of the experiment's runs; without the parameter, MLflow opens an empty GenAI page."""
    return f"{_ui(uri)}/#/experiments/{experiment_id}/runs?workflowType=machine_learning"


def _ui(uri: str) -> str:
    return without_password(uri).rstrip("/") if uri.startswith("http") else UI_ADDRESS


class RunStore:
    """One MLflow run, opened or created. Every write is one `Operation`; the server's errors are raised unchanged."""

    def __init__(self, uri: str, run_id: str, experiment_id: str) -> None:
        self.uri, self.run_id, self.experiment_id = uri, run_id, experiment_id
        self.status_before: str | None = None
        """Status that a reopened run had before."""
        self.is_new = False
        """Whether the run is new, and so has no data yet."""
        self.client = open_client(uri)

    @classmethod
    def create(
        cls,
        uri: str,
        *,
        experiment: str,
        run_name: str,
        tags: Mapping[str, str],
        started_at: float | None = None,
        key: str | None = None,
    ) -> Self:
        """Create a run with status RUNNING since `started_at` (wall clock in s; None is now). Creates the database and
        the experiment if they do not exist. Raises TrackingError.

        key: permanent name, which only this run has, even if a process was killed in between or an answer of the server
        was lost. None makes a new one."""
        key = key or secrets.token_hex(8)

        def made() -> tuple[Any, bool, str]:
            with _first_use_lock(uri):
                client = open_client(uri)
                found = client.get_experiment_by_name(experiment)
                if found is not None and found.lifecycle_stage == "deleted":
                    raise TrackingError(
                        "tracking.experiment",
                        experiment,
                        "this experiment is deleted in MLflow",
                        "restore it, or choose another name",
                    )
                # an absolute artifact folder: MLflow's own default is relative to each process's directory
                location = str(sqlite_path(uri).parent / "mlartifacts") if uri.startswith("sqlite") else None
                experiment_id = (
                    found.experiment_id if found else client.create_experiment(experiment, artifact_location=location)
                )
            start_time = int(started_at * 1000) if started_at else None

            def make() -> Any:
                named = {**tags, KEY_TAG: key}
                return client.create_run(experiment_id, run_name=run_name, tags=named, start_time=start_time)

            return *_made_once(client, experiment_id, key, make), experiment_id

        try:
            run, is_new, experiment_id = _tried_again(made)
        except TrackingError:
            raise
        except Exception as exc:  # mlflow, its HTTP client and its database drivers share no base class
            first = first_line(exc)
            hint = (
                "run: mlflow db upgrade URI (after a backup)"
                if "out-of-date" in str(exc)
                else "check --tracking.uri and the server's log"
            )
            raise TrackingError.problem(
                "MLflow", f"at {without_password(uri)} could not create the run: {first}", hint
            ) from exc
        if not run.info.run_id:  # it answers 200 to everything
            raise TrackingError.problem(
                "MLflow", f"at {without_password(uri)} created a run without an id", "correct --tracking.uri"
            )
        store = cls(uri, run.info.run_id, experiment_id)
        store.is_new = is_new
        return store

    @classmethod
    def reopen(cls, uri: str, run_id: str, experiment_id: str) -> Self:
        """Reopen an interrupted run and set it to RUNNING again. Raises TrackingError if it cannot be continued."""
        try:
            store = cls(uri, run_id, experiment_id)
            info = store.client.get_run(run_id).info
            store.status_before = info.status
            if info.lifecycle_stage == "deleted":
                raise TrackingError.problem("The MLflow run", f"{run_id} is deleted", "restore it, or start a new run")
            store.client.update_run(run_id, status="RUNNING")
        except TrackingError:
            raise
        except Exception as exc:  # as above: no common base class
            first = first_line(exc)
            raise TrackingError.problem(
                "The MLflow run",
                f"{run_id} cannot be continued at {without_password(uri)}: {first}",
                "check --tracking.uri, which must be that of the interrupted run",
            ) from exc
        return store

    def send(self, operation: Operation) -> None:
        """Write one operation. Safe to repeat: on replay, metric points up to the last stored step are left out."""
        from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag

        if isinstance(operation, LogMetrics):
            points = [Metric(acceptable_name(n), value, int(at), int(step)) for n, value, at, step in operation.points]
            for start in range(0, len(points), 1000):  # the server's limit for one call
                self.client.log_batch(self.run_id, metrics=points[start : start + 1000])
        elif isinstance(operation, LogParams):
            params = [
                Param(acceptable_name(key), acceptable_text(str(value))[:LONGEST_PARAM])
                for key, value in operation.values.items()
            ]
            for start in range(0, len(params), 100):
                self.client.log_batch(self.run_id, params=params[start : start + 100])
        elif isinstance(operation, SetTags):
            tags = [RunTag(acceptable_name(k), acceptable_text(str(v))) for k, v in operation.values.items()]
            self.client.log_batch(self.run_id, tags=tags)
        elif isinstance(operation, LogArtifact):
            self._upload(operation)
        elif isinstance(operation, LogDataset):
            dataset = Dataset(
                name=operation.name,
                digest=operation.digest,
                source_type="scaleray",
                source=json.dumps(operation.source),
                profile=json.dumps(operation.profile),
            )
            tag = InputTag("mlflow.data.context", operation.context)
            self.client.log_inputs(self.run_id, datasets=[DatasetInput(dataset, [tag])])
        else:
            self.client.set_terminated(self.run_id, operation.status, operation.end_time)

    def _upload(self, operation: LogArtifact) -> None:
        """Upload a file, and check that a server that stores artifacts itself has it, since MLflow's client does not
        treat an empty answer as an error. Raises TrackingError."""
        self.client.log_artifact(self.run_id, operation.path, operation.folder)
        if self.uri.startswith("http") and self.client.get_run(self.run_id).info.artifact_uri.startswith("mlflow-"):
            names = {Path(file.path).name for file in self.client.list_artifacts(self.run_id, operation.folder)}
            if (name := Path(operation.path).name) not in names:
                raise TrackingError.problem(
                    "MLflow", f"accepted the file {name} but did not store it", "check the server's log"
                )

    def remove_twins(self, key: str) -> None:
        """Delete other runs with this key. A request that MLflow's client abandoned and repeated may have created one
        later."""
        for run in _with_key(self.client, self.experiment_id, key):
            if run.info.run_id != self.run_id:
                self.client.delete_run(run.info.run_id)

    def is_described(self) -> bool:
        """Whether the run has params, which are written first."""
        return bool(self.client.get_run(self.run_id).data.params)

    def history(self, metric: str) -> list[tuple[str, float, int, int]]:
        """All points of a metric: (metric, value, wall clock in ms, step)."""
        return [(metric, m.value, m.timestamp, m.step) for m in self.client.get_metric_history(self.run_id, metric)]

    def tags(self, prefix: str) -> dict[str, str]:
        """The run's tags whose names begin with `prefix`."""
        return {k: v for k, v in self.client.get_run(self.run_id).data.tags.items() if k.startswith(prefix)}

    def last_steps(self) -> dict[str, int]:
        """The last stored step of every metric."""
        run = self.client.get_run(self.run_id)
        return {
            key: max((m.step for m in self.client.get_metric_history(self.run_id, key)), default=-1)
            for key in run.data.metrics
        }


def _made_once(client: Any, experiment_id: str, key: str, make: Callable[[], Any]) -> tuple[Any, bool]:
    """The only run with this key, and whether it is new rather than from an earlier attempt. If a lost answer has left
    several, the one with the most data stays."""
    found = _with_key(client, experiment_id, key)
    is_new = not found
    if is_new:
        try:
            made = [make()]
        except Exception:  # the run may be there although its answer was lost
            made = []
            found = _with_key(client, experiment_id, key)
            if not found:
                raise
        found = found or _with_key(client, experiment_id, key) or made
    if len(found) == 1:
        return found[0], is_new
    first, *twins = sorted(found, key=lambda run: (-len(run.data.metrics) - len(run.data.params), run.info.run_id))
    for twin in twins:
        client.delete_run(twin.info.run_id)
    return first, is_new


def _with_key(client: Any, experiment_id: str, key: str) -> list[Any]:
    return list(client.search_runs([experiment_id], f"tags.`{KEY_TAG}` = '{key}'"))


def mark_left_running(
    uri: str, key: str, *, status: str, reason: str, experiment: str, experiment_id: str | None = None
) -> bool:
    """Mark the run with this key as ended if MLflow has it as RUNNING. Returns whether it did. Raises MLflow's errors.

    experiment: name of the experiment, if experiment_id is unknown."""
    client = open_client(uri)
    if experiment_id is None:
        found = client.get_experiment_by_name(experiment)
        experiment_id = found.experiment_id if found is not None else None
    runs = _with_key(client, experiment_id, key) if experiment_id is not None else []
    left = [run.info.run_id for run in runs if run.info.status == "RUNNING"]
    for run_id in left:
        client.set_tag(run_id, "scaleray.verdict", acceptable_text(reason))
        client.set_terminated(run_id, status)
    return bool(left)


def open_client(uri: str) -> Any:
    """MLflow's client for an existing database or a server."""
    # a server that is away must cost seconds, not the minutes of MLflow's default retries
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    import logging

    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    from mlflow import MlflowClient

    if uri.startswith("http"):
        _refuse_empty_answers()
    return MlflowClient(tracking_uri=uri)


def _refuse_empty_answers() -> None:
    """Treat an empty answer from MLflow's API as an error. A proxy sends it if the server behind it is down, and
    MLflow's client reads it as `{}`, that is, success.

    Source: `mlflow.utils.rest_utils.verify_rest_response` of MLflow 3.17, which has this check for another service."""
    if not EMPTY_ANSWERS.is_used():
        return
    from mlflow.utils import rest_utils

    verify = rest_utils.verify_rest_response
    if getattr(verify, "refuses_empty_answers", False):
        return

    @functools.wraps(verify)
    def checked(response: Any, endpoint: str, *args: Any, **kwargs: Any) -> Any:
        if response.status_code == 200 and not response.content.strip() and "/mlflow/" in endpoint:
            raise json.JSONDecodeError("MLflow answered with nothing", "", 0)
        return verify(response, endpoint, *args, **kwargs)

    checked.refuses_empty_answers = True  # type: ignore[attr-defined]
    rest_utils.verify_rest_response = checked


@contextlib.contextmanager
def _first_use_lock(uri: str) -> Iterator[None]:
    """Lock for the first use of an SQLite file. Two processes that migrate a new file at the same time corrupt it, so
    one must wait."""
    if not uri.startswith("sqlite:///"):
        yield
        return
    path = sqlite_path(uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".lock"), "w") as file:
        lock(file, waits=True)
        try:
            yield
        finally:
            unlock(file)
