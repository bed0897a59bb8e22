"""Names and texts in a form that MLflow accepts."""

import re

LONGEST_NAME = 250
"""Maximum length of a name in MLflow."""


def acceptable_name(name: str) -> str:
    """Name of a metric, param or tag as MLflow accepts it: other characters become _, as do path parts that lead
    outside, and long names are cut. Most names are unchanged. Source: `mlflow.utils.validation` of MLflow 3.17.
    """
    parts = re.sub(r"[^/\w.\- :]", "_", name).split("/")
    parts = ["_" if part in ("", ".", "..") else part for part in parts]
    return "/".join(parts)[:LONGEST_NAME].rstrip("/")


def acceptable_text(text: str) -> str:
    """A text with escapes in place of characters that UTF-8 cannot hold, such as undecodable bytes of a file name."""
    return text.encode(errors="backslashreplace").decode()
