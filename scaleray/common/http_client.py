"""HTTP requests that do not follow redirects, which would lose the body and could send a token to another host.

Uses urllib: `requests` would send passwords from ~/.netrc, and its errors quote addresses, which may hold secrets.
"""

import http.client
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any


class HttpError(Exception):
    """An unsuccessful request.

    status: of an answer that is an error or a redirect; None without an answer. cause: the answer with its headers, or
    the system's error. was_connected: False if the server could not be reached.
    """

    def __init__(self, cause: Any, *, status: int | None = None, was_connected: bool = True) -> None:
        super().__init__(str(cause) or type(cause).__name__)
        self.cause, self.status, self.was_connected = cause, status, was_connected


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: Any) -> None:
        return None


def _handlers() -> list[Any]:
    """Handlers for https requests, which trust the certificates of the system, of SSL_CERT_FILE, and of MLflow's
    client. Raises OSError for a file that cannot be read."""
    context = ssl.create_default_context()
    if bundle := os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE"):
        try:
            context.load_verify_locations(**{"capath" if os.path.isdir(bundle) else "cafile": bundle})
        except OSError as exc:
            raise OSError(f"REQUESTS_CA_BUNDLE is {bundle}: {exc.strerror or exc}") from exc
    return [_NoRedirects, urllib.request.HTTPSHandler(context=context)]


def fetch(
    url: str,
    *,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
    method: str | None = None,
    most: int | None = None,
) -> bytes:
    """Return the body of an answer, or its first `most` bytes. Raises HttpError, also for a redirect."""
    try:
        request = urllib.request.Request(url, data=body, headers=dict(headers or {}), method=method)
        handlers = _handlers() if request.type == "https" else [_NoRedirects]
        with urllib.request.build_opener(*handlers).open(request, timeout=timeout_s) as answer:
            found: bytes = answer.read(most)
            return found
    except urllib.error.HTTPError as exc:
        raise HttpError(exc, status=exc.code) from None
    except urllib.error.URLError as exc:
        raise HttpError(exc.reason, was_connected=False) from None
    except (OSError, http.client.HTTPException, ValueError) as exc:
        raise HttpError(exc) from None
