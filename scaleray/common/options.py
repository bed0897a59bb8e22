"""Options of a command, declared once as a dataclass for the command line, whose fields are also keyword arguments of a
function.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from scaleray.errors import ConfigError

R = TypeVar("R")
if TYPE_CHECKING:
    Numbers = str | Sequence[int]
    """Whole numbers, as text such as `1,2,4` or as a sequence."""
    Words = str | Sequence[str]
    """Words, as text with commas or as a sequence."""
    File = str | Path
else:  # a command line has only text
    Numbers = Words = str
    File = Path


def takes(kind: type[Any]) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Make a function with an argument `options`, a dataclass of this type, also accept the fields as keyword
    arguments. The function's `help` then lists them with their docstrings."""

    def decorated(function: Callable[..., R]) -> Callable[..., R]:
        fields = {field.name: field for field in dataclasses.fields(kind)}

        @functools.wraps(function)
        def wrapped(*args: Any, options: Any = None, **keywords: Any) -> R:
            given = {name: keywords.pop(name) for name in fields if name in keywords}
            chosen = kind(**given) if options is None else dataclasses.replace(options, **given) if given else options
            return function(*args, options=chosen, **keywords)

        vars(wrapped)["__signature__"] = _signature(function, list(fields.values()))
        classes = [each for each in reversed(kind.__mro__) if dataclasses.is_dataclass(each)]
        found = [meanings_of(inspect.getsource(each)) for each in classes]
        meanings = [f"{name}: {text}" for each in found for name, text in each.items()]
        wrapped.__doc__ = "\n\n".join([inspect.cleandoc(function.__doc__ or ""), "\n".join(meanings)])
        return wrapped

    return decorated


def meanings_of(source: str) -> dict[str, str]:
    """Docstrings of the fields of a class, read from its source, each on one line."""
    (found,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(found, ast.ClassDef)
    meanings = {}
    for field, after in itertools.pairwise(found.body):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            meanings[ast.unparse(field.target)] = " ".join(str(after.value.value).split())
    return meanings


def _signature(function: Callable[..., Any], fields: Sequence[dataclasses.Field[Any]]) -> inspect.Signature:
    """The function's signature with the fields in place of `options`."""
    own, kind = inspect.signature(function), inspect.Parameter.KEYWORD_ONLY
    kept = [parameter for name, parameter in own.parameters.items() if name != "options"]
    added = [inspect.Parameter(field.name, kind, default=field.default, annotation=field.type) for field in fields]
    before = [parameter for parameter in kept if parameter.kind is not kind]
    return own.replace(parameters=[*before, *added, *kept[len(before) :]])


def whole_numbers(option: str, given: Numbers) -> list[int]:
    """Parse an option's whole numbers, given as text such as `1,2,4` or as a sequence. Raises ConfigError naming the
    option."""
    try:
        return [int(word) for word in given.split(",") if word.strip()] if isinstance(given, str) else list(given)
    except ValueError:
        raise ConfigError(option, given, "it must be a comma-separated list of whole numbers, such as 1,2,4") from None


def words_of(given: Words) -> list[str]:
    """Parse words of an option, given as text with commas or as a sequence."""
    return [word.strip() for word in (given.split(",") if isinstance(given, str) else given) if word.strip()]
