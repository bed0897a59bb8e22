"""The page docs/api.md: every public name with its signature and docstring, read from the source, which is not imported."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import scaleray

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
    ("What you bring", ("Workload", "Callback", "ArraySource", "ParquetSource", "TokenSource")),
    ("What comes back", ("RunRecord",)),
    ("What can be raised", ("ScaleRayError", "ConfigError")),
)


def api_page(note: str) -> str:
    """The whole page. note: line that says where it comes from."""
    words = "All names are in `scaleray` and load on first use: `import scaleray` imports neither torch nor Ray."
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
        return [f"### {name}", "", "```python", _signature(node), "```", "", text]
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    lines = [f"### {name}", "", f"`class {name}({bases})`" if bases else f"`class {name}`", "", text]
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_") and ast.get_docstring(method):
            first = inspect.cleandoc(ast.get_docstring(method) or "").split("\n\n")[0]
            arguments = ", ".join(a.arg for a in (*method.args.args[1:], *method.args.kwonlyargs))
            lines += ["", f"- `{method.name}({arguments})`: {' '.join(first.split())}"]
    return lines


def _definition(module: str, name: str) -> ast.FunctionDef | ast.ClassDef:
    """The definition of a name in a module, or in the module that this one imports it from."""
    tree = ast.parse(_source(module))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            return _definition(str(node.module), name)
    raise LookupError(f"{module} has no {name}")


def _source(module: str) -> str:
    parts = Path(scaleray.__file__).parent.joinpath(*module.split(".")[1:])
    return (parts / "__init__.py" if parts.is_dir() else parts.with_suffix(".py")).read_text()


def _signature(node: ast.FunctionDef) -> str:
    plain = ast.parse(f"def {node.name}(): ...").body[0]
    assert isinstance(plain, ast.FunctionDef)
    plain.args, plain.returns = node.args, node.returns
    text = ast.unparse(plain).partition("\n")[0].removesuffix(":").removesuffix(" ...").removesuffix(":")
    if len(text) <= 100:
        return text
    head, _, rest = text.partition("(")
    body, _, tail = rest.rpartition(")")
    return "\n".join([f"{head}(", *(f"    {argument}," for argument in _split(body)), f"){tail}"])


def _split(text: str) -> list[str]:
    """Arguments of a signature, cut at commas outside of brackets."""
    found, depth, last = [], 0, ""
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            found.append(last.strip())
            last = ""
        else:
            last += character
    return [*found, last.strip()]
