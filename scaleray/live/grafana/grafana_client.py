"""Import dashboards through Grafana's HTTP API, with a clear message for each kind of failure.

Source: grafana.com/docs, HTTP API, Dashboard and Folder. Tested only with a stand-in server."""

from __future__ import annotations

import json
import os
import urllib.parse
from collections.abc import Mapping
from typing import Any

from scaleray.common.http_client import HttpError, fetch
from scaleray.errors import RunFailedError, UsageError
from scaleray.live.dashboards.dashboard_files import DASHBOARDS
from scaleray.live.dashboards.grafana import as_grafana

TIMEOUT_S = 30.0
SHOWN = 300
"""Maximum number of characters of a server's response that a message shows."""


def install_dashboards(grafana: str, *, token_env: str = "GRAFANA_TOKEN", folder: str = "scaleray") -> dict[str, str]:
    """Import the dashboards into Grafana, replacing existing ones, and return each page's address by name.

    grafana: its address. token_env: environment variable with the token of a service account. folder: folder in
    Grafana, created if it does not exist. Raises UsageError or RunFailedError; no message contains the token."""
    server = Grafana(grafana, token_env)
    uid = server.folder(folder)
    return {name: server.install(as_grafana(dashboard), folder=uid) for name, dashboard in DASHBOARDS.items()}


class Grafana:
    """A Grafana server, with the token from an environment variable. The token is sent only in request headers, and
    never appears in a message, record or command line."""

    def __init__(self, address: str, token_env: str) -> None:
        hint = "such as http://127.0.0.1:3000"
        try:
            parts = urllib.parse.urlsplit(address)
        except ValueError as exc:
            raise UsageError.problem(
                "--grafana", f"{address.rpartition('@')[2]} is not an address: {exc}", hint
            ) from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError("--grafana", _without_secrets(parts), "it must begin with http:// or https://", hint)
        if parts.username or parts.password or parts.query:
            raise UsageError(
                "--grafana",
                _without_secrets(parts),
                "it must not contain a user, password or key",
                f"put a token into the environment variable {token_env}",
            )
        token = os.environ.get(token_env, "").strip()
        found = "is not a token" if token else "is not set"
        if not token or not (token.isascii() and token.isprintable()):  # what is no header would be quoted in an error
            raise UsageError.problem(
                "The environment variable",
                f"{token_env} {found}: it must contain the token of a service account",
                "create one in Grafana under Administration, Service accounts; --token-env names another variable",
            )
        self._address, self._token_env = address.rstrip("/"), token_env

    def folder(self, title: str) -> str:
        """Uid of the folder with this title, which is created if it does not exist."""
        found = self._ask("GET", "/api/folders?limit=1000")
        uid = next((one["uid"] for one in found if one.get("title") == title), None)
        return str(uid or self._ask("POST", "/api/folders", {"title": title})["uid"])

    def install(self, dashboard: Mapping[str, Any], *, folder: str) -> str:
        """Import a dashboard, replacing one with the same uid, and return the address of its page."""
        body = {"dashboard": {**dashboard, "id": None}, "folderUid": folder, "overwrite": True}
        body["message"] = "scaleray dashboards install"
        return self._address + str(self._ask("POST", "/api/dashboards/db", body).get("url", f"/d/{dashboard['uid']}"))

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        headers = {
            "Authorization": f"Bearer {os.environ[self._token_env].strip()}",
            "Content-Type": "application/json",
            "Accept": "application/json",
        }
        content = None if body is None else json.dumps(body).encode()
        try:
            return json.loads(
                fetch(self._address + path, timeout_s=TIMEOUT_S, headers=headers, body=content, method=method)
            )
        except HttpError as exc:
            if exc.status is not None:
                raise self._refused(exc.status, exc.cause, path) from None  # what it came from has the headers
            raise UsageError.problem(
                "--grafana", f"{self._address} does not answer: {exc}", "is it running, and is this its port?"
            ) from None
        except ValueError:
            raise UsageError.problem(
                "--grafana", f"{self._address} is not a Grafana server: its response from {path} is not JSON"
            ) from None

    def _refused(self, status: int, answer: Any, path: str) -> Exception:
        said = _message_of(answer).replace(os.environ[self._token_env].strip(), "***")
        where = f"Grafana at {self._address}"
        if status in (401, 403):
            want = "a valid token" if status == 401 else "a token with the right to edit dashboards and folders"
            hint = f"the role Editor is enough; Grafana says: {said}"
            return UsageError.problem(
                where, f"rejected the token in {self._token_env} ({status}): it needs {want}", hint
            )
        if 300 <= status < 400:
            to = urllib.parse.urlsplit(answer.headers.get("Location", ""))
            hint = f"it points to {_without_secrets(to)}: use the final address"
            return UsageError.problem("--grafana", f"{self._address} redirects ({status})", hint)
        if status == 404:
            return UsageError.problem(
                "--grafana", f"{self._address} has no {path}", "is a path missing, such as /grafana?"
            )
        if status in (400, 412):
            hint = (
                "Provisioned dashboards must be changed in their files. Otherwise Grafana may be too old: 9 or "
                "newer is required"
            )
            return RunFailedError(f"{where} rejected the dashboard ({status}): {said}.\n  {hint}")
        return RunFailedError(f"{where} failed ({status}): {said}.\n  See its log; try again later")


def _message_of(answer: Any) -> str:
    """The server's message as one short line."""
    try:
        text = answer.read(65536).decode(errors="replace")
        said = json.loads(text)
        text = said.get("message", text) if isinstance(said, dict) else text
    except (ValueError, OSError):
        pass
    return " ".join(str(text).split())[:SHOWN] or answer.reason


def _without_secrets(parts: urllib.parse.SplitResult) -> str:
    host = parts.netloc.rpartition("@")[2]
    return urllib.parse.urlunsplit((parts.scheme, host, parts.path, "", ""))
