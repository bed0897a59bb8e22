"""Names and texts in the form in which MLflow takes them."""

from __future__ import annotations

import re

LONGEST_NAME = 250
"""Characters that MLflow takes for a name."""


def acceptable_name(name: str) -> str:
    """The name under which MLflow takes a metric, a param or a tag: other characters become _, as do parts of a path
    that lead elsewhere, and the end of a long name is cut. Most names stay as they are.

    Source: `mlflow.utils.validation` of MLflow 3.17.
    """
    parts = re.sub(r"[^/\w.\- :]", "_", name).split("/")
    parts = ["_" if part in ("", ".", "..") else part for part in parts]
    return "/".join(parts)[:LONGEST_NAME].rstrip("/")


def acceptable_text(text: str) -> str:
    """A text with escapes in the place of what UTF-8 cannot hold, such as undecodable bytes of a file's name."""
    return text.encode(errors="backslashreplace").decode()
