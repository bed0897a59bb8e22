"""Libraries of Hugging Face, imported on first use and restricted to local files."""

from typing import Any

from scaleray.common.extras import library

EXTRA = "hugging-face"
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Arguments of every `from_pretrained`: no network, and no code from a folder."""


def transformers() -> Any:
    """Return the library transformers. Raises WorkloadError if it is missing."""
    return library("transformers", extra=EXTRA, wanted_by="scaleray.hugging_face")


def peft() -> Any:
    """Return the library peft. Raises WorkloadError if it is missing."""
    return library("peft", extra=EXTRA, wanted_by="the argument peft of a workload")
