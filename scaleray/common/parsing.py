"""YAML and JSON as users bring them: read in time that is linear in their size, or refused early, and with errors of
one kind.

PyYAML takes minutes for a few bytes of aliases and merges, for deep brackets and for integers written as 1:1:1:1; json
raises RecursionError for what is nested too deep. What passes a limit is TooLarge, a ValueError whose text says which
one.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import yaml

DEEPEST = 100
"""Largest depth of brackets within brackets, which PyYAML walks at every word."""
MOST_CHARACTERS = 1_000_000
"""Largest number of characters of a YAML file: PyYAML reads about a megabyte a second, and a file written by hand is a
hundredth of that.
"""
MOST_NODES = 25_000
"""Largest number of keys and values of a YAML file, also of what aliases and merges make of it."""
MOST_DIGITS = 1000
"""Largest number of digits of a number."""
LONGEST_WORD = 100
"""Longest word that is compared with known words: difflib's time grows with the square of its length."""
CONTROLS = re.compile(
    r"((?<!\\)(?:\\\\)*)\\(?:u00(?:0[0-8b-f]|1[0-9a-f]|7f|[89][0-9a-f])|[bfr])|[\x00-\x08\x0b-\x1f\x7f-\x9f]",
    re.IGNORECASE,
)
"""Characters that a terminal obeys, but for line breaks and tabs, in a text of JSON: as they are, or escaped."""
MERGE = "tag:yaml.org,2002:merge"
NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class TooLarge(ValueError):
    """A limit of this module is passed; the text says what there is and what is allowed."""


class BoundedLoader(yaml.SafeLoader):
    """PyYAML's safe loader with the limits above.

    Raises TooLarge where one is passed, yaml.YAMLError for what is no YAML.
    """

    def __init__(self, text: str) -> None:
        if len(text) > MOST_CHARACTERS:
            raise TooLarge(f"it has {len(text):,} characters, and at most {MOST_CHARACTERS:,} are read")
        super().__init__(text)
        self._num_nodes = 0

    def fetch_flow_collection_start(self, token: Any) -> None:
        if self.flow_level >= DEEPEST:
            raise TooLarge(f"its brackets are nested more than {DEEPEST} deep")
        super().fetch_flow_collection_start(token)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._num_nodes += 1
        if self._num_nodes > MOST_NODES:
            raise TooLarge(f"it has more than the {MOST_NODES:,} keys and values that are read")
        node = super().compose_node(parent, index)
        if isinstance(node, yaml.ScalarNode) and node.tag in NUMBERS and len(node.value) > MOST_DIGITS:
            raise TooLarge(f"it has a number of {len(node.value):,} digits, and at most {MOST_DIGITS:,} are read")
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put what `<<` names before a mapping's own pairs, so that those win; of a list of mappings, the first
        wins."""
        own: list[tuple[yaml.Node, yaml.Node]] = []
        sources: list[yaml.MappingNode] = []
        for key, value in node.value:
            if key.tag != MERGE:
                own.append((key, value))
                continue
            found = value.value[::-1] if isinstance(value, yaml.SequenceNode) else [value]
            for one in found:
                if not isinstance(one, yaml.MappingNode):
                    problem = "<< needs a mapping or a list of mappings"
                    raise yaml.constructor.ConstructorError("while merging", node.start_mark, problem, value.start_mark)
                sources.append(one)
        if not sources:
            return
        node.value = own  # before the sources are looked at, of which this may be one
        merged: list[tuple[yaml.Node, yaml.Node]] = []
        for one in sources:
            self.flatten_mapping(one)
            merged += one.value
            if len(merged) > MOST_NODES:
                raise TooLarge(f"its merges make more than the {MOST_NODES:,} keys and values that are read")
        node.value = [*merged, *own]


class NotYaml(ValueError):
    """A text that is not YAML. problem: PyYAML's. line: its place, from 1, if known."""

    def __init__(self, problem: str, line: int | None) -> None:
        super().__init__(problem if line is None else f"{problem} in line {line}")
        self.problem, self.line = problem, line


@contextlib.contextmanager
def yaml_nodes(text: str) -> Iterator[tuple[BoundedLoader, yaml.Node | None]]:
    """Yield a loader with the document's node, which knows its lines, to construct values within the context.

    Raises NotYaml, TooLarge, or another ValueError for values that do not exist, here and within the context.
    """
    loader = None
    try:
        loader = BoundedLoader(text)
        yield loader, loader.get_single_node()
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        raise NotYaml(str(getattr(exc, "problem", None) or exc), mark.line + 1 if mark else None) from exc
    except RecursionError as exc:
        raise TooLarge("it is nested too deep") from exc
    except TooLarge:
        raise
    # dates and numbers that do not exist, tags that do not fit, values within themselves
    except (ValueError, OverflowError, TypeError, LookupError, AttributeError) as exc:
        raise ValueError(f"{type(exc).__name__}: {exc}") from exc
    finally:
        if loader is not None:
            loader.dispose()


def load_yaml(text: str) -> Any:
    """The document's value. Raises ValueError as `yaml_nodes`, and if it holds more than MOST_NODES values."""
    return load_yaml_with_lines(text)[0]


def load_yaml_with_lines(text: str) -> tuple[Any, dict[str, int]]:
    """The document's value, and the lines of its keys and of the dotted keys of its sections. Raises ValueError."""
    with yaml_nodes(text) as (loader, node):
        lines = {}
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            lines[str(key.value)] = key.start_mark.line + 1
            for inner, _ in value.value if isinstance(value, yaml.MappingNode) else ():
                lines[f"{key.value}.{inner.value}"] = inner.start_mark.line + 1
        value = None if node is None else loader.construct_document(node)
    check_size(value, most=MOST_NODES)
    return value, lines


def check_size(value: Any, *, most: int) -> None:
    """Raises TooLarge for a value that holds more than `most` others, which a few aliases may make of a short text, or
    itself."""
    stack, total = [value], 0
    while stack:
        item = stack.pop()
        total += 1
        if total > most:
            raise TooLarge(f"it has a value of more than {most:,} entries, or one that contains itself")
        if isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple, set)):
            stack.extend(item)


def load_json(text: str | bytes) -> Any:
    """The document's value. Raises ValueError for what is no JSON or is nested too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise TooLarge("it is nested too deep") from None


def inert_json(text: str | bytes) -> str:
    """The text of JSON with spaces in place of characters that a terminal obeys. Raises ValueError for bytes that are
    not UTF-8."""
    return CONTROLS.sub(lambda found: f"{found[1] or ''} ", text.decode() if isinstance(text, bytes) else text)


def near_words(word: str, known: Iterable[str], *, most: int = 1, likeness: float = 0.6) -> list[str]:
    """The `known` words that `word` may have been meant for, the most alike first; none for a very long one."""
    return [] if len(word) > LONGEST_WORD else difflib.get_close_matches(word, list(known), n=most, cutoff=likeness)
