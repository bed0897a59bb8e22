"""The files of `cluster/` as tests read them: documents of YAML, their schemas, and the places of their keys."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

ROOT = Path(__file__).parents[3]
CLUSTER = ROOT / "cluster"
SCHEMAS = Path(__file__).parent / "schemas"


@functools.cache
def table_of_tests() -> Any:
    """The module that writes how each file was tested."""
    spec = importlib.util.spec_from_file_location("tested_files", ROOT / "docs" / "tested_files.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def validators() -> dict[str, jsonschema.Draft202012Validator]:
    """A validator for each kind of Kubernetes object that a schema is here for."""
    found = {}
    for path in SCHEMAS.glob("*.json"):
        if path.name != "skypilot.json":
            whole = json.loads(path.read_text())
            for kind in whole.keys() - {"$defs"}:
                found[kind] = jsonschema.Draft202012Validator({**whole[kind], "$defs": whole["$defs"]})
    return found


def schema_faults(document: dict[str, Any]) -> list[str]:
    """What the schema of a document's kind has against it."""
    validator = validators().get(str(document.get("kind")))
    if validator is None:
        return [f"there is no kind {document.get('kind')}"]
    return [f"{error.json_path}: {error.message[:200]}" for error in validator.iter_errors(document)]


def documents(path: Path) -> list[dict[str, Any]]:
    """The documents of a YAML file."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every key of a document."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        if isinstance(node, dict):
            yield (*path, key)
        yield from places(value, (*path, key))
