"""The options of `scaleray plan` as the planner's question: model, cluster, batch, and what was measured."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scaleray.config import RunConfig, load_config
from scaleray.errors import ConfigError, UsageError
from scaleray.guarded import guarded
from scaleray.planner.advise import Question
from scaleray.planner.catalogue import CATALOGUE
from scaleray.planner.cluster_file import is_cluster_file, read_cluster_file
from scaleray.planner.cluster_text import parse_cluster
from scaleray.planner.hardware import Catalogue, Cluster, read_hardware_file
from scaleray.planner.layout import Layout
from scaleray.planner.measured_collectives import read_measured_tables
from scaleray.planner.measurement import Measurement, anchor_of, measurement_of, read_measurement
from scaleray.planner.models import find_model
from scaleray.planner.profile import ModelProfile

OPTIMIZER_BYTES = {"adam": 8, "adamw": 8, "lamb": 8, "sgd": 0, "momentum": 4, "lars": 4}
COUNTING_LIMIT_S = 600


USUAL_TOKENS = 4_000_000
"""Of a step, where a transformer is named and no batch: that of Llama 2 (Touvron et al. 2023, arXiv:2307.09288, section 2)."""
USUAL_SAMPLES = 32
"""For each GPU, where another model is named: 256 on 8, as in Goyal et al. 2017, arXiv:1706.02677."""


def question_of(
    *, overrides: Sequence[str] = (), config: Path | None = None, model: str | None = None, profile: Path | None = None, cluster: str | None = None,
    here: bool = False, global_batch: int | None = None, sequence: int | None = None, precision: str | None = None, strategies: str = "",
    optimizer: str | None = None, compiled: bool = False, step_time: float | None = None, micro_batch: int | None = None,
    from_run: Path | None = None, input_rate: float | None = None, rank_by: str = "throughput", hardware: Path | None = None,
    collectives: Path | None = None, address: str | None = None, network: str | None = None,
) -> Question:  # fmt: skip
    """Raises ConfigError or UsageError where something is missing, unknown or impossible."""
    if overrides and config is None:
        raise ConfigError(
            "an option",
            overrides[0],
            "keys of the config can be given with -c only",
            "scaleray plan --help lists the options",
        )
    resolved = load_config(config, flags=overrides) if config else None
    catalogue = CATALOGUE.with_entries(read_hardware_file(hardware)) if hardware else CATALOGUE
    target = _cluster(cluster, here, catalogue, address=address, network=network)
    if collectives is not None:
        target = dataclasses.replace(target, measured=read_measured_tables(collectives))
    shape = _model(resolved, config, overrides, model, profile, sequence)
    batch = global_batch if global_batch is not None else _batch_of(resolved, shape, target.num_gpus)
    if global_batch is None and resolved is None:
        target = dataclasses.replace(
            target, notes=(*target.notes, f"{batch} samples a step, as --global-batch is not given")
        )
    wanted = precision or _precision_of(resolved) or ("bf16" if "bf16" in target.gpu.peak_tflops else "fp16")
    target.gpu.peak_flops(wanted)  # an unknown precision is refused here
    found: Measurement | None = None
    if from_run is not None:
        found = read_measurement(from_run)
    elif step_time is not None:
        if not step_time > 0 or not micro_batch or micro_batch < 1:
            raise ConfigError(
                "--step-time",
                f"{step_time} s, --micro-batch {micro_batch}",
                "both must be given and positive: one step on one GPU",
            )
        found = Measurement(step_time_s=step_time, num_gpus=1, layout=Layout(micro_batch=micro_batch))
    names = tuple(name.strip() for name in strategies.split(",") if name.strip())
    state = OPTIMIZER_BYTES.get(optimizer or "adam", 8)
    if optimizer is None and resolved is not None:
        state = OPTIMIZER_BYTES.get(resolved.optimizer.name, 8)
    is_fused = "bf16" in target.gpu.peak_tflops and wanted not in ("fp32", "tf32")
    measured = None
    if found is not None:
        measured, target = measurement_of(found, shape, target, precision=wanted, fused_attention=is_fused)
    return Question(
        model=shape, cluster=target, global_batch=batch, precision=wanted, strategies=names or Question.strategies, optimizer_bytes=state,
        fused_attention=is_fused, compiled=compiled or bool(resolved and resolved.compilation.what != "nothing"),
        measured=measured, anchor=anchor_of(found, target, catalogue) if found else None, input_samples_per_s=input_rate, rank_by=rank_by,
    )  # fmt: skip


def _cluster(
    text: str | None, here: bool, catalogue: Catalogue, *, address: str | None, network: str | None
) -> Cluster:
    if address is not None and not here:
        raise ConfigError("--address", address, "it says whose nodes --here reads", "add --here")
    if network is not None and address is None:
        raise ConfigError(
            "--network", network, "it is for --here with --address", "--cluster has net=, as in h100:8x16,net=8x400G"
        )
    if here and text is not None:
        raise ConfigError("--cluster", text, "it cannot be given with --here", "leave one of them out")
    if here:
        from scaleray.cli.plan_here import ray_cluster, this_machine

        return this_machine(catalogue) if address is None else ray_cluster(address, catalogue, network=network)
    if text is None:
        raise ConfigError(
            "--cluster", None, "a cluster must be named", "for example --cluster h100:8x16, or --here for this machine"
        )
    return read_cluster_file(Path(text), catalogue) if is_cluster_file(text) else parse_cluster(text, catalogue)


def _model(config: RunConfig | None, path: Path | None, overrides: Sequence[str], name: str | None, profile: Path | None, sequence: int | None) -> ModelProfile:  # fmt: skip
    if profile is not None:
        from scaleray.planner.counted import read_profile

        return read_profile(profile)
    if name is not None:
        return find_model(name, sequence=sequence)
    if config is None or path is None:
        raise ConfigError(
            "--model",
            None,
            "a model must be named",
            "for example --model llama-3-8b, or -c with a config whose workload is counted",
        )
    return _counted(config, path, overrides)


def _counted(config: RunConfig, path: Path, overrides: Sequence[str]) -> ModelProfile:
    """The workload's profile, counted once in a process of its own, which imports torch, and kept for the next time."""
    from scaleray.planner.counted import from_workload
    from scaleray.workload_profile import WorkloadProfile

    kept = _cache_folder() / f"{_fingerprint(config, path)}.json"
    if not kept.exists():
        command = [sys.executable, "-m", "scaleray.launch.count_workload", str(path), *overrides]
        try:
            done = subprocess.run(guarded(command), capture_output=True, text=True, timeout=COUNTING_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise UsageError(
                "counting the workload", f"longer than {COUNTING_LIMIT_S} s", "it must end", "name the model: --model"
            ) from None
        if done.returncode:
            last = done.stderr.strip().splitlines()
            raise UsageError(
                "counting the workload",
                config.workload.name,
                f"it failed: {last[-1] if last else done.returncode}",
                "name the model: --model",
            )
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(f".{os.getpid()}")
        partial.write_text(done.stdout)
        partial.replace(kept)
    return from_workload(WorkloadProfile.from_json(kept.read_text()), name=config.workload.name)


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "scaleray" / "profiles"


def _fingerprint(config: RunConfig, path: Path) -> str:
    """Of what the profile depends on: the workload's arguments, its file and neighbours, the precision, and how it is counted."""
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


def _batch_of(config: RunConfig | None, model: ModelProfile, num_gpus: int) -> int:
    """The config's, or a usual one: a multiple of the GPUs near USUAL_TOKENS, or USUAL_SAMPLES for each GPU."""
    if config is None:
        each = USUAL_TOKENS / model.tokens_per_sample / num_gpus if model.tokens_per_sample > 1 else USUAL_SAMPLES
        return max(1, round(each)) * num_gpus
    if config.batch.unit == "tokens":
        return max(1, config.batch.global_size // model.tokens_per_sample)
    return config.batch.global_size


def _precision_of(config: RunConfig | None) -> str | None:
    if config is None:
        return None
    return "tf32" if config.precision.tf32 else {"fp64": "fp32"}.get(config.precision.dtype, config.precision.dtype)
