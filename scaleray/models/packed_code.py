"""The code of a packed model as a Python package of its own, so that no module of the same name takes its place.

A packed model's `code/` is imported as `scaleray_packed_<hash of its place and content>`. Absolute imports of its own
modules are rewritten to that package when a file is compiled, so that they never pass through sys.path, and two models
in one process have their own modules. Other imports must be of installed packages.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from scaleray.common.user_code import is_installed
from scaleray.errors import WorkloadError
from scaleray.records.statement import digests

PREFIX = "scaleray_packed_"
IN_A_SECOND_TRY = "scaleray_workload_"
"""Prefix of a workload file's module whose own name another module had, see `workload.py`."""


def packed_module(folder: Path, target: str) -> ModuleType:
    """Import one module of a packed model's code. target: `file.py` or `package.module`, relative to `folder`.

    Raises ImportError for a module that is not in the folder, or imports one that is neither there nor installed.
    """
    content = hashlib.sha256(f"{folder} {sorted(digests(folder).items())}".encode()).hexdigest()
    name = PREFIX + content[:16]
    if name not in sys.modules:
        _refuse_others(folder)
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    return importlib.import_module(f"{name}.{target.removesuffix('.py')}")


def installed_module(target: str) -> ModuleType:
    """Import a module of an installed package. Raises ImportError for one that is somewhere else."""
    module = importlib.import_module(target)
    if (file := getattr(module, "__file__", None)) is not None and not is_installed(file):
        raise ImportError(f"{target} is {file}, and not of an installed package as when the model was promoted")
    return module


def own_name(module: str, workload: Any) -> str:
    """Name of a module of the workload's code, as recorded when the model was packed, in this process."""
    package, name = type(workload).__module__.partition(".")[0], module.removeprefix(IN_A_SECOND_TRY)
    is_own = package.startswith(PREFIX) and name.partition(".")[0] in _own(Path(sys.modules[package].__path__[0]))
    return f"{package}.{name}" if is_own else module


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of packed models, in their folders alone."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(PREFIX):
            return None
        package = name.partition(".")[0]
        folder = Path(sys.modules[package].__path__[0]).resolve()
        found = PathFinder.find_spec(name, path)
        if found is None or found.origin is None:
            return found
        if type(found.loader) is not SourceFileLoader or folder not in Path(found.origin).resolve().parents:
            raise ImportError(f"{found.origin} is not Python code in {folder}")
        found.loader = _Loader(name, found.origin)
        return found


class _Loader(SourceFileLoader):
    """Compiles a module with its neighbours' imports rewritten. Reads and writes no bytecode: only the source has a
    hash in the statement."""

    def get_code(self, fullname: str) -> CodeType:
        package, path = fullname.partition(".")[0], Path(self.get_filename(fullname))
        folder = Path(sys.modules[package].__path__[0])
        tree = _Renamed(package, _own(folder) - {path.stem if path.parent == folder else ""}).visit(
            ast.parse(self.get_data(str(path)), filename=str(path))
        )
        code: CodeType = compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True)
        return code


class _Renamed(ast.NodeTransformer):
    """Imports of modules of a package, under the package's name. own: the first parts of their names."""

    def __init__(self, package: str, own: set[str]) -> None:
        self.package, self.own = package, own

    def _is_own(self, name: str) -> bool:
        return name.partition(".")[0] in self.own

    def visit_Import(self, node: ast.Import) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        for alias in node.names:
            first, is_own = alias.name.partition(".")[0], self._is_own(alias.name)
            name = f"{self.package}.{alias.name}" if is_own else alias.name
            if not is_own or alias.asname or "." in alias.name:
                made.append(ast.Import([ast.alias(name, alias.asname)]))
            if is_own and not alias.asname:
                made.append(ast.ImportFrom(self.package, [ast.alias(first)], 0))
        return [ast.copy_location(one, node) for one in made]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        if node.level == 0 and node.module and self._is_own(node.module):
            node.module = f"{self.package}.{node.module}"
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """`importlib.import_module("name")`."""
        self.generic_visit(node)
        called = getattr(node.func, "attr", getattr(node.func, "id", None))
        if called == "import_module" and node.args and isinstance(first := node.args[0], ast.Constant):
            name = first.value
            if isinstance(name, str) and self._is_own(name):
                node.args[0] = ast.copy_location(ast.Constant(f"{self.package}.{name}"), first)
        return node


def _own(folder: Path) -> set[str]:
    """First parts of the names of the modules in a folder; a file called as one of Python's own is none of them."""
    names = {path.stem for path in folder.iterdir() if path.is_dir() or path.suffix == ".py"}
    return names - set(sys.stdlib_module_names)


def _refuse_others(folder: Path) -> None:
    """Refuse code that imports what is neither in the folder nor installed: another machine has another one."""
    own = _own(folder)
    for file in sorted(folder.rglob("*.py")):
        for name in _imported(ast.parse(file.read_bytes(), filename=str(file))):
            if name in own or name in sys.stdlib_module_names:
                continue
            place = getattr(sys.modules.get(name), "__file__", None) or _origin(name)
            if place is not None and not is_installed(place):
                raise WorkloadError(
                    f"the import of {name} in {file.name}",
                    f"of {place}",
                    "a packed model has the modules in its own folder, and those of installed packages",
                    f"keep {name} in or below the folder of the workload's file, or install it",
                )


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def _origin(name: str) -> str | None:
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return found.origin if found is not None and found.has_location else None
