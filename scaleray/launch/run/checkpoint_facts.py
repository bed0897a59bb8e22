"""Facts of a run that every checkpoint's manifest has, so that it can be judged without the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scaleray.config import RunConfig
from scaleray.reproducibility.fingerprint import environment_hash


def checkpoint_facts(
    name: str, config: RunConfig, data: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Facts of the run `name`. data: facts of each split. facts: the run's environment and topology."""
    return {
        "run": name,
        "config": config.to_dict(),
        "config_hash": config.hash(),
        "environment_hash": environment_hash({"environment": facts["environment"]}),
        "data": {split: about.get("sha256") for split, about in data.items()},
    }
