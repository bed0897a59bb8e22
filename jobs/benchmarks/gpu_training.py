"""The whole check of a GPU, in 20 minutes: is it the same training there, does the host wait, and how fast is it?

Parts, in this order, each in processes of its own: the CPU's float64 certificate repeated on the device; reads of the
device by the host within a step; overlap and memory; checkpoints (see `gpu_checks.py`); then speed, scaleray's loop
against a hand-written one with language models of 124M and about 1B parameters: bf16 autocast, torch.compile, torch's
fused attention and fused AdamW on both sides. With several GPUs the first three use two of them.
NOT RUN YET on a GPU: written where there was none, and checked on the CPU with a model of toy size.

    python jobs/benchmarks/gpu_training.py                        # everything, as far as the minutes last
    python jobs/benchmarks/gpu_training.py --parts speed --all-variants --minutes 120
    python jobs/benchmarks/gpu_training.py --with-ray             # speed through Ray Train and MLflow
    python jobs/benchmarks/gpu_training.py --device cpu --quick   # does it run? a toy on the CPU, no report

Without --with-ray it needs only the repository and torch, numpy, pyarrow, pydantic, pyyaml, psutil and xxhash, neither
Ray nor MLflow. With PYTHONPATH set to the repository nothing has to be installed. A run that was cut short wrote what it
found so far to the progress on stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness

from scaleray.common.guarded import guarded
from scaleray.config.precision import PrecisionSettings
from scaleray.errors import UsageError
from scaleray.records.workload_profile import WorkloadProfile, mfu
from scaleray.workload import load_workload

sys.path.append(str(harness.REPOSITORY / "jobs"))  # the reference workloads

import gpu_checks

TIMEOUT_S = 900.0
BASELINE = "plain"
SIDE = harness.REPOSITORY / "jobs" / "benchmarks" / "sides" / "on_one_gpu.py"
CHECKS = harness.REPOSITORY / "jobs" / "benchmarks" / "gpu_checks.py"
SPEED = "speed"
PARTS = (*gpu_checks.PARTS, SPEED)
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
- memory: largest allocated by torch; on the CPU that of the process."""


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
USUAL = ["plain", "scaleray", "plain, blocks, checkpointing", "scaleray, blocks, checkpointing"]
"""Variants that are measured unless others are asked for."""


def environment() -> dict[str, str]:
    """Variables under which a process finds the repository's own modules first."""
    places = [harness.REPOSITORY, *(harness.REPOSITORY / "jobs" / name for name in ("", "benchmarks"))]
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, places), *filter(None, given)])}


def check(part: str, arguments: argparse.Namespace, *, workers: int, timeout_s: float) -> dict[str, Any]:
    """Run a part in processes of its own; `not_run` with the reason where it fails."""
    workers = 1 if part in gpu_checks.ALONE else workers
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        task = gpu_checks.Task(
            part=part,
            device=arguments.device,
            is_quick=arguments.quick,
            workers=workers,
            meeting=str(Path(folder) / "meeting"),
            result=str(Path(folder) / "result.json"),
        )
        task_file = Path(folder) / "task.json"
        task_file.write_text(json.dumps(dataclasses.asdict(task)))
        processes = []
        for rank in range(workers):
            command = guarded([sys.executable, str(CHECKS), str(task_file), str(rank)])
            with open(Path(folder) / f"{rank}.log", "w") as log:
                processes.append(
                    subprocess.Popen(command, stdout=log, stderr=log, env=environment(), cwd=harness.REPOSITORY)
                )
        ends_at = time.monotonic() + timeout_s
        while any(process.poll() is None for process in processes) and time.monotonic() < ends_at:
            if any(process.poll() not in (None, 0) for process in processes):
                break  # the others would wait for it
            time.sleep(0.2)
        codes = [process.poll() for process in processes]
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
        if Path(task.result).exists():
            found: dict[str, Any] = json.loads(Path(task.result).read_text())
            return found
        texts = [(Path(folder) / f"{rank}.log").read_text() for rank in range(workers)]
        harness.log("\n".join(texts)[-4000:])
        if all(code in (None, 0) for code in codes):
            return {"not_run": f"not done after {timeout_s:.0f} s"}
        return {"not_run": f"exit codes {codes}: {last_error(texts[0]) or last_error(texts[-1]) or 'it said nothing'}"}


def last_error(text: str) -> str:
    """The last line that names an error, or an empty one."""
    return next((line.strip()[:300] for line in reversed(text.splitlines()) if "Error" in line), "")


def measure(name: str, size: str, arguments: argparse.Namespace) -> harness.Measurement:
    """Run one variant once; `not_run` with the reason where it fails."""
    variant = VARIANTS[name]
    uses_ray = variant.side == "scaleray" and arguments.with_ray
    if uses_ray and variant.is_sharded:
        return {"not_run": "skipped: a single worker of a run is never sharded; without --with-ray it is wrapped"}
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
        try:
            done = subprocess.run(
                guarded([sys.executable, str(SIDE), str(task_file)]),
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                env=environment(),
                cwd=harness.REPOSITORY,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"not_run": f"not done after {TIMEOUT_S:.0f} s"}
        if done.returncode != 0 or not result.exists():
            harness.log(done.stderr[-4000:])
            return {"not_run": f"exit code {done.returncode}: {last_error(done.stderr) or 'it said nothing'}"}
        figures: dict[str, Any] = json.loads(result.read_text())
    samples = (arguments.steps - arguments.warmup_steps) * task["batch_size"]
    return {
        **figures,
        "samples_per_s": samples / figures["time_s"],
        "tokens_per_s": samples * length / figures["time_s"],
    }


def counted(size: str) -> WorkloadProfile:
    """What a sequence costs this size, counted once."""
    from scaleray.training.flop_counter import profile_workload

    length, _ = SHAPES[size]
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
    from scaleray.config.hardware.catalogue import find_gpu

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


def speed(size: str, arguments: argparse.Namespace, peak: tuple[float | None, str], *, ends_at: float) -> Any:
    """(profile, measurements) of one size. What would end after `ends_at`, as far as one can tell, is left out."""
    profile = counted(size)
    own: list[harness.Measurement] = []
    longest_s = 0.0
    for number, name in harness.interleaved(arguments.variants, repeats=arguments.repeats, seed=arguments.seed):
        started = time.monotonic()
        if started + longest_s > ends_at:
            measured: harness.Measurement = {"not_run": "skipped in a round: the minutes were over"}
        else:
            measured = measure(name, size, arguments)
        longest_s = max(longest_s, time.monotonic() - started)
        if peak[0] is not None and "samples_per_s" in measured:
            measured["mfu"] = mfu(profile.flops * measured["samples_per_s"], time_s=1.0, peak_flops_per_s=peak[0])
        own.append({"size": size, "round": number, "side": name, **measured})
        harness.log(f"{size} round {number + 1}: {json.dumps(own[-1])}")
    return profile, own


def read_arguments() -> argparse.Namespace:
    """The command line; ends the program where it makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = lambda text: text.split(",")
    parser.add_argument("--parts", type=words, default=list(PARTS), help=",".join(PARTS))
    parser.add_argument("--minutes", type=float, default=20.0, help="no measurement begins that would last longer")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="models of toy size, few steps, nothing compiled")
    parser.add_argument("--with-ray", action="store_true", help="speed: scaleray's side through Ray Train and MLflow")
    parser.add_argument("--sizes", type=words, default=["1b", "124m"], help="1b,124m")
    parser.add_argument("--variants", type=lambda text: text.split(";"), default=USUAL, help=";".join(VARIANTS))
    parser.add_argument("--all-variants", action="store_true")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup-steps", type=int, default=10, help="left out: compilation and the first allocations")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step")
    parser.add_argument(
        "--peak-tflops", type=float, help="dense bf16 peak of the card, if the planner does not know it"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="folder for the report")
    arguments = parser.parse_args()
    arguments.compile = not arguments.quick
    if arguments.all_variants:
        arguments.variants = list(VARIANTS)
    if arguments.quick:
        arguments.sizes, arguments.repeats, arguments.steps, arguments.warmup_steps = ["smoke"], 1, 3, 1
    unknown = (
        set(arguments.variants) - set(VARIANTS) | set(arguments.sizes) - set(SHAPES) | set(arguments.parts) - {*PARTS}
    )
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if not 0 < arguments.warmup_steps < arguments.steps or arguments.repeats < 1 or arguments.accumulation < 1:
        parser.error("it needs at least one round, one step to leave out and one to measure")
    if arguments.device == "cuda" and not gpu_facts():
        parser.error("no CUDA device here; --device cpu --quick shows that everything runs")
    return arguments


def main() -> None:
    import torch

    arguments = read_arguments()
    ends_at = time.monotonic() + 60 * arguments.minutes
    conditions, facts = harness.conditions(["torch", "ray", "triton", "torchao", "numpy"]), gpu_facts()
    peak = peak_flops_per_s(arguments, facts.get("gpu"))
    workers = 2 if arguments.device == "cpu" else min(2, torch.cuda.device_count())
    texts, checks, found, profiles = [], {}, [], {}
    for part in (name for name in PARTS if name in arguments.parts and name != SPEED):
        harness.log(f"{part} ...")
        checks[part] = check(part, arguments, workers=workers, timeout_s=max(60.0, (ends_at - time.monotonic()) / 2))
        told = checks[part].get("not_run")
        texts.append(f"## {part}\n\n" + (f"not run: {told}" if told else gpu_checks.describe(part, checks[part])))
        harness.log(texts[-1])
    for size in arguments.sizes if SPEED in arguments.parts else []:
        profiles[size], own = speed(size, arguments, peak, ends_at=ends_at)
        texts.append(describe(size, own, profiles[size], peak, arguments))
        found += own
    if arguments.device == "cpu":
        print("\n\n".join([*texts, "On the CPU it shows that everything runs; its times say nothing."]))
        everything = [*found, *checks.values(), *checks.get("reads", {}).get("settings", {}).values()]
        if any("not_run" in m and not m["not_run"].startswith("skipped") for m in everything):
            sys.exit(1)
        return
    record = {
        "conditions": conditions,
        "gpu": facts,
        "profiles": {size: dataclasses.asdict(p) for size, p in profiles.items()},
        "arguments": harness.arguments_of(arguments),
        "checks": checks,
        "measurements": found,
    }
    shown = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    name = "gpu_training-with-ray" if arguments.with_ray else "gpu_training"
    harness.write_report(
        name, title="One GPU", text="\n\n".join([shown, *texts]), record=record, folder=arguments.results
    )


if __name__ == "__main__":
    main()
