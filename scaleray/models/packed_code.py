"""Code of a packed model as a separate Python package, which no module of the same name can shadow.

A packed model's `code/` is imported as `scaleray_packed_<hash of its path and content>`. Absolute imports of its own
modules are rewritten to that package when a file is compiled, so that they never use sys.path, and two models in one
process have separate modules. `importlib` and `__import__` are replaced by `Imports`. All other imports must be of
installed packages."""

import ast
import builtins
import hashlib
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from scaleray.common.user_code import is_installed
from scaleray.errors import WorkloadError
from scaleray.records.statement import digests

PREFIX = "scaleray_packed_"
IMPORTS = "__scaleray_imports__"
"""Name of a module's `Imports` among its globals, so that pickled functions take it to other processes."""
IN_A_SECOND_TRY = "scaleray_workload_"
"""Prefix for the module of a workload's file if the file's own name was taken, see `workload.py`."""


def packed_module(folder: Path, target: str) -> ModuleType:
    """Import one module of a packed model's code. target: `file.py` or `package.module`, relative to `folder`.

    Raises ImportError for a module that is not in the folder, or that imports modules neither in it nor installed."""
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
    """Import a module of an installed package. Raises ImportError if it is somewhere else."""
    if (location := _outside(target.partition(".")[0])) is not None:
        raise ImportError(f"{target} is in {location}, but was in an installed package when the model was promoted")
    return importlib.import_module(target)


def own_name(module: str, workload: Any) -> str:
    """Name in this process of a module of the workload's code, given its name when the model was packed."""
    package, name = type(workload).__module__.partition(".")[0], module.removeprefix(IN_A_SECOND_TRY)
    is_own = package.startswith(PREFIX) and name.partition(".")[0] in _own(Path(sys.modules[package].__path__[0]))
    return f"{package}.{name}" if is_own else module


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of packed models, only in their folders."""

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


class Imports:
    """`importlib` for a packed model's code: imports the model's own modules and those of installed packages."""

    def __init__(self, package: str, own: set[str]) -> None:
        self.package, self.own = package, own

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib, name)

    def __reduce__(self) -> Any:
        return Imports, (self.package, self.own)

    def import_module(self, name: str, package: str | None = None) -> ModuleType:
        """Import a module like `importlib.import_module`. Raises ImportError for a module from elsewhere."""
        name = importlib.util.resolve_name(name, package)
        return importlib.import_module(self._resolved(name))

    def __import__(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        resolved = name if level else self._resolved(name)
        found = builtins.__import__(resolved, globals, locals, fromlist or (), level)
        return found if resolved == name or fromlist else sys.modules[f"{self.package}.{name.partition('.')[0]}"]

    def _resolved(self, name: str) -> str:
        first = name.partition(".")[0]
        if first in self.own:
            return f"{self.package}.{name}"
        if (location := _outside(first)) is not None:
            raise ImportError(f"{name} is from {location}, not from the packed model or an installed package")
        return name


class _Loader(SourceFileLoader):
    """Compiles a module with its neighbours' imports rewritten. Does not read or write bytecode: only the source has a
    hash in the statement."""

    def _imports(self, fullname: str) -> Imports:
        package, path = fullname.partition(".")[0], Path(self.get_filename(fullname))
        folder = Path(sys.modules[package].__path__[0])
        return Imports(package, _own(folder) - {path.stem if path.parent == folder else ""})

    def exec_module(self, module: ModuleType) -> None:
        imports = self._imports(module.__name__)
        vars(module).update({IMPORTS: imports, "__import__": imports.__import__})
        super().exec_module(module)

    def get_code(self, fullname: str) -> CodeType:
        path, imports = Path(self.get_filename(fullname)), self._imports(fullname)
        tree = _Renamed(imports).visit(ast.parse(self.get_data(str(path)), filename=str(path)))
        code: CodeType = compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True)
        return code


class _Renamed(ast.NodeTransformer):
    """Rewrites imports of a packed model's modules to its package's name, and importlib to its `Imports`."""

    def __init__(self, imports: Imports) -> None:
        self.package, self.own = imports.package, imports.own

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
            if alias.name == "importlib" or (first == "importlib" and not alias.asname):
                made.append(_assigned(alias.asname or first))
        return [ast.copy_location(one, node) for one in made]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> list[ast.stmt]:
        made: list[ast.stmt] = [node]
        if node.level == 0 and node.module and self._is_own(node.module):
            node.module = f"{self.package}.{node.module}"
        elif node.level == 0 and node.module == "importlib":
            for name in ("import_module", "__import__"):
                names = [alias.asname or name for alias in node.names if alias.name in (name, "*")]
                made += [ast.copy_location(_assigned(one, name), node) for one in names]
        return made


def _assigned(name: str, attribute: str | None = None) -> ast.stmt:
    """Statement that assigns the module's `Imports`, or an attribute of it, to a name."""
    return ast.parse(f"{name} = {IMPORTS}{f'.{attribute}' if attribute else ''}").body[0]


def _own(folder: Path) -> set[str]:
    """Top-level names of the modules in a folder, except files named like Python's own modules."""
    names = {path.stem for path in folder.iterdir() if path.is_dir() or path.suffix == ".py"}
    return names - set(sys.stdlib_module_names)


def _refuse_others(folder: Path) -> None:
    """Refuse imports of modules that are neither in the folder nor installed, since another machine lacks them."""
    own = _own(folder)
    for file in sorted(folder.rglob("*.py")):
        for name in _imported(ast.parse(file.read_bytes(), filename=str(file))):
            if name not in own and (location := _outside(name)) is not None:
                raise WorkloadError.problem(
                    f"the import of {name} in {file.name}",
                    f"leads to {location}: a packed model includes only modules in its folder and installed packages",
                    f"move {name} into the folder of the workload's file, or install it",
                )


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def _outside(name: str) -> str | None:
    """Location of a top-level module outside installed packages, or None."""
    if name in sys.stdlib_module_names or name.startswith(PREFIX):
        return None
    if (file := getattr(sys.modules.get(name), "__file__", None)) is not None:
        return None if is_installed(file) else str(file)
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if found is None:
        return None
    locations = [found.origin] if found.has_location else list(found.submodule_search_locations or ())
    return next((str(location) for location in locations if location is not None and not is_installed(location)), None)
