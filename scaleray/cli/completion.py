"""Shell completion by cyclopts, with all config keys as options of the commands that accept them.

cyclopts completes the options in a command's signature. Commands receive config keys as plain words, so the script is
made from copies of the commands in which each key is an option with its choices.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter
from cyclopts.completion import ShellDetectionError

from scaleray.cli.options import Overrides
from scaleray.config.reference import key_rows
from scaleray.errors import UsageError

Shell = Literal["bash", "zsh", "fish"]


def install(app: App, shell: Shell | None, output: Path | None) -> Path:
    """Write the script for a shell, by default the current one, and return its path. Raises UsageError.

    output: file to write to; by default where the shell looks for it, with a line in its start-up file.
    """
    try:
        return with_config_keys(app).install_completion(shell=shell, output=output, add_to_startup=output is None)
    except ShellDetectionError:
        raise UsageError.problem("The shell", "cannot be detected", "add --shell bash") from None
    except OSError as exc:
        raise UsageError.problem(
            "The script", f"cannot be written to {output}: {exc}", "choose a file with --output"
        ) from exc


def with_config_keys(app: App) -> App:
    """Return a copy of the commands in which every config key is an option."""
    copy = App(name=app.name, help=app.help, help_format="plaintext")
    if app.default_command is not None:
        copy.default(_with_options(app.default_command))
    for name in app:
        if name in (*app.help_flags, *app.version_flags):
            continue
        found = app[name]
        if any(inner not in (*found.help_flags, *found.version_flags) for inner in found):
            copy.command(with_config_keys(found), name=name)
        else:
            copy.command(_with_options(found.default_command), name=name)
    return copy


def _with_options(function: Any) -> Any:
    """Return a copy of a command with the config keys as named options instead of free arguments."""

    def stand_in(*_: Any, **__: Any) -> None:
        raise AssertionError("only its signature is used")

    signature = inspect.signature(function, eval_str=True)
    own = [one for one in signature.parameters.values() if one.annotation != Overrides]
    keys = _key_options() if len(own) < len(signature.parameters) else []
    stand_in.__signature__ = signature.replace(parameters=[*own, *keys])  # type: ignore[attr-defined]
    stand_in.__doc__, stand_in.__name__ = function.__doc__, function.__name__
    return stand_in


def _key_options() -> list[inspect.Parameter]:
    options = []
    for row in key_rows():
        kind: Any = Literal[row.choices] if row.choices else str
        named = Parameter(name=f"--{row.key.replace('_', '-')}", help=row.meaning)
        annotation = Annotated[kind | None, named]
        name = row.key.replace(".", "__")
        options.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    return options
