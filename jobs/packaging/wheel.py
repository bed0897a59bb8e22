"""Build the wheel, install it beside this environment's libraries, and use it far from the checkout.

    python -m jobs.packaging.wheel      # `make wheel`: half a minute, no network

What the checkout has and the wheel lacks (a file of data, an import that only works from the root) shows here. The README's
workload is trained with the installed command, in a folder of its own. jobs/packaging/matrix.py installs it with its
dependencies, on every Python.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOT_IN_WHEELS = ("__pycache__",)
TRAINED = (
    "train",
    "-c",
    "iris.yaml",
    "--local",
    "--tracking.run-name",
    "iris",
    "--stop.after",
    "2 epochs",
    "--tracking.system-metrics",
    "false",
)
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("--version",),
    ("plan", "--model", "llama-3-8b", "--cluster", "h100:8x2", "--html", "plan.html", "--write", "best.yaml"),
    ("config", "schema", "--out", "config.schema.json"),
    TRAINED,
    ("report", "runs/iris"),
)
WRITTEN = ("plan.html", "best.yaml", "config.schema.json", "runs/iris/record.json", "runs/iris/report.html")


def build_wheel(folder: Path) -> Path:
    """The wheel, built from a copy: setuptools leaves folders behind, whose old files would come into the next one."""
    source = folder / "source"
    shutil.copytree(ROOT / "scaleray", source / "scaleray", ignore=shutil.ignore_patterns(*NOT_IN_WHEELS))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    # setuptools is that of this environment: no network is needed
    words = [
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        str(folder),
        str(source),
    ]
    pip(words)
    (wheel,) = folder.glob("scaleray-*.whl")
    return wheel


def lacks(wheel: Path) -> set[str]:
    """Files of the package that are not in the wheel."""
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "scaleray").rglob("*") if path.is_file()}
    files = {name for name in files if not any(part in NOT_IN_WHEELS for part in Path(name).parts)}
    with zipfile.ZipFile(wheel) as archive:
        return files - set(archive.namelist())


def install(wheel: Path, folder: Path) -> Path:
    """The folder of commands of a new environment that has the wheel, and sees the libraries of this one."""
    venv.create(folder, with_pip=False, symlinks=True)
    place = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", vars=place))
    # a plain folder on the path: editable installs in it, such as the checkout's own, have no effect from there
    (packages / "libraries.pth").write_text("\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))
    pip(["--python", str(folder / "bin" / "python"), "install", "--quiet", "--no-deps", "--no-index", str(wheel)])
    return folder / "bin"


def pip(words: Sequence[str]) -> None:
    """Run this environment's pip. Raises RuntimeError with what it said."""
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"pip {' '.join(words)} failed:\n{done.stdout}{done.stderr}")


def readme_block(name: str) -> str:
    """A file that the README shows."""
    found = re.search(
        rf"<!-- docs-test: {re.escape(name)} -->\n```(\w*)\n(.*?)```", (ROOT / "README.md").read_text(), re.S
    )
    assert found is not None, name
    kind, text = found.groups()
    return after(text, "+") if kind == "diff" else text


def after(difference: str, sign: str) -> str:
    """One side of a difference: its common lines, and those with the sign."""
    return "".join(line[1:] or line for line in difference.splitlines(keepends=True) if line[0] in (" ", "\n", sign))


def use(commands: Path, folder: Path, *, tracking_uri: str | None = None) -> None:
    """Run the installed command in a folder of its own. Raises RuntimeError for the first one that fails, and for a
    file that is not there afterwards."""
    folder.mkdir()
    for name in ("iris.py", "iris.yaml"):
        (folder / name).write_text(readme_block(name))
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["SCALERAY_CHECKPOINT__STORAGE_PATH"] = str(folder / "runs")
    environment["SCALERAY_TRACKING__URI"] = tracking_uri or f"sqlite:///{folder}/mlflow.db"
    where = "import scaleray, sys; sys.exit(scaleray.__file__.startswith(sys.prefix) is False)"
    for words in (
        [str(commands / "python"), "-c", where],
        *([str(commands / "scaleray"), *words] for words in COMMANDS),
    ):
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
            )
    if missing := [name for name in WRITTEN if not (folder / name).exists()]:
        raise RuntimeError(f"not written: {', '.join(missing)}")


def check(folder: Path, *, tracking_uri: str | None = None) -> Path:
    """Build, install and use the wheel below a folder, and return where it lies. Raises RuntimeError."""
    wheel = build_wheel(folder)
    if missing := lacks(wheel):
        raise RuntimeError(f"{wheel.name} lacks {', '.join(sorted(missing))}")
    use(install(wheel, folder / "environment"), folder / "elsewhere", tracking_uri=tracking_uri)
    return wheel


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        built = check(Path(temporary).resolve())
        out = ROOT / "build" / "wheel"
        out.mkdir(parents=True, exist_ok=True)
        print(f"{shutil.copy(built, out)}: {len(COMMANDS)} commands done outside the checkout")
