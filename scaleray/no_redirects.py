"""HTTP requests that follow no redirect: a body would be lost, and a token go to the host that an answer names."""

from __future__ import annotations

import urllib.request
from typing import Any


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: Any) -> None:
        return None


def open_without_redirects(request: urllib.request.Request, *, timeout_s: float) -> Any:
    """The answer to a request, as `urlopen` gives it. Raises HTTPError for a redirect, too."""
    return urllib.request.build_opener(_NoRedirects).open(request, timeout=timeout_s)
