"""Write a working project: a workload, its config and its test, from templates that run on sample data."""

from __future__ import annotations

import importlib.util
import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import yaml

from scaleray.errors import UsageError

SAMPLE = "null"


@dataclass(frozen=True)
class Kind:
    """Type of project. file: name of its files. words: description, for the question. extra: of the installation that
    it needs. metric, better: what its test requires on the sample data."""

    file: str
    words: str
    class_name: str
    metric: str
    better: str
    extra: str | None = None


KINDS = {
    "table": Kind("table", "rows of numbers in a CSV file, sorted into classes", "Table", "accuracy", ">= 0.9"),
    "text": Kind("text_model", "a language model in plain torch, on text files", "Text", "bits_per_byte", "<= 4.5"),
    "images": Kind("image_classes", "folders of images, sorted into classes", "Images", "accuracy", ">= 0.8"),
    "lightning": Kind("lit_digits", "your own LightningModule", "digits", "accuracy", ">= 0.8", "lightning"),
    "hf": Kind("language", "a causal language model of transformers", "Language", "loss", "<= 4.5", "hugging-face"),
}


def write_project(
    kind: str,
    out: str | Path,
    *,
    name: str | None = None,
    data: str | None = None,
    workers: int = 1,
    values: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Write a project that trains without changes, and return its files: the workload, its config and its test.

    kind: table, text, images, lightning or hf. out: folder; existing files in it are never overwritten. name: of the
    files; None: a suitable one. data: your own, as described in the workload's docstring; None: sample data from a
    package. workers: number of workers. values: replacements for the template's config, by key. Raises UsageError.
    """
    if kind not in KINDS:
        raise UsageError("--from", kind, f"it must be one of {', '.join(KINDS)}")
    file = name or KINDS[kind].file
    if not re.fullmatch(r"[a-z_][a-z0-9_]*", file) or keyword.iskeyword(file):
        raise UsageError("--name", file, "it must be the name of a Python module: lower-case letters, digits and _")
    if name is not None and importlib.util.find_spec(file) is not None:
        raise UsageError(
            "--name", file, "an installed module has this name and would be imported instead", "choose another name"
        )
    if workers < 1:
        raise UsageError("--workers", workers, "it must be at least 1")
    folder, about = Path(out).expanduser().absolute(), KINDS[kind]
    words = {
        "file": file,
        "class_name": about.class_name,
        "data": SAMPLE if data is None else _quoted(data),
        "workers": str(workers),
        "metric": about.metric,
        "better": about.better,
    }
    templates = resources.files("scaleray.cli.projects") / "templates"
    texts = {
        folder / f"{file}.py": templates / kind / "workload.py.in",
        folder / f"{file}.yaml": templates / kind / "config.yaml.in",
        folder / f"test_{file}.py": templates / "test.py.in",
    }
    written = {path: Template(source.read_text()).substitute(words) for path, source in texts.items()}
    if values:
        config = folder / f"{file}.yaml"
        written[config] = _changed(written[config], values)
    _write(written)
    return list(texts)


def _changed(text: str, values: Mapping[str, Any]) -> str:
    """Return a config with these values in place of all except its workload and workers. values: by dotted key."""
    first, *_ = text.splitlines()
    stated = yaml.safe_load(text)
    config = {"workload": stated["workload"], "scale": stated["scale"]}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (config.setdefault(section, {}) if section else config)[name] = value
    return f"{first}\n{yaml.safe_dump(config, sort_keys=False, default_flow_style=None)}"


def _write(texts: dict[Path, str]) -> None:
    there = [path for path in texts if path.exists()]
    if there:
        raise UsageError.problem("--out", f"{there[0]} already exists and is not overwritten", "choose another folder")
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "x") as file:
                file.write(text)
    except OSError as exc:
        raise UsageError.problem("--out", f"{path.parent} cannot be written: {exc.strerror or exc}") from exc


def _quoted(text: str) -> str:
    """Text in a form that YAML accepts within braces."""
    return "'" + text.replace("'", "''") + "'"
