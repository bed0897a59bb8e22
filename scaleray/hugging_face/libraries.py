"""The libraries of Hugging Face, imported on first use, and never asked for anything that is not on this machine."""

from __future__ import annotations

from typing import Any

from scaleray.common.extras import library

EXTRA = "hugging-face"
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Arguments of every `from_pretrained`: no network, and no code out of a folder."""


def transformers() -> Any:
    """The library transformers. Raises WorkloadError where it is absent."""
    return library("transformers", extra=EXTRA, wanted_by="scaleray.hugging_face")


def peft() -> Any:
    """The library peft. Raises WorkloadError where it is absent."""
    return library("peft", extra=EXTRA, wanted_by="the argument peft of a workload")
