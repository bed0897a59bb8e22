"""Names and texts in a form that MLflow accepts."""

import re

LONGEST_NAME = 250
"""Maximum length of a name in MLflow."""


def acceptable_name(name: str) -> str:
    """Name of a metric, param or tag in a form that MLflow accepts: other characters and path parts that lead outside
    become _, and long names are cut. Most names are unchanged. Source: `mlflow.utils.validation` of MLflow 3.17.
    """
    parts = re.sub(r"[^/\w.\- :]", "_", name).split("/")
    parts = ["_" if part in ("", ".", "..") else part for part in parts]
    return "/".join(parts)[:LONGEST_NAME].rstrip("/")


def acceptable_text(text: str) -> str:
    """The text with escapes for characters that UTF-8 cannot encode, such as undecodable bytes of a file name."""
    return text.encode(errors="backslashreplace").decode()
