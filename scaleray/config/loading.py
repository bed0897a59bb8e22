"""Load a RunConfig from a YAML file, the environment and dotted flags, or raise one ConfigError that names the key.

Flags take precedence over the environment, and the environment over the file. Environment variables are
`SCALERAY_SCALE__WORKERS` for `scale.workers`: two underscores between section and key.
"""

import itertools
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from scaleray.common.parsing import (
    MERGE,
    BoundedLoader,
    NotYaml,
    TooLarge,
    check_size,
    load_yaml,
    near_words,
    yaml_nodes,
)
from scaleray.common.private_parts import SWITCH
from scaleray.config.alerts import WEBHOOK, without_secret
from scaleray.config.base import without_password
from scaleray.config.parallel import AUTO
from scaleray.config.run import RunConfig
from scaleray.config.synonyms import NOTES, meant_by
from scaleray.errors import ConfigError

ENV_PREFIX = "SCALERAY_"
MAPPINGS = ("workload.args", "checkpoint.memory")
"""Keys whose value is a mapping: `KEY.NAME` sets one of its values."""
MAX_ENTRIES = 10_000  # most entries in one value, as YAML aliases can expand a few bytes into billions
LONGEST_KEY = 200


@dataclass(frozen=True)
class Entry:
    """Value of a key in one layer, with its file and line or other origin."""

    value: Any
    where: str


def load_config(
    path: str | Path | None = None,
    *,
    flags: Sequence[str] | Mapping[str, Any] = (),
    environ: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    planned: Callable[[RunConfig], Mapping[str, Any]] | None = None,
) -> RunConfig:
    """Load the resolved config. `flags`: `--section.key value` words, or a mapping of dotted keys or sections to
    values.

    environ: None reads os.environ. defaults: values by dotted key, below every other layer. planned: returns keys that
    replace `parallel: auto` for a config without it; None refuses it. Raises ConfigError with the key, its file and
    line.
    """
    lowest = {key: Entry(value, "default") for key, value in (defaults or {}).items()}
    if path is not None:
        lowest.update(read_file(Path(path)))
    environment = read_environment(os.environ if environ is None else environ)
    if isinstance(flags, Mapping):
        given = {key: Entry(value, "override") for key, value in _by_dotted_key(flags).items()}
        return validate(lowest, environment, given, planned=planned)
    return validate(lowest, environment, read_flags(flags), planned=planned)


def without_degrees(config: RunConfig) -> dict[str, Any]:
    """Return no keys: leave `parallel: auto` for later."""
    return {}


def _by_dotted_key(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a mapping whose keys are dotted, or sections with a mapping each, as in a file."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key in _sections() and isinstance(value, Mapping):
            found.update({f"{key}.{name}": inner for name, inner in value.items()})
        else:
            found[str(key)] = value
    return found


def known_keys() -> dict[str, Any]:
    """All dotted config keys with their fields, in the order of the sections."""
    found: dict[str, Any] = {}
    for name, info in RunConfig.model_fields.items():
        section = info.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            found.update({f"{name}.{key}": field for key, field in section.model_fields.items()})
        else:
            found[name] = info
    return found


def read_file(path: Path) -> dict[str, Entry]:
    """Read the entries of a YAML file by dotted key, with line numbers."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = sorted(str(p) for p in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        hint = f"YAML files there: {', '.join(near)}" if near else "check the path, which is relative to this folder"
        raise ConfigError("config file", str(path), "it does not exist", hint) from None
    except (OSError, ValueError) as exc:  # ValueError: a NUL in the path, or text that is not UTF-8
        raise ConfigError("config file", str(path), f"it cannot be read: {exc}") from exc
    try:
        with yaml_nodes(text) as (loader, node):
            if node is None or (isinstance(node, yaml.ScalarNode) and not node.value):
                allowed = "it needs at least workload, batch, optimizer and stop"
                raise ConfigError(f"config file {path}", "empty", allowed)
            if not isinstance(node, yaml.MappingNode):
                raise ConfigError(f"config file {path}", "not a mapping", "it must contain sections such as 'batch:'")
            return _entries(loader, node, prefix="", file=str(path))
    except NotYaml as exc:
        place = f"{path}:{exc.line}" if exc.line else path
        raise ConfigError(f"config file {place}", "not valid YAML", exc.problem) from exc
    except TooLarge as exc:
        hint = "move long data into a file that the workload reads"
        raise ConfigError(f"config file {path}", "too large", str(exc), hint) from exc
    except ValueError as exc:
        raise ConfigError.problem(f"config file {path}", f"has a value that cannot be read: {exc}") from exc


def _entries(loader: BoundedLoader, node: yaml.MappingNode, *, prefix: str, file: str) -> dict[str, Entry]:
    """Return the values of a mapping and of the sections in it, by dotted key."""
    sections = _sections()
    entries: dict[str, Entry] = {}
    for key, (where, value_node) in _own_keys(loader, node, prefix=prefix, file=file).items():
        if not prefix and key in sections and isinstance(value_node, yaml.MappingNode):
            entries.update(_entries(loader, value_node, prefix=f"{key}.", file=file))
            continue
        if not prefix and key in sections:
            if isinstance(value_node, yaml.ScalarNode) and value_node.tag == "tag:yaml.org,2002:null":
                continue  # an empty section: all its defaults
            if (key, value_node.value) == ("parallel", AUTO):
                entries[key] = Entry(AUTO, where)
                continue
            raise ConfigError(
                f"{where} {key}", _shown_node(value_node), f"it must be a section with keys such as {_first_key(key)}"
            )
        value = loader.construct_object(value_node, deep=True)
        check_size(value, most=MAX_ENTRIES)
        entries[key] = Entry(value, where)
    return entries


def _sections() -> set[str]:
    return {
        key
        for key, info in RunConfig.model_fields.items()
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
    }


def _own_keys(
    loader: BoundedLoader, node: yaml.MappingNode, *, prefix: str, file: str
) -> dict[str, tuple[str, yaml.Node]]:
    """Each key of a mapping with its location and value; the mapping's own keys take precedence over those merged by
    `<<`."""

    def read(pairs: list[tuple[yaml.Node, yaml.Node]], *, may_repeat: bool) -> dict[str, tuple[str, yaml.Node]]:
        found: dict[str, tuple[str, yaml.Node]] = {}
        for key_node, value_node in pairs:
            where = f"{file}:{key_node.start_mark.line + 1}"
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError.problem(where, "has a key that is not a word: keys are words such as 'batch'")
            if len(key_node.value) > LONGEST_KEY:
                raise ConfigError(f"{where} a key", key_node.value, f"keys have at most {LONGEST_KEY} characters")
            key = prefix + key_node.value
            if key in found and not may_repeat:
                raise ConfigError(f"{where} {key}", "given twice", "a key may occur only once", "remove one of the two")
            found[key] = (where, value_node)
        return found

    own = read([pair for pair in node.value if pair[0].tag != MERGE], may_repeat=False)
    loader.flatten_mapping(node)
    return {**read(node.value, may_repeat=True), **own}


def _shown_node(node: yaml.Node) -> str:
    return str(node.value) if isinstance(node, yaml.ScalarNode) else "a list"


def _first_key(section: str) -> str:
    return next(key for key in known_keys() if key.startswith(section + "."))


def read_environment(environ: Mapping[str, str]) -> dict[str, Entry]:
    """Read entries from `SCALERAY_SECTION__KEY` variables."""
    entries = {}
    for variable, text in environ.items():
        if variable.startswith(ENV_PREFIX) and variable != SWITCH:
            key = variable[len(ENV_PREFIX) :].lower().replace("__", ".")
            entries[key] = Entry(_parse_word(text), f"environment variable {variable}")
    return entries


def read_flags(words: Sequence[str]) -> dict[str, Entry]:
    """Read entries from `--section.key value`, `--section.key=value`, or `--key` alone for true. Dashes in keys become
    underscores."""
    entries: dict[str, Entry] = {}
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("--") or len(word) == 2:
            raise ConfigError("argument", word, "options have the form --scale.workers 2", "see scaleray train --help")
        key, equals, text = word[2:].partition("=")
        if not equals:
            if position < len(words) and not words[position].startswith("--"):
                text = words[position]
                position += 1
            else:
                text = "true"
        entries[key.replace("-", "_")] = Entry(_parse_word(text), "flag")
    return entries


def _parse_word(text: str) -> Any:
    try:
        value = load_yaml(text)
        check_size(value, most=MAX_ENTRIES)
    except ValueError:
        return text  # such as a path with a colon: use the word unchanged
    return value


def validate(
    lowest: Mapping[str, Entry],
    *layers: Mapping[str, Entry],
    planned: Callable[[RunConfig], Mapping[str, Any]] | None = None,
) -> RunConfig:
    """Apply each layer over the ones before it, check the values and build the RunConfig. A key for one value in a
    mapping, such as `workload.args.NAME`, leaves the others unchanged. Raises ConfigError for the first error."""
    entries = dict(lowest)
    for key, entry in itertools.chain.from_iterable(layer.items() for layer in layers):
        mapping = next((each for each in MAPPINGS if key.startswith(f"{each}.") and key != f"{each}."), None)
        below = entries[mapping].value if mapping in entries else None
        if mapping is None:
            entries[key] = entry
        elif below is None or isinstance(below, Mapping):  # otherwise the layer below is invalid: reported below
            inner = key.removeprefix(f"{mapping}.")
            entries[mapping] = Entry({**(below or {}), inner: entry.value}, entry.where)
    if entries.get("parallel", Entry(None, "")).value != AUTO:
        return _built(entries)
    auto = entries.pop("parallel")
    if degrees := [key for key in entries if key.startswith("parallel.")]:
        raise ConfigError(f"{auto.where} parallel", AUTO, f"{degrees[0]} is also given", "omit one of them")
    if planned is None:
        hint = "give degrees; scaleray plan -c FILE --here --write OUT writes the planner's"
        raise ConfigError(
            f"{auto.where} parallel",
            AUTO,
            "only train, check, verify, profile, config show and plan choose a layout",
            hint,
        )
    chosen = {key: Entry(value, "the planner's") for key, value in planned(_built(entries)).items()}
    return _built({**entries, **chosen})


def _built(entries: Mapping[str, Entry]) -> RunConfig:
    known = known_keys()
    nested: dict[str, Any] = {}
    for key, entry in entries.items():
        if key not in known:
            raise _unknown(key, entry.where, list(known))
        section, _, name = key.partition(".")
        # None is how Python writes YAML's null
        is_none = entry.value == "None" and type(None) in typing.get_args(known[key].annotation)
        value = None if is_none else entry.value
        if name:
            nested.setdefault(section, {})[name] = value
        else:
            nested[section] = value
    for section, info in RunConfig.model_fields.items():  # so that the missing key is reported, not only its section
        if info.is_required():
            nested.setdefault(section, {})
    try:
        return RunConfig.model_validate(nested)
    except ValidationError as exc:
        raise _as_config_error(exc, entries) from exc
    except RecursionError as exc:
        raise ConfigError("config", "too deeply nested", "values must be plain words, numbers and lists") from exc


def _unknown(key: str, where: str, known: list[str]) -> ConfigError:
    shown = key if len(key) <= LONGEST_KEY else f"{key[:LONGEST_KEY]}..."
    return ConfigError.problem(f"{where} {shown}", "is an unknown key", hint_for(key, known))


def hint_for(key: str, known: list[str]) -> str:
    """Hint for an unknown key: a section, a key known under a word of other libraries, or the nearest spelling."""
    sections = sorted({k.partition(".")[0] for k in known})
    last = key.rpartition(".")[2]
    if key in sections:
        return f"it is a section with keys such as {_first_key(key)}; see scaleray config keys {key}"
    same_name = [k for k in known if k.rpartition(".")[2] == last]
    # `batch.size` means global_size, if no other key has that ending
    meant = meant_by(key.replace(".", "_")) or meant_by(last) or (same_name[0] if len(same_name) == 1 else None)
    near = [meant] if meant else near_words(key, known if "." in key else [*known, *sections])
    if not near:
        near = [k for k in known if near_words(last, [k.rpartition(".")[2]], likeness=0.75)][:1]
    if not near:
        return f"sections are {', '.join(sections)}; see scaleray config keys"
    note = NOTES.get(near[0]) if near[0] == meant else None
    return f"did you mean {near[0]}{f' ({note})' if note else ''}?"


def _as_config_error(exc: ValidationError, entries: Mapping[str, Entry]) -> ConfigError:
    known = known_keys()
    problem = exc.errors(include_url=False)[0]
    words = [str(part) for part in problem["loc"]]
    message = problem["msg"].removeprefix("Value error, ")
    first_word = message.partition(":")[0]
    if ".".join([*words, first_word]) in known:  # raised by a section for one of its keys
        words.append(first_word)
        message = message.partition(":")[2].strip()
    key = ".".join(words[:2]) if ".".join(words[:2]) in known else ".".join(words[:1])
    entry = entries.get(key)
    what = f"{entry.where} {key}" if entry is not None else key
    help_text = " ".join((known[key].description or "").split()) if key in known else ""
    if problem["type"] == "missing":
        return ConfigError(what, None, "", help_text)
    default = known[key].default if key in known and len(problem["loc"]) < 2 else problem.get("input")
    found = entry.value if entry is not None else default
    if key == WEBHOOK and isinstance(found, str):
        found = without_secret(found)
    elif isinstance(found, str):
        found = without_password(found)
    message = message[0].lower() + message[1:].replace(" should ", " must ", 1)
    message = message.replace("input must ", "it must ", 1)
    return ConfigError(what, found, message.rstrip("."), help_text)
