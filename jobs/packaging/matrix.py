"""Install the wheel on every Python that it says it runs on, and use what each installation has.

    python -m jobs.packaging.matrix                          # every python3.11, 3.12, 3.13 that is on the PATH
    python -m jobs.packaging.matrix --pythons 3.13 --extras train,lightning
    python -m jobs.packaging.matrix --resolve-only           # which versions pip would take, and whether there are any

For each Python: the base alone with `scaleray plan`, and the message of `scaleray train`; then the extras with a training on two
workers of a Ray of its own. For a Python that is not here pip only resolves. One line of Markdown a case. Needs the network, and
2 GiB of disk for each.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from jobs.packaging.wheel import ROOT, build_wheel, readme_block

CONSTRAINTS = ROOT / "constraints.txt"
VERSIONS = "3.11,3.12,3.13"
SHOWN = ("torch", "ray", "mlflow", "numpy", "transformers", "peft", "lightning", "torchvision", "timm", "torchmetrics")
PLAN = ("plan", "--model", "gpt2", "--cluster", "h100:8x2")
TRAIN = ("train", "-c", "iris.yaml", "--scale.workers", "2", "--stop.after", "2 epochs", "--tracking.run-name", "iris")


class Failed(Exception):
    """A step of a case that did not do what it should."""


def run(words: list[str], *, folder: Path, expected: int = 0) -> str:
    """What a command says. Raises Failed unless it ends with the expected code."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["SCALERAY_CHECKPOINT__STORAGE_PATH"] = str(folder / "runs")
    environment["SCALERAY_TRACKING__URI"] = f"sqlite:///{folder}/mlflow.db"
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode != expected:
        raise Failed(f"`{' '.join(words)}` ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
    return done.stdout + done.stderr


def resolved(wheel: Path, extras: str, version: str, folder: Path, *, constrained: bool) -> str:
    """The versions that pip would install for a Python, on this platform. Raises Failed where there are none."""
    report = folder / f"resolved-{version}.json"
    words = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--quiet",
        "--report",
        str(report),
    ]
    words += ["--python-version", version, "--only-binary=:all:", "--target", str(folder / "nowhere")]
    words += ["--constraint", str(CONSTRAINTS)] if constrained else []
    run([*words, f"{wheel}[{extras}]"], folder=folder)
    found = {
        one["metadata"]["name"].lower(): one["metadata"]["version"] for one in json.loads(report.read_text())["install"]
    }
    return ", ".join(f"{name} {found[name]}" for name in SHOWN if name in found)


def installed(wheel: Path, extras: str, python: str, folder: Path, *, constrained: bool) -> str:
    """Install the base and use it, then the extras and train with them; gives the versions. Raises Failed."""
    environment = folder / "environment"
    run([python, "-m", "venv", str(environment)], folder=folder)
    commands = environment / "bin"
    pip = [str(commands / "python"), "-m", "pip", "install", "--quiet"]
    pip += ["--constraint", str(CONSTRAINTS)] if constrained else []
    for name in ("iris.py", "iris.yaml"):
        (folder / name).write_text(readme_block(name))
    scaleray = str(commands / "scaleray")
    run([*pip, str(wheel)], folder=folder)
    run([scaleray, *PLAN], folder=folder)
    said = run([scaleray, *TRAIN], folder=folder, expected=2)
    if "[train]'" not in said:
        raise Failed(f"without its libraries, train says: {said}")
    if extras:
        run([*pip, f"{wheel}[{extras}]"], folder=folder)
        run([*pip, "scikit-learn"], folder=folder)  # the README's workload has its data from there
        run([str(commands / "python"), "-m", "pip", "check"], folder=folder)
        run([scaleray, *TRAIN], folder=folder)
    listed = json.loads(run([str(commands / "python"), "-m", "pip", "list", "--format", "json"], folder=folder))
    found = {one["name"].lower(): one["version"] for one in listed}
    return ", ".join(f"{name} {found[name]}" for name in SHOWN if name in found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pythons", default=VERSIONS, help="versions with commas")
    parser.add_argument("--extras", default="train", help="with commas; 'all' for every one but dev")
    parser.add_argument("--resolve-only", action="store_true", help="install nothing")
    parser.add_argument(
        "--newest", action="store_true", help="the newest versions that fit, not those of constraints.txt"
    )
    options = parser.parse_args()
    extras = options.extras
    if extras == "all":
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        extras = ",".join(name for name in known if name != "dev")
    failures = 0
    print("| Python | what was done | outcome | seconds |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        wheel = build_wheel(Path(temporary))
        for version in options.pythons.split(","):
            folder = Path(temporary, version)
            folder.mkdir()
            python = None if options.resolve_only else shutil.which(f"python{version}")
            start = time.monotonic()
            try:
                if python is None:
                    done = "resolved"
                    outcome = resolved(wheel, extras, version, folder, constrained=not options.newest)
                else:
                    done = "installed and used"
                    outcome = installed(wheel, extras, python, folder, constrained=not options.newest)
            except Failed as exc:
                outcome, failures = f"failed: {exc}", failures + 1
            print(f"| {version} | {done}: base, {extras} | {outcome} | {time.monotonic() - start:.0f} |", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
