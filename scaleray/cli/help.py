"""Help pages: commands grouped in order of use, text wrapped at the terminal's width, and missing arguments."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from cyclopts import App, Group, MissingArgumentError
from cyclopts.help import DefaultFormatter, InlineText
from rich.text import Text

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions

START = Group("Start", sort_key=0)
PROVE = Group("Prove and measure", sort_key=1)
LOOK = Group("Look", sort_key=2)
USE = Group("Use the model", sort_key=3)
CLUSTERS = Group("Clusters", sort_key=4)
PRODUCTION = Group("Production", sort_key=5)
OTHER = Group("Other", sort_key=6)

TRAIN_KEYS = """Keys that most runs set, in the file or as options:
  --workload.name FILE.py:CLASS     workload to train
  --batch.global-size 64            samples in a step, over all workers
  --optimizer.learning-rate 1e-3    peak; --optimizer.name sgd, lamb, ...
  --stop.after "30 epochs"          length of the training
  --scale.workers 2                 workers, one for each GPU
  --evaluation.every "1 epoch"      interval between evaluations
  --checkpoint.storage-path PATH    of the runs, by default ~/scaleray
All others: scaleray config keys [SECTION]. A first config: scaleray init."""


class Pages(DefaultFormatter):
    """Help pages of cyclopts, without the line breaks of the source code."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        for entry in panel.entries:
            _flow(entry.description)
        entries = [entry.copy(default=entry.default or None) for entry in panel.entries]
        super().__call__(console, options, panel.copy(entries=entries))

    def render_description(self, console: Console, options: ConsoleOptions, description: Any) -> None:
        """Print the description of a command."""
        _flow(description)
        super().render_description(console, options, description)


def flowed(text: str) -> str:
    """The text with one line per paragraph. List items keep their own lines."""
    paragraphs = re.split(r"\n\s*\n", text.strip())
    return "\n\n".join(re.sub(r"\s*\n\s*(?!- )", " ", one) for one in paragraphs)


def _flow(view: Any) -> None:
    if isinstance(view, InlineText) and isinstance(view.primary_renderable, Text):
        view.primary_renderable = Text(flowed(view.primary_renderable.plain), end=view.primary_renderable.end)


def shown_default(value: Any) -> str:
    """A default as shown in help; empty for values that mean unset: off, None and an empty list."""
    return "" if value in (None, False, ()) else str(value)


def add_in_order(app: App, group: Group, *commands: Any) -> None:
    """Add commands to a group, in this order."""
    for number, command in enumerate(commands):
        if isinstance(command, App):
            command.group, command.sort_key = group, number
            app.command(command)
        else:
            app.command(command, group=group, sort_key=number)


def missing(error: MissingArgumentError) -> str:
    """Imperative sentence that names the missing argument."""
    argument = error.argument
    assert argument is not None
    if error.keyword is not None:
        return f"Give {error.keyword} a value"
    name = next((name for name in argument.names if name.startswith("--")), argument.name)
    if not argument.field_info.is_positional:
        return f"Give {name} with a value"
    word = name.lstrip("-").upper()
    return f"Give {'an' if word[0] in 'AEIO' else 'a'} {word}"
