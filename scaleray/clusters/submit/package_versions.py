"""Check whether a cluster meets a job's requirements: versions, and packages that the user's code imports."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import json
import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PROBE = (
    "import importlib.metadata as m, json, platform; "
    "print('scaleray-probe', json.dumps({'python': platform.python_version(), "
    "'packages': {d.metadata['Name']: d.version for d in reversed([*m.distributions()]) if d.metadata['Name']}}))"
)
"""Program that reports a cluster's versions and imports only the standard library."""
SIGN = "scaleray-probe "
EXACT = ("ray",)
SAME_MINOR = ("torch",)


@dataclass(frozen=True)
class Versions:
    """Versions of Python and of packages, by normalised name, on one side."""

    python: str
    packages: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def here(cls) -> Versions:
        """Versions of this process."""
        return cls(platform.python_version(), normalised(_installed()))

    def to_text(self) -> str:
        """Text with the versions to compare."""
        named = [f"{name} {self.packages[name]}" for name in ("ray", "torch") if name in self.packages]
        return ", ".join([f"Python {self.python}", *named])


def versions_in(text: str) -> Versions | None:
    """Find the program's answer in printed output; None if it is missing."""
    lines = [line for line in text.splitlines() if line.startswith(SIGN)]
    if not lines:
        return None
    values = json.loads(lines[-1].removeprefix(SIGN))
    return Versions(str(values["python"]), normalised(values["packages"]))


@functools.cache
def _installed() -> dict[str, str]:
    """Installed packages. Of several with one name, the first counts, as in an import, since a user's package may hide
    the system's."""
    found = reversed([*importlib.metadata.distributions()])
    return {one.metadata["Name"]: one.version for one in found if one.metadata["Name"]}


@functools.cache
def _homes() -> Mapping[str, list[str]]:
    """Packages by module, which takes a CPU second to compute."""
    return importlib.metadata.packages_distributions()


def normalised(packages: Mapping[str, str]) -> dict[str, str]:
    """Packages by normalised name: lower case, with dashes."""
    return {name.lower().replace("_", "-").replace(".", "-"): version for name, version in packages.items()}


def differences(here: Versions, there: Versions) -> list[str]:
    """Differences with which the training would fail or change, one sentence each. An empty version is unknown."""
    found = []
    if there.python and _minor(here.python) != _minor(there.python):
        found.append(f"Python is {there.python} there and {here.python} here")
    for name in (*EXACT, *SAME_MINOR):
        mine, its = (side.packages.get(name, "") for side in (here, there))
        if not mine or not its:
            continue
        cut = _public if name in EXACT else _minor
        if cut(mine) != cut(its):
            found.append(f"{name} is {its} there and {mine} here")
    return found


def missing_packages(needed: Iterable[str], here: Versions, there: Versions) -> dict[str, str]:
    """Needed packages that are missing there, with the version to install."""
    return {
        name: _public(here.packages[name])
        for name in sorted({*needed})
        if name in here.packages and name not in there.packages
    }


def imported_packages(start: Path, folder: Path) -> set[str]:
    """Packages that a Python file and the user's modules behind it import, by normalised name. folder: where these
    modules are, besides the file's own folder.
    """
    homes = _homes()
    found: set[str] = set()
    waiting, seen = [start], {start}
    while waiting:
        path = waiting.pop()
        for module in _imports(path):
            own = [place for base in (path.parent, folder) if (place := _module_in(base, module)) is not None]
            waiting += [place for place in own if place not in seen]
            seen |= set(own)
            top = module.partition(".")[0]
            if not own and top not in sys.stdlib_module_names:
                found |= normalised(dict.fromkeys(homes.get(top, ()), "")).keys()
    return found


def _module_in(base: Path, module: str) -> Path | None:
    """File of a module in a folder, or of the package that contains it."""
    parts = module.split(".")
    for count in range(len(parts), 0, -1):
        path = base.joinpath(*parts[:count])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


def _imports(path: Path) -> set[str]:
    """Full names of the modules imported by a file; empty if it is not Python."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):  # relative import
            found |= {alias.name if node.module is None else node.module for alias in node.names}
    return found


def _minor(version: str) -> str:
    return ".".join(_public(version).split(".")[:2])


def _public(version: str) -> str:
    return version.partition("+")[0]
