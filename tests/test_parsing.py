"""YAML and JSON of users: limits that stop what would take minutes, merges, and what every reader of a user's file says of it."""

from __future__ import annotations

import json

import pytest
import yaml

from jobs.planner_evidence.__main__ import main as judge_planner
from jobs.planner_evidence.published import read_folder
from scaleray.cli.main import run_command
from scaleray.common.parsing import MOST_CHARACTERS, BoundedLoader, TooLarge, load_json, load_yaml, near_words
from scaleray.config import RunConfig, load_config
from scaleray.config.hardware.cluster_file import read_cluster_file
from scaleray.config.hardware.hardware_file import read_hardware_file
from scaleray.config.loading import read_file
from scaleray.errors import ConfigError, ScaleRayError
from scaleray.planner.answers.measurement import read_measurement
from scaleray.planner.models.flop_count_as_model import read_profile
from scaleray.planner.models.names import find_model
from scaleray.recording.find_record import record_of
from scaleray.recording.replay import replay
from scaleray.sweeps.sweep_folder import read_asked

DEEP = "[" * 100_000 + "]" * 100_000
NEEDED = {"workload.name": "a:B", "batch.global_size": 8, "optimizer.learning_rate": 0.1, "stop.after": "5 steps"}


class Counting(BoundedLoader):
    """Counts what the loader looks at, as time says nothing on a busy machine."""

    num_tokens = 0

    def get_token(self):
        Counting.num_tokens += 1
        return super().get_token()


def written(folder, text):
    path = folder / "job.yaml"
    path.write_text(text)
    return path


def flow(count):
    return "a: [" + ",".join(map(str, range(count))) + "]"


@pytest.mark.parametrize(
    "text",
    [flow(2000), "a: " + "[" * 90 + flow(2000)[3:] + "]" * 90, "".join(f"k{i}: 1\n" for i in range(1000)),
     "a: {" + ",".join(f"k{i}: 1" for i in range(1000)) + "}"],
    ids=["flow", "nested", "keys", "flow keys"],
)  # fmt: skip
def test_what_is_too_long_is_refused_before_it_is_read_to_its_end(text, tmp_path, monkeypatch):
    monkeypatch.setattr("scaleray.common.parsing.MOST_NODES", 500)
    Counting.num_tokens = 0
    loader = Counting(text)
    with pytest.raises(TooLarge, match="500 keys and values"):
        loader.get_single_node()
    assert Counting.num_tokens < 2300  # of 4,000 and more
    with pytest.raises(ConfigError, match=r"job\.yaml is too large: it has more than 500 keys and values"):
        read_file(written(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "says"),
    [("# " + "x" * MOST_CHARACTERS, "1,000,002 characters, and at most 1,000,000"), ("a: " + "1:" * 2_000 + "1", "4,001 digits"),
     ("a: 0x" + "f" * 5_000, "digits"), ("a: " + "[" * 5000, "brackets"), ("- " * 5000 + "1", "nested too deep"),
     ("a: &a {" + ",".join(f"k{i}: 1" for i in range(2000)) + "}\nb: {<<: [" + ",".join(["*a"] * 2000) + "]}", "merges"),
     ("? " + "x" * 100_000 + "\n: 1", "at most 200 characters"), ("workload:\n  ? " + "x" * 100_000 + "\n  : 1", "at most 200 characters")],
)  # fmt: skip
def test_each_limit_is_one_clear_error_that_says_what_is_allowed(tmp_path, text, says):
    with pytest.raises(ConfigError, match=says) as caught:
        read_file(written(tmp_path, text))
    assert "job.yaml" in str(caught.value) and len(str(caught.value)) < 600


def test_brackets_in_comments_and_strings_are_no_nesting(tmp_path):
    text = "# " + "[" * 150 + "\nworkload:\n  name: a:B\n  args: {pattern: '" + "[{" * 150 + "', other: 1}\n"
    assert read_file(written(tmp_path, text))["workload.args"].value == {"pattern": "[{" * 150, "other": 1}


MERGED = [
    "a: &x {p: 1, q: 2}\nb: {<<: *x, q: 3}",
    "a: &x {p: 1}\nb: &y {p: 2, r: 4}\nc: {<<: [*x, *y], s: 5}",
    "a: &x {p: 1}\nb: &y {<<: *x, q: 2}\nc: {r: 3, <<: *y}",
    "a: &x {p: {deep: [1, 2]}}\nb: {<<: *x}",
    "- &x {a: 1}\n- {<<: *x, b: 2}",
]


@pytest.mark.parametrize("text", MERGED)
def test_merges_mean_what_pyyaml_says(text):
    assert load_yaml(text) == yaml.safe_load(text)


def test_a_section_of_a_config_takes_what_is_merged_into_it_below_its_own_keys(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(
        "batch: &b {global_size: 64, micro_size: 16}\nworkload: {name: 'a:B', args: {given: {<<: *b, micro_size: 2}}}\n"
        "optimizer: {learning_rate: 0.1}\nstop: {after: 5 steps}\n"
    )
    config = load_config(path, environ={})
    assert config.workload.args == {"given": {"global_size": 64, "micro_size": 2}} and config.batch.micro_size == 16
    path.write_text(
        "workload: {name: 'a:B', args: {b: &b {global_size: 64, micro_size: 16}}}\nbatch: {<<: *b, micro_size: 2}\n"
        "optimizer: {learning_rate: 0.1}\nstop: {after: 5 steps}\n"
    )
    assert (load_config(path, environ={}).batch.global_size, load_config(path, environ={}).batch.micro_size) == (64, 2)
    path.write_text("workload: {name: 'a:B'}\nbatch: {<<: 5}\n")
    with pytest.raises(ConfigError, match=r"job\.yaml:2.*<< needs a mapping"):
        load_config(path, environ={})
    path.write_text("workload: &w {name: 'a:B'}\nbatch: {<<: *w, global_size: 1}\n")
    with pytest.raises(ConfigError, match=r"batch\.name"):
        load_config(path, environ={})


def test_a_long_word_is_not_compared_with_known_ones_and_is_shown_in_part():
    assert near_words("stratgy", ["strategy", "batch"]) == ["strategy"] and near_words("x" * 10**6, ["x" * 10**6]) == []
    with pytest.raises(ConfigError) as caught:
        load_config(flags={**NEEDED, "x" * 10**6: 1}, environ={})
    assert len(str(caught.value)) < 800
    with pytest.raises(ScaleRayError):
        find_model("g" * 10**6)


@pytest.mark.parametrize("key", ["workload.name", "workload.weights", "checkpoint.storage_path", "checkpoint.copy_path", "tracking.uri", "tracking.run_name"])  # fmt: skip
def test_a_nul_in_any_text_of_a_config_is_one_error_that_names_the_key(key):
    with pytest.raises(ConfigError, match=f"{key}.*NUL"):
        load_config(flags={**NEEDED, key: "a\0b"}, environ={})


def test_a_nul_is_found_in_a_file_in_arguments_of_the_workload_and_in_the_path_itself(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("workload: {name: 'a:B', args: {deep: [{file: \"a\\0b\"}]}}\nbatch: {global_size: 8}\n")
    with pytest.raises(ConfigError, match=r"job\.yaml:1.*NUL"):
        load_config(path, environ={})
    with pytest.raises(ConfigError, match="config file"):
        load_config("a\0b", environ={})
    with pytest.raises(ValueError, match="NUL"):
        RunConfig.model_validate({"workload": {"name": "a\0:B"}})


@pytest.mark.parametrize(
    "words",
    [["train", "-c", "a\0b"], ["plan", "--profile", "a\0b"], ["plan", "--model", "gpt2", "--cluster", "h100:8", "--html", "a\0b"],
     ["report", "a\0b"], ["compare", "a\0b", "c"], ["checkpoint", "list", "a\0b"], ["tracking", "replay", "a\0b"],
     ["verify", "--workload.name", "a\0b"], ["sweep", "--continue", "a\0b"]],
)  # fmt: skip
def test_a_nul_in_an_argument_of_any_command_is_one_error(words, capsys):
    assert run_command(words) == 2
    error = capsys.readouterr().err
    assert "NUL" in error and "Traceback" not in error and "\0" not in error


def read_deep_sweep(path):
    (path.parent / "asked.json").write_text(DEEP)
    return read_asked(str(path.parent))


@pytest.mark.parametrize(
    "read",
    [read_profile, read_measurement, read_hardware_file, read_cluster_file, lambda path: read_folder(path.parent), replay,
     lambda path: record_of(path.read_text(), where="there"), read_deep_sweep],
    ids=["profile", "from-run", "hardware", "cluster", "published", "replay", "record", "sweep"],
)  # fmt: skip
@pytest.mark.parametrize("text", [DEEP, '{"a": ' * 50_000 + "1" + "}" * 50_000], ids=["lists", "mappings"])
def test_every_reader_of_a_users_file_refuses_what_is_nested_too_deep(read, text, tmp_path):
    path = tmp_path / "deep.json"
    path.write_text(text)
    with pytest.raises(ScaleRayError) as caught:
        read(path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("command", ["fit", "validate"])
def test_a_data_file_that_is_nested_too_deep_is_one_message(command, tmp_path, capsys):
    (tmp_path / "deep.json").write_text(DEEP)
    assert judge_planner([command, str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "deep.json" in error and "nested too deep" in error and "Traceback" not in error


def test_json_that_is_not_too_deep_is_read_as_ever():
    assert load_json(json.dumps({"a": [1, {"b": None}]})) == {"a": [1, {"b": None}]}


@pytest.mark.parametrize("name", ["gpt-99999999999999b", "99999999b", "gpt-0.001m"])
def test_a_size_that_no_model_has_is_refused_before_anything_is_computed(name, capsys):
    words = ["plan", "--model", name, "--cluster", "h100:8", "--global-batch", "8"]
    assert run_command(words) == 2
    assert "10,000b parameters" in capsys.readouterr().err
