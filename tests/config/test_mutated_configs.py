"""Thousands of broken configs: every one either loads, or is a ConfigError that names a key or the file."""

import copy
import pickle
import random

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from scaleray.config import RunConfig, known_keys, load_config
from scaleray.errors import ConfigError

VALID = {
    "workload": {"name": "jobs/digits.py:Digits", "args": {"width": 32, "names": ["a", "b"], "deep": {"er": 1.5}}},
    "batch": {"global_size": 64, "unit": "samples", "micro_size": 16, "drop_last": True},
    "optimizer": {
        "name": "adamw",
        "learning_rate": 2e-3,
        "betas": [0.9, 0.95],
        "rule": "sqrt",
        "reference_batch_size": 32,
    },
    "schedule": {"name": "cosine", "warmup": "1 epoch", "length": "500 steps", "final_ratio": 0.1},
    "stop": {"after": "20 epochs", "at": "val/accuracy >= 0.97"},
    "evaluation": {"every": "5 epochs"},
    "scale": {"workers": 2, "label_selector": {"zone": "eu-1"}},
    "precision": {"dtype": "bf16"},
    "tracking": {"experiment": "digits", "run_name": "first"},
    "seed": 3,
    "deterministic": True,
}
TEXT = yaml.safe_dump(VALID, sort_keys=False)
NAMES = [*known_keys(), *RunConfig.model_fields]

SHORT = yaml.safe_dump(
    {key: VALID[key] for key in ("workload", "batch", "stop")} | {"optimizer": {"learning_rate": 1.0}}
)

ODD_VALUES = [
    None, True, False, 0, -1, 1, 2**40, 2**63, 2**64, 10**400, -(10**30), 0.0, -0.0, 1e308, 1e-320, float("inf"), float("nan"),
    "", " ", "nan", "1e400", "1e5", "0x10", "1_000", "yes", "none", "null", "~", "é", "名前", "\u202e", "\x07", "\udcff x", "a" * 5000, "two\nlines", "10 epochs",
    "3 epochs", "-3 epochs", "1e999 steps", "epochs", "val/accuracy >= .", "val/accuracy >= 1e999", "a:b", "s3://b/c", "../..",
    [], [[]], [1, 2, 3], [None], {}, {"a": {}}, {"": 1}, {1: 2}, {None: None}, {True: False}, b"\xff\xfe", b"plain",
]  # fmt: skip
ODD_TEXT = [
    "!!binary /w==", "!!timestamp 2024-01-01", "!!set {a, b}", "!!python/object:os.system x", "!!python/tuple [1]", "!!float x",
    "!unknown x", "!!int abc", "!!int 0x" + "f" * 5000, "9" * 5000, "&a [*a]", "&a {b: *a}", "*missing", "[" * 99, "[" * 20_000 + "]" * 20_000,
    "<<: {a: 1}", "? [a]\n: 1", "? {a: b}\n: 1", "- 1", "{", "}", "'", '"', "|", ">", "%YAML 9.9", "---", "...", "\t", "#", "@", "`",
    "2024-13-45", "12:30:45", "0b2", "08", ".inf", "-.inf", ".nan", "1:1:1:1", "\x00", "\u2028", "\ufeff", "é: ü", "batch: *b", "&b 64",
    "{{a: 1}: 2}", "[1, 2]: 3", "!!str 5", "!!null x", "!!omap [a: 1]", "!!pairs [a: 1]", "!!bool maybe", "=", "<<",
]  # fmt: skip
SHARES = 12  # each a share of the odd values under every key, other ones under the next
# a few lines that stand for 9 ** 9 entries, by aliases and by merging
LAUGHS = "workload:\n  args:\n    a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"    {name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGED_LAUGHS = "workload:\n  args:\n    a: &a {x: 1}\n" + "".join(
    f"    {name}: &{name} {{<<: [{', '.join([f'*{before}'] * 9)}]}}\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def outcome(*args, **kwargs):
    """The loaded config or the ConfigError; any other exception fails the test."""
    try:
        return load_config(*args, environ={}, **kwargs)
    except ConfigError as exc:
        return exc


def check(found, *, file_name):
    if isinstance(found, ConfigError):
        message = str(found)
        message.encode()  # a terminal must be able to print it
        assert file_name in message or any(name in message for name in NAMES), message
        assert len(message) < 5000
        assert pickle.loads(pickle.dumps(found)).what == found.what
        return
    # what loads can also be saved, and read again as the same run
    again = load_config(flags=dict(flattened(yaml.safe_load(yaml.safe_dump(found.to_dict())))), environ={})
    assert again.hash() == found.hash()


def flattened(values):
    for section, content in values.items():
        if isinstance(content, dict):
            yield from ((f"{section}.{key}", value) for key, value in content.items())
        else:
            yield section, content


def places(values, path=()):
    """Every path into nested dicts and lists."""
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in list(items):
        yield (*path, key)
        yield from places(value, (*path, key))


def mutate(config, rng):
    """One small accident somewhere in a nested config."""
    path = rng.choice(list(places(config)) or [()])
    if not path:
        return
    parent = config
    for step in path[:-1]:
        parent = parent[step]
    key, value = path[-1], parent[path[-1]]
    kind = rng.choice(["drop", "rename", "retype", "odd", "odd", "nest", "list", "move", "duplicate"])
    if kind == "drop":
        del parent[key]
    elif kind == "rename" and isinstance(parent, dict):
        name = str(key)
        cut = rng.randrange(len(name) + 1)
        parent[rng.choice([name[:cut] + name[cut + 1 :], name + "s", name.upper(), name.replace("_", "-"), "", 7])] = (
            parent.pop(key)
        )
    elif kind == "retype":
        parent[key] = rng.choice([str(value), [value], {"value": value}, float("nan"), len(str(value)), repr(value)])
    elif kind == "odd":
        parent[key] = rng.choice(ODD_VALUES)
    elif kind == "nest":
        for _ in range(rng.choice([1, 3, 60, 200])):
            value = {"a": value} if rng.random() < 0.5 else [value]
        parent[key] = value
    elif kind == "list":
        parent[key] = [value] * rng.choice([1, 2, 50])
    elif kind == "move":
        target = config[rng.choice(list(config))]
        if isinstance(target, dict) and target is not value:
            target[key if isinstance(key, str) else "moved"] = copy.deepcopy(value)
    elif kind == "duplicate" and isinstance(parent, dict):
        parent[f"{key}2"] = copy.deepcopy(value)


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    """Writes text to job.yaml, over what stood there, and gives its path."""
    path = tmp_path_factory.mktemp("configs") / "job.yaml"

    def write(text):
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        return path

    return write


def examples(number):
    return settings(
        max_examples=number if settings.get_current_profile_name() == "thorough" else number // 4,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def test_the_config_that_is_mutated_loads(write):
    assert isinstance(outcome(write(TEXT)), RunConfig)


@pytest.mark.combination
@examples(300)
@given(seed=st.integers(0, 2**32), num=st.integers(1, 4))
def test_a_mutated_file_loads_or_names_the_key(write, seed, num):
    rng = random.Random(seed)
    config = copy.deepcopy(VALID)
    for _ in range(num):
        mutate(config, rng)
    check(outcome(write(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))), file_name="job.yaml")


@pytest.mark.combination
@examples(400)
@given(seed=st.integers(0, 2**32), num=st.integers(1, 4))
def test_mutated_overrides_load_or_name_the_key(seed, num):
    """From Python, where values come as objects and not through YAML."""
    rng = random.Random(seed)
    config = copy.deepcopy(VALID)
    for _ in range(num):
        mutate(config, rng)
    flags = {str(key): value for key, value in flattened(config)}
    check(outcome(flags=flags), file_name="override")


@pytest.mark.combination
@examples(400)
@example(cuts=[(0, 10_000, LAUGHS)])
@example(cuts=[(0, 10_000, MERGED_LAUGHS)])
@given(
    cuts=st.lists(
        st.tuples(
            st.integers(0, len(TEXT)),
            st.integers(0, 40),
            st.one_of(
                st.sampled_from(ODD_TEXT),
                st.text(max_size=8),
                st.sampled_from(["", "\n", "  ", ": ", "- ", "&a ", "*a"]),
            ),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_damaged_text_loads_or_names_the_file(write, cuts):
    """Pieces cut out and odd pieces put in: anchors, tags, control characters, unclosed brackets."""
    text = TEXT
    for start, length, piece in cuts:
        text = text[:start] + piece + text[start + length :]
    check(outcome(write(text)), file_name="job.yaml")


@examples(200)
@given(
    words=st.lists(
        st.one_of(
            st.builds(lambda key, value: f"--{key}={value}", st.sampled_from(NAMES), st.sampled_from(ODD_TEXT)),
            st.builds(lambda key: f"--{key}", st.sampled_from([*NAMES, "workload.args.width", "workload.args.", ""])),
            st.sampled_from([str(value)[:50] for value in ODD_VALUES]),
            st.text(max_size=12),
        ),
        max_size=6,
    )
)
def test_any_flags_load_or_name_the_word(write, words):
    found = outcome(write(SHORT), flags=words)
    if isinstance(found, ConfigError) and found.what == "argument":
        assert "options have the form" in str(found)
    else:
        check(found, file_name="job.yaml")


@pytest.mark.combination
def test_truncated_files_load_or_name_the_file(write):
    for length in range(0, len(TEXT), 3):
        check(outcome(write(TEXT[:length])), file_name="job.yaml")


IN_TURN = [0, *(pytest.param(first, marks=pytest.mark.combination) for first in range(1, SHARES))]


@pytest.mark.always("[0]")
@pytest.mark.parametrize("first", IN_TURN)
def test_odd_values_under_every_key_load_or_name_that_key(first):
    for number, key in enumerate(known_keys(), first):
        for value in ODD_VALUES[number % SHARES :: SHARES]:
            found = outcome(flags={**dict(flattened(VALID)), key: value})
            if isinstance(found, ConfigError):
                assert key in str(found), str(found)
            check(found, file_name="override")


@pytest.mark.always("[0]")
@pytest.mark.parametrize("first", IN_TURN)
def test_odd_text_under_every_key_loads_or_names_the_file_or_key(write, first):
    for number, key in enumerate(known_keys(), first):
        section, _, name = key.partition(".")
        config = yaml.safe_load(SHORT)
        if name:
            config.setdefault(section, {})[name] = "PIECE"
        else:
            config[section] = "PIECE"
        text = yaml.safe_dump(config)
        for piece in ODD_TEXT[number % SHARES :: SHARES]:
            check(outcome(write(text.replace("PIECE", piece))), file_name="job.yaml")
