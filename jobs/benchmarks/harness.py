"""What the two benchmarks share: rounds in random order, the facts of the machine, ratios, and the written report."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"

Measurement = dict[str, Any]
"""What one side measured in one round: its `side`, its `round`, and figures by name."""


def interleaved(sides: Sequence[str], *, repeats: int, seed: int) -> Iterator[tuple[int, str]]:
    """(round, side): every side once a round, in a new random order, so that drift of the machine hits all alike."""
    rng = random.Random(seed)
    for number in range(repeats):
        yield from ((number, side) for side in rng.sample(list(sides), len(sides)))


def start_ray(*, num_cpus: int, object_store_bytes: int = 2**29, include_dashboard: bool | None = None) -> None:
    """A Ray cluster of this process alone, ended by `ray.shutdown()`; others on the machine do not disturb it."""
    import ray

    # without RAY_ADDRESS in the workers, Ray Train's cleaner may look at another cluster and remove our placement group
    port = str(free_port())
    address = f"{ray.util.get_node_ip_address()}:{port}"
    os.environ["RAY_GCS_SERVER_PORT"] = port
    ray.init(
        address="local",
        num_cpus=num_cpus,
        object_store_memory=object_store_bytes,
        include_dashboard=include_dashboard,
        log_to_driver=False,
        logging_level="warning",
        runtime_env={"env_vars": {"RAY_ADDRESS": address}},
    )


def ray_environment(folder: str) -> dict[str, str]:
    """Variables to set before `import ray`: a folder of its own (a short path), no token, no usage report."""
    return {
        "RAY_TMPDIR": folder,
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    }


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


def conditions(packages: Sequence[str]) -> dict[str, Any]:
    """Date, hardware, commit and versions: what a figure needs beside it."""
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "hardware": _hardware(),
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain")),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
        "load_before": os.getloadavg()[0],
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratios(measurements: Sequence[Measurement], key: str, *, side: str, baselines: Sequence[str]) -> list[float]:
    """`key` of `side` over the largest `key` of the baselines, round by round; rounds that lack one are left out."""
    by_round: dict[int, dict[str, float]] = {}
    for m in measurements:
        if m.get(key) is not None:
            by_round.setdefault(m["round"], {})[m["side"]] = m[key]
    return [
        found[side] / max(found[b] for b in baselines if b in found)
        for found in by_round.values()
        if side in found and any(b in found for b in baselines)
    ]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows]]
    return "\n".join(f"| {line} |" for line in [lines[0], "-|-".join("-" * width for width in widths), *lines[1:]])


def show(values: Sequence[float | None], pattern: str = "{:.0f}") -> str:
    """`median (min-max)` of the values that were measured."""
    known = [v for v in values if v is not None]
    if not known:
        return "-"
    s = {name: pattern.format(value) for name, value in spread(known).items()}
    return s["median"] if len(known) == 1 else f"{s['median']} ({s['min']}-{s['max']})"


def arguments_of(given: argparse.Namespace) -> dict[str, str]:
    """What a benchmark was asked for, without the folders that only this machine has."""
    return {name: str(value) for name, value in vars(given).items() if not isinstance(value, Path)}


def write_report(name: str, *, title: str, text: str, record: dict[str, Any], folder: Path) -> Path:
    """Write `<name>-<date>.json` with every measurement and a readable .md beside it; give back the .md."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{name}-{datetime.now():%Y-%m-%d}"
    stem.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n")
    known, machine = record["conditions"], record["conditions"]["hardware"]
    facts = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}",
        f"commit {known['commit'][:12]}{' with uncommitted changes' if known['dirty'] else ''}, {known['date']}",
        ", ".join(f"{package} {version}" for package, version in known["versions"].items()),
        f"load average before the start: {known['load_before']:.2f}",
    ]
    report = "\n".join([f"# {title}", "", *(f"- {fact}" for fact in facts), "", text, ""])
    stem.with_suffix(".md").write_text(report)
    print(report)
    return stem.with_suffix(".md")


def _hardware() -> dict[str, Any]:
    import psutil

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    return {
        "cpu": model,
        "cores": psutil.cpu_count(logical=True),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def log(text: str) -> None:
    """Progress goes to stderr, so that stdout is the report alone."""
    print(text, file=sys.stderr, flush=True)
