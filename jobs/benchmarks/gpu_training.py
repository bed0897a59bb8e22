"""How well one GPU is used: scaleray's loop against a hand-written one, language models of 124M and about 1B parameters.

Each measurement is a fresh process: bf16 autocast, torch.compile, torch's fused attention and fused AdamW on both sides.
NOT RUN YET on a GPU: written where there was none, and checked on the CPU with a model of toy size.

    python jobs/benchmarks/gpu_training.py                    # one NCCL worker through Ray Train
    python jobs/benchmarks/gpu_training.py --without-ray      # the same loop, on machines without Ray and MLflow
    python jobs/benchmarks/gpu_training.py --smoke            # does it run? a toy on the CPU, no report

Needs only the repository and, with --without-ray, torch, numpy, pyarrow, pydantic, pyyaml, psutil and xxhash. With
PYTHONPATH set to the repository nothing has to be installed. With a gap in the machine's time, --sizes and --variants
choose; a run that was cut short wrote its measurements so far to the progress on stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness

from scaleray.config.precision import PrecisionSettings
from scaleray.errors import UsageError
from scaleray.guarded import guarded
from scaleray.records.workload_profile import WorkloadProfile, mfu
from scaleray.workload import load_workload

TIMEOUT_S = 900.0
BASELINE = "plain"
SIDE = harness.REPOSITORY / "jobs" / "benchmarks" / "sides" / "on_one_gpu.py"
SHAPES = {"124m": (1024, 32), "1b": (2048, 8), "smoke": (32, 4)}
"""Tokens of a sequence, and sequences of a micro-batch, by size."""
RULES = """\
{parameters:,} parameters, {flops:.3g} FLOPs to train on a sequence of {length} tokens (forward and backward as counted by
torch's flop counter: attention in full although causal, nothing that is computed a second time), batches of {batch}
sequences in micro-batches of {micro}; {steps} steps, of which the first {warmup} are left out. Every measurement is a fresh
process; variants are in random order in each round (seed {seed}), {repeats} rounds. Median (smallest-largest); ratios are
taken in each round, to {baseline} in that round; those with checkpointing to the hand-written loop with checkpointing.
{peak}

- MFU: those FLOPs a second over the card's dense peak in bf16, in float8 rows too.
- memory: largest allocated by torch; with `--smoke` that of the process."""


@dataclass(frozen=True)
class Variant:
    """One way to run the same training."""

    side: str
    compiled: str = "model"
    is_checkpointed: bool = False
    is_sharded: bool = False
    float8: str = "none"
    baseline: str = BASELINE


VARIANTS = {
    "plain": Variant("plain"),
    "plain, blocks": Variant("plain", "blocks"),
    "plain, blocks, checkpointing": Variant("plain", "blocks", is_checkpointed=True, baseline="plain, blocks, checkpointing"),
    "scaleray": Variant("scaleray"),
    "scaleray, blocks": Variant("scaleray", "blocks"),
    "scaleray, blocks, checkpointing": Variant("scaleray", "blocks", is_checkpointed=True, baseline="plain, blocks, checkpointing"),
    "scaleray, blocks, fsdp": Variant("scaleray", "blocks", is_sharded=True),
    "scaleray, blocks, fsdp, checkpointing": Variant(
        "scaleray", "blocks", is_checkpointed=True, is_sharded=True, baseline="plain, blocks, checkpointing"
    ),
    "scaleray, blocks, float8": Variant("scaleray", "blocks", float8="tensorwise"),
}  # fmt: skip


def measure(name: str, size: str, arguments: argparse.Namespace) -> harness.Measurement:
    """Run one variant once; `not_run` with the reason where it fails."""
    variant = VARIANTS[name]
    uses_ray = variant.side == "scaleray" and not arguments.without_ray
    if uses_ray and variant.is_sharded:
        return {"not_run": "a single worker of a run is never sharded; --without-ray wraps it all the same"}
    length, micro = SHAPES[size]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        result, task_file = Path(folder) / "result.json", Path(folder) / "task.json"
        task = {
            "side": variant.side,
            "size": size,
            "sequence_length": length,
            "batch_size": micro * arguments.accumulation,
            "micro_batch_size": micro,
            "steps": arguments.steps,
            "warmup_steps": arguments.warmup_steps,
            "device": arguments.device,
            "compiled": variant.compiled if arguments.compile else "nothing",
            "is_checkpointed": variant.is_checkpointed,
            "is_sharded": variant.is_sharded,
            "float8": variant.float8,
            "uses_ray": uses_ray,
            "seed": arguments.seed,
            "result": str(result),
        }
        task_file.write_text(json.dumps(task))
        places = [harness.REPOSITORY, *(harness.REPOSITORY / "jobs" / name for name in ("", "benchmarks"))]
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, places), *filter(None, given)])}
        try:
            done = subprocess.run(
                guarded([sys.executable, str(SIDE), str(task_file)]),
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                env=environment,
                cwd=harness.REPOSITORY,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"not_run": f"not done after {TIMEOUT_S:.0f} s"}
        if done.returncode != 0 or not result.exists():
            harness.log(done.stderr[-4000:])
            lines = [line.strip() for line in done.stderr.splitlines() if "Error" in line] or ["it said nothing"]
            return {"not_run": f"exit code {done.returncode}: {lines[-1][:300]}"}
        figures: dict[str, Any] = json.loads(result.read_text())
    samples = (arguments.steps - arguments.warmup_steps) * task["batch_size"]
    return {
        **figures,
        "samples_per_s": samples / figures["time_s"],
        "tokens_per_s": samples * length / figures["time_s"],
    }


def counted(size: str) -> WorkloadProfile:
    """What a sequence costs this size, counted once."""
    from scaleray.training.model_profile import profile_workload

    length, _ = SHAPES[size]
    sys.path[:0] = [str(harness.REPOSITORY / "jobs")]
    name = f"{harness.REPOSITORY / 'jobs' / 'benchmarks' / 'gpu_workload.py'}:RandomTokens"
    workload = load_workload(name, {"size": size, "sequence_length": length, "num_rows": 4})
    rows = workload.datasets()["train"]
    import numpy as np

    return profile_workload(workload, rows.read(np.arange(2)), PrecisionSettings(dtype="bf16"))


def peak_flops_per_s(arguments: argparse.Namespace, gpu: str | None) -> tuple[float | None, str]:
    """The card's dense bf16 peak and where it is from; None where nobody knows it."""
    if arguments.peak_tflops is not None:
        return arguments.peak_tflops * 1e12, f"Peak: {arguments.peak_tflops:g} TFLOP/s, as given."
    if gpu is None:
        return None, "Peak: none is known for a CPU, so there is no MFU."
    from scaleray.planner.hardware.catalogue import find_gpu

    try:
        found = find_gpu(gpu)
    except UsageError as exc:
        return None, f"Peak: {exc} Give it with --peak-tflops."
    return found.peak_flops(
        "bf16"
    ), f"Peak: {found.peak_flops('bf16') / 1e12:g} TFLOP/s for {found.name} ({found.source})."


def gpu_facts() -> dict[str, Any]:
    """The card, its limits and the software on it."""
    import torch

    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(0)
    facts: dict[str, Any] = {
        "gpu": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }
    query = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
        facts["driver, power limit, clock"] = done.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        pass
    return facts


def describe(
    size: str,
    found: list[harness.Measurement],
    profile: WorkloadProfile,
    peak: tuple[float | None, str],
    arguments: argparse.Namespace,
) -> str:
    """The rules, the table and the verdict of one size."""
    rows, notes = [], []
    best: dict[str, float] = {}
    for name in arguments.variants:
        own = [m for m in found if m["side"] == name and "not_run" not in m]
        notes += sorted({f"- {name} not run: {m['not_run']}" for m in found if m["side"] == name and "not_run" in m})
        if not own:
            continue
        ratio = harness.ratios(found, "tokens_per_s", side=name, baselines=[VARIANTS[name].baseline])
        used = [m["mfu"] for m in own if m.get("mfu") is not None]
        if used:
            best[name] = harness.spread(used)["median"]
        rows.append(
            [
                name,
                harness.show([m["tokens_per_s"] for m in own]),
                harness.show(ratio, "{:.3f}"),
                harness.show([100 * share for share in used], "{:.1f}"),
                harness.show([m["peak_memory_bytes"] / 2**30 for m in own], "{:.1f}"),
            ]
        )
    length, micro = SHAPES[size]
    rules = RULES.format(
        parameters=profile.num_parameters,
        flops=profile.flops,
        length=length,
        batch=micro * arguments.accumulation,
        micro=micro,
        steps=arguments.steps,
        warmup=arguments.warmup_steps,
        seed=arguments.seed,
        repeats=arguments.repeats,
        baseline=BASELINE,
        peak=peak[1],
    )
    ours = {name: share for name, share in best.items() if name.startswith("scaleray") and "float8" not in name}
    if ours:
        top = max(ours, key=lambda name: ours[name])
        notes.append(f"- best of scaleray in bf16: {top}, {100 * ours[top]:.1f} % MFU")
    header = ["variant", "tokens/s", "ratio", "MFU, %", "memory, GiB"]
    return "\n\n".join([f"## {size}", rules, harness.table(header, rows), "\n".join(notes)]).rstrip()


def read_arguments() -> argparse.Namespace:
    """The command line; ends the program where it makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without-ray", action="store_true", help="scaleray's loop in the measuring process")
    parser.add_argument("--smoke", action="store_true", help="a toy on the CPU: 3 steps of each variant, uncompiled")
    parser.add_argument("--sizes", type=lambda text: text.split(","), default=["124m", "1b"], help="124m,1b")
    parser.add_argument(
        "--variants", type=lambda text: text.split(";"), default=list(VARIANTS), help=";".join(VARIANTS)
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup-steps", type=int, default=10, help="left out: compilation and the first allocations")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step")
    parser.add_argument(
        "--peak-tflops", type=float, help="dense bf16 peak of the card, if the planner does not know it"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="folder for the report")
    arguments = parser.parse_args()
    arguments.device, arguments.compile = "cuda", True
    if arguments.smoke:
        arguments.device, arguments.compile, arguments.sizes = "cpu", False, ["smoke"]
        arguments.repeats, arguments.steps, arguments.warmup_steps = 1, 3, 1
    if unknown := set(arguments.variants) - set(VARIANTS) | set(arguments.sizes) - set(SHAPES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if not 0 < arguments.warmup_steps < arguments.steps or arguments.repeats < 1 or arguments.accumulation < 1:
        parser.error("it needs at least one round, one step to leave out and one to measure")
    if not arguments.smoke and not gpu_facts():
        parser.error("no CUDA device here; --smoke shows on the CPU that everything runs")
    return arguments


def main() -> None:
    arguments = read_arguments()
    conditions, facts = harness.conditions(["torch", "ray", "triton", "torchao", "numpy"]), gpu_facts()
    peak = peak_flops_per_s(arguments, facts.get("gpu"))
    texts, found, profiles = [], [], {}
    for size in arguments.sizes:
        profile = profiles[size] = counted(size)
        own: list[harness.Measurement] = []
        for number, name in harness.interleaved(arguments.variants, repeats=arguments.repeats, seed=arguments.seed):
            measured = {"size": size, "round": number, "side": name, **measure(name, size, arguments)}
            if peak[0] is not None and "samples_per_s" in measured:
                measured["mfu"] = mfu(profile.flops * measured["samples_per_s"], time_s=1.0, peak_flops_per_s=peak[0])
            own.append(measured)
            harness.log(f"{size} round {number + 1}: {json.dumps(measured)}")
        texts.append(describe(size, own, profile, peak, arguments))
        found += own
    if arguments.smoke:
        print("\n\n".join([*texts, "A smoke run shows that everything runs; its times say nothing."]))
        if any("not_run" in m and "never sharded" not in m["not_run"] for m in found):
            sys.exit(1)
        return
    record = {
        "conditions": conditions,
        "gpu": facts,
        "profiles": {size: dataclasses.asdict(p) for size, p in profiles.items()},
        "arguments": harness.arguments_of(arguments),
        "measurements": found,
    }
    shown = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    name = "gpu_training-without-ray" if arguments.without_ray else "gpu_training"
    harness.write_report(
        name, title="One GPU", text="\n\n".join([shown, *texts]), record=record, folder=arguments.results
    )


if __name__ == "__main__":
    main()
