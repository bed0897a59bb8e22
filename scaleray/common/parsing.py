"""Parse YAML and JSON from users in linear time, or reject it early, with errors of one type.

PyYAML takes minutes for a few bytes of aliases and merges, for deep brackets and for integers written as 1:1:1:1; json
raises RecursionError for deep nesting. Input beyond a limit raises TooLarge, a ValueError whose text describes the
limit.
"""

import contextlib
import difflib
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import yaml

DEEPEST = 100
"""Maximum levels of nested brackets, through which PyYAML walks at every word."""
MOST_CHARACTERS = 1_000_000
"""Maximum characters of a YAML file: PyYAML reads about a megabyte per second, and a handwritten file has a hundredth
of that.
"""
MOST_NODES = 25_000
"""Maximum keys and values of a YAML file, including expanded aliases and merges."""
MOST_DIGITS = 1000
"""Maximum digits of a number."""
LONGEST_WORD = 100
"""Maximum length of a word that is compared with known words, since difflib's time grows with its square."""
CONTROLS = re.compile(
    r"((?<!\\)(?:\\\\)*)\\(?:u00(?:0[0-8b-f]|1[0-9a-f]|7f|[89][0-9a-f])|[bfr])|[\x00-\x08\x0b-\x1f\x7f-\x9f]",
    re.IGNORECASE,
)
"""Terminal control characters in JSON text, other than line breaks and tabs: literal or escaped."""
MERGE = "tag:yaml.org,2002:merge"
NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class TooLarge(ValueError):
    """A limit of this module was exceeded; the text states the value and the limit."""


class BoundedLoader(yaml.SafeLoader):
    """PyYAML's safe loader with the limits above.

    Raises TooLarge if one is exceeded, yaml.YAMLError for text that is not YAML.
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
            raise TooLarge(f"it has more than {MOST_NODES:,} keys and values, which is the limit")
        node = super().compose_node(parent, index)
        if isinstance(node, yaml.ScalarNode) and node.tag in NUMBERS and len(node.value) > MOST_DIGITS:
            raise TooLarge(f"it has a number of {len(node.value):,} digits, and at most {MOST_DIGITS:,} are read")
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put the pairs of `<<` before a mapping's own pairs, so that its own take precedence; in a list of mappings,
        earlier ones take precedence."""
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
        node.value = own  # before processing the sources, which may include this node
        merged: list[tuple[yaml.Node, yaml.Node]] = []
        for one in sources:
            self.flatten_mapping(one)
            merged += one.value
            if len(merged) > MOST_NODES:
                raise TooLarge(f"its merges make more than {MOST_NODES:,} keys and values, which is the limit")
        node.value = [*merged, *own]


class NotYaml(ValueError):
    """The text is not YAML. problem: PyYAML's description. line: where it is, from 1, if known."""

    def __init__(self, problem: str, line: int | None) -> None:
        super().__init__(problem if line is None else f"{problem} in line {line}")
        self.problem, self.line = problem, line


@contextlib.contextmanager
def yaml_nodes(text: str) -> Iterator[tuple[BoundedLoader, yaml.Node | None]]:
    """Yield a loader and the document's node, which has line numbers, for constructing values within the context.

    Raises NotYaml, TooLarge, or another ValueError for invalid values, here and within the context.
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
    # invalid dates and numbers, unsuitable tags, recursive values
    except (ValueError, OverflowError, TypeError, LookupError, AttributeError) as exc:
        raise ValueError(f"{type(exc).__name__}: {exc}") from exc
    finally:
        if loader is not None:
            loader.dispose()


def load_yaml(text: str) -> Any:
    """Return the document's value. Raises ValueError like `yaml_nodes`, and for more than MOST_NODES values."""
    return load_yaml_with_lines(text)[0]


def load_yaml_with_lines(text: str) -> tuple[Any, dict[str, int]]:
    """Return the document's value, and the lines of its keys and of its sections' dotted keys. Raises ValueError."""
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
    """Raise TooLarge for a value that has more than `most` entries, which a short text can create with aliases, or that
    contains itself."""
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
    """Return the document's value. Raises ValueError for text that is not JSON or is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise TooLarge("it is nested too deep") from None


def inert_json(text: str | bytes) -> str:
    """Return JSON text with spaces in place of terminal control characters. Raises ValueError for bytes that are not
    UTF-8."""
    return CONTROLS.sub(lambda found: f"{found[1] or ''} ", text.decode() if isinstance(text, bytes) else text)


def near_words(word: str, known: Iterable[str], *, most: int = 1, likeness: float = 0.6) -> list[str]:
    """The `known` words closest to `word`, best match first; empty for a very long word."""
    return [] if len(word) > LONGEST_WORD else difflib.get_close_matches(word, list(known), n=most, cutoff=likeness)
