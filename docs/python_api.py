"""The page docs/api.md: every public name with its signature and docstring, read from the source, which is not imported."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from pathlib import Path

import scaleray
from scaleray.common.options import meanings_of

ORDER = (
    (
        "Run",
        (
            "train",
            "verify",
            "study",
            "sweep",
            "profile",
            "plan",
            "explain_plan",
            "check",
            "compare",
            "gate",
            "start_path",
            "next_on_path",
            "skip_on_path",
            "redo_on_path",
            "find_path",
            "promote",
            "check_promoted",
            "rollback",
            "experiment_curves",
            "invalidate_experiment",
            "report",
            "watch",
            "live_state",
            "submit",
            "list_jobs",
            "job_logs",
            "stop_job",
            "doctor",
            "load_config",
            "write_project",
        ),
    ),
    ("Use a run's model", ("load", "predict", "evaluate", "export_model")),
    (
        "Checkpoints",
        ("list_checkpoints", "verify_checkpoints", "prune_checkpoints", "rebuild_checkpoint", "import_weights"),
    ),
    ("Clusters", ("cluster_up", "cluster_status", "cluster_down", "write_cluster_files")),
    ("Configs, and MLflow", ("show_config", "config_keys", "config_schema", "replay", "tracking_ui")),
    ("Dashboards", ("write_dashboards", "install_dashboards")),
    ("What you bring", ("Workload", "Callback", "CarriedState", "ArraySource", "ParquetSource", "TokenSource")),
    ("What comes back", ("RunRecord",)),
    ("What can be raised", ("ScaleRayError", "ConfigError")),
)


def api_page(note: str) -> str:
    """The whole page. note: line that says where it comes from."""
    words = (
        "All names are in `scaleray` and load on first use: `import scaleray` imports neither torch nor Ray.\n\n"
        "`Config` is a RunConfig, a YAML file, or a mapping of dotted keys or sections. `Numbers` and `Words` are a text with commas or a sequence, a `File` is a path, `StepName` a number or a text, and `WorkloadLike` a class, an object or the name of a class."
    )
    lines = ["# From Python", "", note, "", words]
    for title, names in ORDER:
        lines += ["", f"## {title}"]
        for name in names:
            lines += ["", *_entry(name)]
    return "\n".join([*lines, ""])


def _entry(name: str) -> list[str]:
    node = _definition(scaleray._HOMES[name], name)
    text = inspect.cleandoc(ast.get_docstring(node) or "")
    if isinstance(node, ast.FunctionDef):
        options = _options(node, scaleray._HOMES[name])
        meanings = [item for one in options for item in meanings_of(ast.unparse(one)).items()]
        listed = ["", *(f"- `{field}`: {meaning}" for field, meaning in meanings)] if meanings else []
        return [f"### {name}", "", "```python", _signature(node, options), "```", "", text, *listed]
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    lines = [f"### {name}", "", f"`class {name}({bases})`" if bases else f"`class {name}`", "", text]
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_") and ast.get_docstring(method):
            first = inspect.cleandoc(ast.get_docstring(method) or "").split("\n\n")[0]
            arguments = ", ".join(a.arg for a in (*method.args.args[1:], *method.args.kwonlyargs))
            lines += ["", f"- `{method.name}({arguments})`: {' '.join(first.split())}"]
    return lines


def _options(node: ast.FunctionDef, module: str) -> list[ast.ClassDef]:
    """The dataclass whose fields the function takes as keyword arguments, by its decorator `takes`, after its bases."""
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "takes":
            return _with_bases(module, ast.unparse(decorator.args[0]))
    return []


def _with_bases(module: str, name: str) -> list[ast.ClassDef]:
    """A dataclass after its bases, which are defined next to it."""
    home, found = _home(module, name)
    assert isinstance(found, ast.ClassDef)
    return [*(one for base in found.bases for one in _with_bases(home, ast.unparse(base))), found]


def _definition(module: str, name: str) -> ast.FunctionDef | ast.ClassDef:
    """The definition of a name in a module, or in the module that this one imports it from."""
    return _home(module, name)[1]


def _home(module: str, name: str) -> tuple[str, ast.FunctionDef | ast.ClassDef]:
    """The module that defines a name, and the definition."""
    tree = ast.parse(_source(module))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            return _home(str(node.module), name)
    raise LookupError(f"{module} has no {name}")


def _source(module: str) -> str:
    parts = Path(scaleray.__file__).parent.joinpath(*module.split(".")[1:])
    return (parts / "__init__.py" if parts.is_dir() else parts.with_suffix(".py")).read_text()


def _signature(node: ast.FunctionDef, options: Sequence[ast.ClassDef] = ()) -> str:
    if options:
        fields = [field for one in options for field in one.body if isinstance(field, ast.AnnAssign)]
        own = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        kept = [(arg, default) for arg, default in own if arg.arg != "options"]
        taken = [(ast.arg(ast.unparse(field.target), _plain(field.annotation)), field.value) for field in fields]
        node.args.kwonlyargs, node.args.kw_defaults = map(list, zip(*taken, *kept, strict=True))
    plain = ast.parse(f"def {node.name}(): ...").body[0]
    assert isinstance(plain, ast.FunctionDef)
    plain.args, plain.returns = node.args, node.returns
    text = ast.unparse(plain).partition("\n")[0].removesuffix(":").removesuffix(" ...").removesuffix(":")
    if len(text) <= 100:
        return text
    head, _, rest = text.partition("(")
    body, _, tail = rest.rpartition(")")
    return "\n".join([f"{head}(", *(f"    {argument}," for argument in _split(body)), f"){tail}"])


def _plain(annotation: ast.expr) -> ast.expr:
    """The type of an annotation, without what only the command line reads."""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated":
        assert isinstance(annotation.slice, ast.Tuple)
        return annotation.slice.elts[0]
    return annotation


def _split(text: str) -> list[str]:
    """Arguments of a signature, cut at commas outside of brackets and quotes."""
    found, depth, quoted, last = [], 0, False, ""
    for character in text:
        quoted ^= character == "'"
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth and not quoted:
            found.append(last.strip())
            last = ""
        else:
            last += character
    return [*found, last.strip()]
