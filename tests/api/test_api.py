"""What the commands do, called from Python."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import re
import typing
from pathlib import Path

import pytest
import study_examples

import scaleray
from scaleray.errors import ConfigError

CONFIG = {"batch.global_size": 8, "optimizer.learning_rate": 0.1, "stop.after": "2 epochs"}


def test_every_public_function_has_typed_arguments_and_says_what_it_does():
    functions = [name for name in scaleray.__all__ if inspect.isfunction(getattr(scaleray, name))]
    assert {"train", "verify", "study", "sweep", "plan", "compare", "report", "check", "load"} <= set(functions)
    for name in functions:
        function = getattr(scaleray, name)
        untyped = [p.name for p in inspect.signature(function).parameters.values() if p.annotation is p.empty]
        assert not untyped and len(function.__doc__) > 80, name


def test_every_public_name_is_on_the_page():
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    assert set(re.findall(r"^### (\w+)", page, re.MULTILINE)) == set(scaleray.__all__) - {"RunConfig"}


COMMANDS = {
    "train": "train", "verify": "verify", "study": "study", "sweep": "sweep", "plan": "plan", "compare": "compare",
    "profile": "profile", "report": "report", "evaluate": "evaluate", "predict": "predict", "export": "export_model", "check": "check", "init": "write_project",
    "checkpoint list": "list_checkpoints", "checkpoint verify": "verify_checkpoints",
    "checkpoint prune": "prune_checkpoints", "checkpoint rebuild": "rebuild_checkpoint",
    "checkpoint import": "import_weights", "config show": "show_config",
    "config keys": "config_keys", "config schema": "config_schema", "tracking replay": "replay", "tracking ui": "tracking_ui",
    "watch": "watch", "cluster write": "write_cluster_files",
    "cluster up": "cluster_up", "cluster status": "cluster_status", "cluster down": "cluster_down",
    "dashboards write": "write_dashboards", "dashboards install": "install_dashboards",
    "gate": "gate", "promote": "promote", "path start": "start_path", "path next": "next_on_path",
    "path skip": "skip_on_path", "path redo": "redo_on_path", "path status": "find_path",
    "rollback": "rollback", "submit": "submit", "jobs list": "list_jobs", "jobs logs": "job_logs", "jobs stop": "stop_job", "doctor": "doctor",
    "tracking curve": "experiment_curves", "tracking invalidate": "invalidate_experiment",
}  # fmt: skip
OTHER_NAMES = {
    "kind": "kinds", "path": ("run", "folder"), "run": "what", "config": "what", "from_": "kind", "file": "out",
}  # fmt: skip
"""Options whose argument has another name in Python."""
OF_A_COMMAND = {
    "json", "once", "all_", "follow", "rows", "open_browser", "max_minutes", "fail_if_slower", "expect_steps", "overrides", "interval_s", "report", "strict", "block", "export", "only_print",
}  # fmt: skip
"""What is a matter of printing, of exit codes, or of strings on a command line."""


def options_of(words):
    """Names of the arguments of a command's function, those of its classes of options among them."""
    from scaleray.cli.main import app

    command = app
    for word in words.split():
        command = command[word]
    function = command.default_command
    for name, kind in typing.get_type_hints(function).items():
        if name == "return":
            continue
        yield from [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else [name]


ELSEWHERE = {"config schema": {"out"}, "promote": {"verify"}, "predict": {"config"}, "init": {"arguments"}}
"""What a function gives in another way: the schema is returned, `check_promoted` verifies, `workload` is what the config of `predict` names, and `init` takes the
values that `config_of` finds in TrainingArguments."""


def others(name):
    given = OTHER_NAMES.get(name, ())
    return (given,) if isinstance(given, str) else given


@pytest.mark.parametrize("words", COMMANDS)
def test_every_option_of_a_command_is_an_argument_in_python(words):
    known = set(inspect.signature(getattr(scaleray, COMMANDS[words])).parameters)
    missing = {name for name in options_of(words) if not {name, *others(name)} & known} - OF_A_COMMAND
    assert not missing - ELSEWHERE.get(words, set())


def test_every_command_has_a_function():
    from scaleray.cli.main import app

    def names(command, before=""):
        for name in command:
            if name.startswith("-"):
                continue
            inner = command[name]
            full = f"{before}{name}"
            if inner.default_command is not None:
                yield full
            yield from names(inner, f"{full} ")

    # explain prints what the planner's figures are
    assert set(names(app)) - {"plan explain"} == set(COMMANDS)


def test_plans_are_made_by_arithmetic():
    advice = scaleray.plan(model="gpt2", cluster="h100:8x2", global_batch=64)
    assert advice.best.layout.num_gpus == 16 and advice.choices


@pytest.mark.combination
def test_records_are_compared_and_reported(tmp_path):
    folders = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text(study_examples.run_record().to_json())
        (tmp_path / name / "steps.csv").write_text(study_examples.steps_csv(50))
        folders.append(tmp_path / name)
    assert scaleray.compare(*folders).to_dict()
    page, *_ = scaleray.report(folders[0], out=tmp_path / "page")
    assert page == tmp_path / "page" / "report.html" and page.exists()


@pytest.mark.combination
def test_a_class_is_verified_without_a_config_file(tmp_path, uri):
    from small_runs import Classify

    config = {**CONFIG, "checkpoint.storage_path": str(tmp_path), "tracking.uri": uri}
    sizes = {"strategies": ["ddp"], "world_sizes": [1], "accumulation": [2], "steps": 2}
    certificate = scaleray.verify(config, Classify, local=True, **sizes)
    assert certificate.passed


def test_a_class_of_the_main_script_reaches_other_processes():
    from types import ModuleType

    from scaleray.launch.workers.gloo import UserCode, pickled

    main = ModuleType("__main__")
    exec("class Mine:\n    size = 3\n    def datasets(self):\n        return self.size", vars(main))
    found = pickle.loads(pickled(UserCode(None, {}, None, main.Mine())))
    assert found.load().datasets() == 3
    with pytest.raises((pickle.PicklingError, AttributeError)):  # what it takes the place of
        pickle.dumps(main.Mine())


def test_what_a_study_or_sweep_cannot_be_is_one_error():
    from small_runs import Classify

    with pytest.raises(ConfigError, match=r"at least 1|from 1"):
        scaleray.study(CONFIG, Classify, world_sizes=[0], local=True)
    with pytest.raises(ConfigError, match="--trials"):
        scaleray.sweep(CONFIG, Classify, trials=0)
