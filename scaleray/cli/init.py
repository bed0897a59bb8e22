"""`scaleray init`: write a working project to start from."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated, Any

from cyclopts import Parameter

from scaleray.common.installed import install_command
from scaleray.errors import UsageError


def init(
    *,
    kind: Annotated[str | None, Parameter(name="--from")] = None,
    out: str | None = None,
    name: str | None = None,
    data: str | None = None,
    workers: int = 1,
    arguments: str | None = None,
) -> int:
    """Write a project that trains without changes on sample data: a workload, its config and its test.

    Without --from it asks five questions. It never overwrites files.

    Parameters
    ----------
    kind
        Type of project: lightning, hf, images, table or text.
    out
        Folder to write to; by default the current one.
    name
        Name of the files; by default a suitable one.
    data
        Your own data, as described in the workload's docstring; by default sample data from a package.
    workers
        Number of workers.
    arguments
        With --from hf: a JSON file with TrainingArguments of transformers' Trainer, whose values are used in the
        config.
    """
    from scaleray.cli.projects.write import KINDS, write_project

    if kind is None:
        if not sys.stdin.isatty():
            raise UsageError.problem(
                "--from",
                f"is required without a terminal. It must be one of {', '.join(KINDS)}",
                "scaleray init --from table",
            )
        kind, name, data, workers, out = _asked()
    values, left = _trained_with(arguments, kind, workers) if arguments is not None else ({}, [])
    files = write_project(kind, out or ".", name=name, data=data, workers=workers, values=values)
    for path in files:
        print(f"wrote {path}")
    for line in left:
        print(f"not taken: {line}")
    about, config = KINDS[kind], files[1]
    if about.extra is not None:
        print(f"it needs:  {install_command(about.extra)}")
    print(f"check:     scaleray check -c {shlex.quote(str(config))}")
    print(f"train:     scaleray train -c {shlex.quote(str(config))}")
    print(f"test:      python -m pytest {shlex.quote(str(files[2]))}")
    return 0


def _trained_with(path: str, kind: str, workers: int) -> tuple[dict[str, Any], list[str]]:
    """Config values from a file of TrainingArguments, and a line for each one without an equivalent."""
    import dataclasses
    from pathlib import Path

    from scaleray.common.installed import library
    from scaleray.common.parsing import load_json
    from scaleray.config.trainer_arguments import config_of

    if kind != "hf":
        raise UsageError.problem("--arguments", "applies only to transformers", "add --from hf")
    fields = dataclasses.fields(
        library("transformers", extra="hugging-face", wanted_by="--arguments").TrainingArguments
    )
    defaults = {f.name: f.default_factory() if callable(f.default_factory) else f.default for f in fields}
    try:
        stated = load_json(Path(path).expanduser().read_text())
    except (OSError, ValueError) as exc:
        hint = "Path('arguments.json').write_text(args.to_json_string()) writes one"
        raise UsageError.problem("--arguments", f"{path} cannot be read: {exc}", hint) from exc
    return config_of(stated, workers=workers, defaults=defaults)


def _asked() -> tuple[str, str | None, str | None, int, str]:
    """The answers to five questions on the terminal; an empty answer selects the value in brackets."""
    from scaleray.cli.projects.write import KINDS

    for number, (kind, about) in enumerate(KINDS.items(), start=1):
        print(f"  {number}  {kind:<10} {about.words}")
    kinds = {**{str(number): kind for number, kind in enumerate(KINDS, start=1)}, **{kind: kind for kind in KINDS}}
    while (kind := input("1/5  What do you bring? [1] ").strip().lower() or "1") not in kinds:
        print(f"     Enter a number from 1 to {len(KINDS)}, or a name of the list.")
    kind = kinds[kind]
    name = input(f"2/5  Name of the files? [{KINDS[kind].file}] ").strip() or None
    data = input("3/5  Where is your data? [sample data] ").strip() or None
    while not ((workers := input("4/5  How many workers? [1] ").strip() or "1").isdecimal() and int(workers)):
        print("     Enter a number from 1.")
    out = input("5/5  Into which folder? [.] ").strip() or "."
    return kind, name, data, int(workers), out
