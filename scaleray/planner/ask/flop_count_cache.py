"""Count a workload's operations in a separate process, and cache the result."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scaleray.common.guarded import guarded
from scaleray.common.own_folder import cache_folder
from scaleray.config import RunConfig
from scaleray.errors import UsageError
from scaleray.planner.models.block_counts import ModelProfile
from scaleray.planner.models.flop_count_as_model import from_workload
from scaleray.records.workload_profile import WorkloadProfile

COUNTING_LIMIT_S = 600


def counted(config: RunConfig, path: Path, overrides: Sequence[str]) -> ModelProfile:
    """Return the workload's profile. Only the process that counts imports torch. Raises UsageError."""
    kept = cache_folder("profiles") / f"{_fingerprint(config, path)}.json"
    if not kept.exists():
        command = [sys.executable, "-m", "scaleray.launch.flop_count_process", str(path)]
        try:
            done = subprocess.run(
                guarded(command), input=json.dumps(overrides), capture_output=True, text=True, timeout=COUNTING_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            text = f"took longer than {COUNTING_LIMIT_S} s"
            raise UsageError.problem("counting the workload", text, "use --model NAME") from None
        if done.returncode:
            last = done.stderr.strip().splitlines()
            text = f"failed: {last[-1] if last else done.returncode}"
            raise UsageError.problem(f"counting {config.workload.name}", text, "use --model NAME")
        partial = kept.with_suffix(f".{os.getpid()}")
        partial.write_text(done.stdout)
        partial.replace(kept)
    return from_workload(WorkloadProfile.from_json(kept.read_text()), name=config.workload.name)


def _fingerprint(config: RunConfig, path: Path) -> str:
    """Hash of the inputs to the profile: the workload's arguments, its file and neighbours, the precision, and the
    counting method."""
    from scaleray import __version__

    facts: dict[str, Any] = {
        "workload": config.workload.model_dump(mode="json"),
        "precision": config.precision.dtype,
        "version": __version__,
    }
    file = config.workload.name.partition(":")[0]
    for folder in (Path.cwd(), path.resolve().parent):
        if (folder / file).is_file():
            facts["source"] = {
                source.name: hashlib.sha256(source.read_bytes()).hexdigest()
                for source in sorted((folder / file).parent.glob("*.py"))
            }
            break
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
