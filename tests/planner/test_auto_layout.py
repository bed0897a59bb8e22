"""`parallel: auto`: the planner's layout in place of degrees."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from scaleray.cli.main import run_command
from scaleray.config import load_config
from scaleray.config.hardware.catalogue import CATALOGUE
from scaleray.config.hardware.cluster_text import parse_cluster
from scaleray.errors import ConfigError
from scaleray.launch.cluster.connection import Node
from scaleray.planner.answers.advise import advise
from scaleray.planner.answers.written_config import refusal
from scaleray.planner.ask import auto_layout, this_machine
from scaleray.planner.ask.asked_plan import question_of
from scaleray.planner.ask.plan_options import PlanOptions
from scaleray.planner.report.plan_text import layout_table

LANGUAGE = Path("jobs/language_model.yaml")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """One count of the workload for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("counts")))
        patch.delenv("RAY_ADDRESS", raising=False)
        yield


def loaded(*words, file=LANGUAGE):
    return auto_layout.load_planned(file, ["--parallel", "auto", "--scale.gpus-per-worker", "0", *words])


def test_a_small_model_gets_replicas_and_its_layout_is_reported(capsys):
    config = loaded("--scale.workers", "4")
    assert (config.strategy.name, config.degrees().replicate, config.batch.micro_size) == ("ddp", 4, 4)
    assert capsys.readouterr().err == "parallel: auto is ddp, data 4, micro-batch 4 x 1\n"
    assert config.scale == load_config(LANGUAGE, flags={"scale": {"workers": 4, "gpus_per_worker": 0}}).scale


def test_one_worker_has_no_layout():
    assert loaded() == load_config(LANGUAGE, flags=["--scale.gpus-per-worker", "0"])


@pytest.mark.parametrize(
    ("words", "degrees"),
    [
        (["--strategy.name", "pipeline"], {"pipeline": 2, "shard": 2}),
        (["--strategy.name", "fsdp", "--batch.micro-size", "2"], {"shard": 4}),
        (["--activations.checkpointing", "full"], {}),
        (["--strategy.name", "auto"], {"replicate": 4}),
    ],
)
def test_values_of_the_config_limit_the_choice(words, degrees):
    config = loaded("--scale.workers", "4", *words)
    alone = load_config(LANGUAGE, flags=words)
    found = config.degrees()
    assert {axis: getattr(found, axis) for axis in degrees} == degrees and found.workers == 4
    for key in ("strategy.name", "batch.micro_size", "activations.checkpointing"):
        section, name = key.split(".")
        asked = getattr(getattr(alone, section), name)
        if f"--{key.replace('_', '-')}" in words and asked != "auto":
            assert getattr(getattr(config, section), name) == asked


def test_a_layout_that_train_would_refuse_is_not_chosen():
    halving = ["--memory.on-out-of-memory", "halve", "--scale.workers", "4"]
    assert loaded(*halving).strategy.name == "ddp"
    with pytest.raises(ConfigError, match=r"on_out_of_memory is halve: .* strategy\.name pipeline"):
        loaded(*halving, "--strategy.name", "pipeline")


def test_a_file_may_say_auto_for_train_and_plan_and_its_written_config_does_not(tmp_path, capsys):
    file, out = tmp_path / "auto.yaml", tmp_path / "written.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(LANGUAGE.read_text()) | {"parallel": "auto"}))
    words = [
        "--cluster",
        "h100:8",
        "--write",
        str(out),
        "--workload.name",
        str(Path("jobs/language_model.py").resolve()) + ":LanguageModel",
    ]
    assert run_command(["plan", "-c", str(file), *words]) == 0, capsys.readouterr().err
    assert load_config(out, environ={}).degrees().workers == 8
    with pytest.raises(ConfigError, match=r"auto.yaml:\d+ parallel is auto: only train, check") as found:
        load_config(file, environ={})
    assert "scaleray plan -c FILE --here --write OUT" in str(found.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--parallel.tensor", "2"], "parallel.tensor is also given"),
        (["--scale.workers", "{min: 1, max: 2}"], "a fixed number of workers"),
        (["--scale.workers", "2", "--strategy.name", "tensor"], "no layout with strategy.name tensor"),
    ],
)
def test_each_contradiction_is_one_error(words, says):
    with pytest.raises(ConfigError, match=says):
        loaded(*words)


def test_without_a_file_there_is_no_workload_to_count(capsys):
    assert (
        run_command(
            [
                "train",
                "--parallel",
                "auto",
                "--workload.name",
                "jobs/digits.py:Digits",
                "--batch.global-size",
                "8",
                "--optimizer.learning-rate",
                "0.1",
                "--stop.after",
                "1 steps",
            ]
        )
        == 2
    )
    assert "give the config with -c" in capsys.readouterr().err


def test_a_study_compares_layouts_and_chooses_none(capsys):
    assert run_command(["study", "-c", str(LANGUAGE), "--parallel", "auto"]) == 2
    assert "flag parallel is auto: only train, check" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cluster", "workers", "nodes"),
    [
        ("h100:8x4", 32, (8, 4)),
        ("h100:8x4", 16, (8, 2)),
        ("h100:8x4", 4, (4, 1)),
        ("h100:4x2", 6, (3, 2)),
        ("cpu:2", 4, (4, 1)),
        ("h100:4x2", 16, (8, 2)),
    ],
)
def test_workers_fill_nodes_evenly(cluster, workers, nodes):
    found = auto_layout._of_workers(parse_cluster(cluster, CATALOGUE), workers)
    assert (found.gpus_per_node, found.num_nodes) == nodes


def test_the_cluster_of_ray_address_is_planned(monkeypatch):
    nodes = [Node(f"10.0.0.{number}", {"CPU": 8.0, "memory": 2.0**36}, {}) for number in range(2)]
    asked = []

    def ray_cluster(address, catalogue, *, has_gpus):
        asked.append((address, has_gpus))
        return this_machine.cluster_of_nodes(nodes, catalogue, has_gpus=has_gpus)

    monkeypatch.setattr(this_machine, "ray_cluster", ray_cluster)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert loaded("--scale.workers", "4").degrees().workers == 4
    assert asked == [("10.0.0.1:6379", False)]


def test_a_table_marks_the_layouts_that_train_refuses():
    options = PlanOptions(cluster="h100:4")
    question = question_of(options, config=LANGUAGE, overrides=["--memory.on-out-of-memory", "halve"])
    advice = advise(question)
    table = layout_table(advice, len(advice.choices))
    marked = [row for row in table.rows if row[0].endswith(" x")]
    assert marked and all("pp" in row[1] for row in marked) and len(marked) < len(table.rows)
    assert len([note for note in table.notes if "x scaleray train refuses it: memory.on_out_of_memory" in note]) == 1
    plain = replace(question, config=None)
    assert not any(refusal(one.layout, plain) for one in advice.choices)
