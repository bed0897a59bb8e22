"""All files of `cluster/` as text, made from the templates in this folder and the table of versions."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from scaleray.clusters.manifests import file_versions
from scaleray.clusters.manifests.cluster_spec import ClusterSpec
from scaleray.errors import StorageError, UsageError

KINDS = {
    "local": "local",
    "kubernetes": "kubernetes",
    "slurm": "slurm",
    "ray-up": "ray_up",
    "image": "image",
    "skypilot": "skypilot",
}
"""Types of cluster, each with its folder in `cluster/`."""
SUFFIX = ".in"
PARTS = "_"
"""Prefix of templates that other templates include."""


def write_cluster_files(
    folder: str | Path = "cluster",
    *,
    kind: str = "all",
    gpus: str = "8xh100",
    nodes: int = 2,
    image: str = file_versions.IMAGE,
    cpu_image: str = file_versions.CPU_IMAGE,
    kuberay: str = file_versions.KUBERAY,
    check: bool = False,
    overwrite: bool = False,
) -> list[str]:
    """Write the files that start a cluster, all from a single table of versions and sizes, and return their paths.

    kind: type of cluster, such as kubernetes, or all. gpus: GPUs per node and their type. nodes: number of nodes.
    image, cpu_image: names that the nodes can pull, with a tag other than latest. kuberay: release of the installed
    operator. check: only return a sentence for each file that would change, without writing. overwrite: replace files
    that differ. Raises UsageError and StorageError.
    """
    wanted = ClusterSpec(gpus=gpus, nodes=nodes, image=image, cpu_image=cpu_image, kuberay=kuberay)
    texts = files(wanted, None if kind == "all" else [kind])
    if check:
        return differing(Path(folder), texts)
    return [str(path) for path in write(Path(folder), texts, overwrite=overwrite)]


def files(wanted: ClusterSpec, kinds: list[str] | None = None) -> dict[str, str]:
    """Return the texts by path below `cluster/`, for some or all types. Raises UsageError."""
    for kind in kinds or ():
        if kind not in KINDS:
            raise UsageError("--kind", kind, f"it must be one of {', '.join(KINDS)}")
    root = Path(str(resources.files("scaleray.clusters.manifests") / "templates"))
    environment = _environment(root)
    names = wanted.names()
    written = {}
    for folder in (KINDS[kind] for kind in kinds or KINDS):
        for path in sorted((root / folder).rglob(f"*{SUFFIX}")):
            if not path.name.startswith(PARTS):
                name = path.relative_to(root).as_posix()
                written[name.removesuffix(SUFFIX)] = environment.get_template(name).render(names)
    return written


def differing(folder: Path, texts: dict[str, str]) -> list[str]:
    """A sentence for each file of a folder that would change."""
    found = []
    for name, text in texts.items():
        try:
            there = (folder / name).read_text()
        except FileNotFoundError:
            found.append(f"{folder / name} is missing")
            continue
        except OSError as exc:
            raise StorageError.problem("--folder", f"{folder / name} cannot be read: {exc.strerror}") from exc
        if there != text:
            line = next(
                (n for n, (a, b) in enumerate(zip(there.splitlines(), text.splitlines(), strict=False), 1) if a != b),
                min(len(there.splitlines()), len(text.splitlines())) + 1,
            )
            found.append(f"{folder / name} differs from line {line} on")
    return found


def write(folder: Path, texts: dict[str, str], *, overwrite: bool = False) -> list[Path]:
    """Write files that are missing or, with `overwrite`, differ; return their paths.

    Raises UsageError, StorageError.
    """
    changed = [name for name in texts if differing(folder, {name: texts[name]})]
    edited = [name for name in changed if (folder / name).exists()]
    if edited and not overwrite:
        raise UsageError.problem(
            "--folder",
            f"{folder / edited[0]} already exists with different content",
            "choose another folder, or replace the files with --overwrite",
        )
    try:
        for name in changed:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(texts[name])
            if texts[name].startswith("#!"):
                (folder / name).chmod(0o755)
    except OSError as exc:
        raise StorageError.problem("--folder", f"{folder} cannot be written: {exc.strerror or exc}") from exc
    return [folder / name for name in changed]


def _environment(root: Path) -> jinja2.Environment:
    """Jinja environment with its own delimiters, since braces and percent signs have a meaning in shell scripts and
    YAML."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(root),
        variable_start_string="@{",
        variable_end_string="}",
        block_start_string="@%",
        block_end_string="%@",
        comment_start_string="@#",
        comment_end_string="#@",
        line_statement_prefix="@@",
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,
    )
    environment.filters["indented"] = _indented
    return environment


def _indented(text: str, width: int) -> str:
    indent: Callable[[str], Any] = lambda line: " " * width + line if line.strip() else line
    return "\n".join(indent(line) for line in text.splitlines())
