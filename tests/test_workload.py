"""Finding and building the user's workload, and showing the user's own lines when it fails."""

import asyncio
import importlib
import pydoc
import re
import signal
import sys
import types
from pathlib import Path

import pytest

from scaleray.common import user_code
from scaleray.config import load_config
from scaleray.errors import DataError, WorkloadError
from scaleray.workload import (
    Workload,
    build_workload,
    call_user_code,
    load_workload,
    name_of,
    no_exit,
    user_modules,
    user_traceback,
)

NEEDED = {"batch.global_size": 8, "optimizer.learning_rate": 0.1, "stop.after": "1 epoch"}
GOOD = """
class Small:
    def __init__(self, width=3, *, depth=1):
        self.width, self.depth = width, depth

    def build_model(self): ...
    def datasets(self): ...
    def loss(self, model, batch): ...
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder of the user's, which is the current one; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def refusal(name, args=None, **kwargs):
    with pytest.raises(WorkloadError) as caught:
        load_workload(name, args or {}, **kwargs)
    return str(caught.value)


# finding


def test_a_file_and_a_module_are_both_found_from_the_current_folder(project):
    write(project, "recipes/small_one.py", GOOD)
    assert load_workload("recipes/small_one.py:Small", {"width": 5}).width == 5
    assert load_workload("recipes.small_one:Small", {"depth": 2}).depth == 2
    absolute = str(project / "recipes/small_one.py")
    assert load_workload(f"{absolute}:Small", {}).width == 3


def test_a_relative_file_is_looked_up_beside_the_config_too(project, monkeypatch):
    write(project, "recipes/small_two.py", GOOD)
    (project / "elsewhere").mkdir()
    monkeypatch.chdir(project / "elsewhere")
    assert load_workload("small_two.py:Small", {}, base_dir=project / "recipes").width == 3
    message = refusal("small_none.py:Small", base_dir=project / "recipes")
    assert "does not exist" in message and str(project / "recipes") in message and "elsewhere" in message


def test_a_file_can_import_its_neighbours(project):
    write(project, "recipes/layers_of_mine.py", "WIDTH = 7\n")
    write(
        project,
        "recipes/uses_neighbours.py",
        "from layers_of_mine import WIDTH\n" + GOOD.replace("width=3", "width=WIDTH"),
    )
    assert load_workload("recipes/uses_neighbours.py:Small", {}).width == 7


def test_the_same_file_is_imported_once(project):
    write(project, "counted.py", GOOD)
    assert type(load_workload("counted.py:Small", {})) is type(load_workload("counted.py:Small", {}))


def test_a_file_named_like_a_library_does_not_replace_it(project):
    import json

    write(project, "json.py", GOOD)
    assert load_workload("json.py:Small", {}).width == 3
    assert sys.modules["json"] is json


@pytest.mark.parametrize("name", ["", "Small", "digits.py", ":Small", "digits.py:"])
def test_a_name_without_both_parts_is_refused_with_an_example(name):
    assert "for example: jobs/digits.py:Digits" in refusal(name)


def test_a_class_that_is_not_there_names_those_that_are(project):
    write(project, "recipe_a.py", GOOD + "from pathlib import Path\nclass Other: ...\n")
    message = refusal("recipe_a.py:Smal")
    assert "has no 'Smal'" in message and "it defines: Small, Other" in message


def test_a_module_that_is_not_there_is_refused():
    assert "No module named 'no_such_package_at_all'" in refusal("no_such_package_at_all.jobs:Digits")


# building


def test_missing_methods_are_named(project):
    write(project, "recipe_b.py", "class Bare:\n    def loss(self, model, batch): ...\n")
    message = refusal("recipe_b.py:Bare")
    assert "lacks build_model, datasets" in message and "Bring your own workload" in message


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ("lightning.pytorch.LightningModule", "as_workload(Module, DataModule)"),
        ("transformers.PreTrainedModel", "scaleray.hugging_face:CausalLanguageModel"),
        ("torch.nn.Module", "return the model from build_model()"),
    ],
)
def test_what_other_libraries_train_shows_the_way_to_a_workload(base, words):
    with pytest.raises(WorkloadError, match=rf"(?s)lacks build_model, datasets, .*{re.escape(words)}"):
        build_workload(type("Bare", (pydoc.locate(base),), {}), {}, name="mine.py:Bare")


def test_arguments_that_do_not_fit_show_the_signature(project):
    write(project, "recipe_c.py", GOOD)
    message = refusal("recipe_c.py:Small", {"widht": 3})
    assert "unexpected keyword argument 'widht'" in message and "Small(width=3, *, depth=1)" in message


def test_the_base_class_says_what_is_needed_and_its_options_do_nothing():
    plain = build_workload(Workload, {}, name="Workload")
    for call in (plain.build_model, plain.datasets, lambda: plain.loss(None, {})):
        with pytest.raises(NotImplementedError):
            call()
    assert plain.metrics(None, {}) == {} and plain.optimizer(None, None) is None and plain.blocks(None) is None


# failing


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import no_such_library\n" + GOOD, "No module named 'no_such_library'"),
        ("def helper():\n    return 1 / 0\nhelper()\n" + GOOD, "ZeroDivisionError"),
        (GOOD.replace("self.width, self.depth = width, depth", "raise OSError('no disk')"), "no disk"),
        ("import sys\nsys.exit(3)\n" + GOOD, "SystemExit: 3"),
        ("def broken(:\n", "SyntaxError"),
    ],
)
def test_an_error_in_the_users_code_shows_the_users_lines_only(project, text, words):
    write(project, "recipe_d.py", text)
    message = refusal("recipe_d.py:Small")
    assert words in message and "recipe_d.py" in message
    assert "importlib" not in message and "scaleray/workload.py" not in message
    if "being imported" in message:
        assert "recipe_d" not in sys.modules  # it can be mended and tried again


def test_lines_of_a_folder_that_only_begins_like_scalerays_own_are_the_users(project, monkeypatch):
    own = project / "scaleray"
    write(own, "workload.py", "")
    monkeypatch.setattr("scaleray.workload.__file__", str(own / "workload.py"))
    write(project, "scaleray_jobs/recipe_e.py", "def helper():\n    return 1 / 0\nhelper()\n")
    message = refusal("scaleray_jobs/recipe_e.py:Small")
    assert message.count("recipe_e.py") >= 3  # the name, the call and the line that failed


def test_errors_that_are_meant_for_the_user_pass_unchanged():
    error = DataError("the data", "missing", "it is needed")

    def raises():
        raise error

    with pytest.raises(DataError) as caught:
        call_user_code(raises, what="x", doing="y")
    assert caught.value is error
    assert call_user_code(lambda: 5, what="x", doing="y") == 5


def test_an_interrupt_is_not_taken_for_a_mistake():
    def raises():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call_user_code(raises, what="x", doing="y")


def test_a_traceback_without_lines_of_the_user_keeps_its_last():
    import json

    try:
        json.loads("{")
    except ValueError as exc:
        shown = user_traceback(exc.with_traceback(exc.__traceback__.tb_next))
    assert "json" in shown and "JSONDecodeError" in shown


# travelling


def test_the_users_modules_travel_and_installed_ones_do_not(project):
    write(project, "jobs_of_mine/parts/helper_f.py", "VALUE = 1\n")
    write(project, "jobs_of_mine/recipe_f.py", "import numpy\nfrom parts.helper_f import VALUE\n" + GOOD)
    workload = load_workload("jobs_of_mine/recipe_f.py:Small", {})
    names = {module.__name__ for module in user_modules(workload)}
    assert {"recipe_f", "parts.helper_f"} <= names
    assert not names & {"numpy", "pytest", "scaleray", "json"}
    assert all(Path(module.__file__).is_file() for module in user_modules(workload))
    assert user_modules(Workload()) == []


def test_an_exit_in_user_code_is_a_workload_error_and_any_other_exception_passes():
    with pytest.raises(WorkloadError, match=r"sys\.exit\(0\)") as caught, no_exit("loss()"):
        sys.exit(0)
    assert "test_workload.py" in str(caught.value)
    with pytest.raises(KeyError), no_exit("loss()"):
        raise KeyError("a")


def test_a_class_that_was_handed_over_names_itself_as_it_would_be_found(project, monkeypatch):
    (project / "mine.py").write_text("class Net:\n    class Inner: ...\n")
    monkeypatch.syspath_prepend(str(project))
    mine = importlib.import_module("mine")
    assert name_of(mine.Net) == name_of(mine.Net()) == "mine:Net"
    config = load_config(flags=NEEDED, environ={}, defaults={"workload.name": name_of(mine.Net.Inner)})
    assert config.workload.name == "mine:Net.Inner" and config.workload.stem == "inner"
    given = load_config(
        flags={**NEEDED, "workload.name": "o:Other"}, environ={}, defaults={"workload.name": name_of(mine.Net)}
    )
    assert given.workload.name == "o:Other"


def test_a_class_of_a_script_is_found_in_its_file_and_one_of_a_cell_nowhere(monkeypatch):
    of_a_script, cell = type("Net", (), {"__module__": "__main__"}), types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", cell)
    assert name_of(of_a_script) == "__main__:Net"
    cell.__file__ = "/somewhere/train_it.py"
    assert name_of(of_a_script) == "/somewhere/train_it.py:Net"


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no text")


class Final(BaseException):
    pass


@pytest.mark.parametrize("error", [Final("x"), GeneratorExit(), asyncio.CancelledError(), Unspeakable(), SystemExit(3)])
def test_everything_that_user_code_raises_is_an_error_of_it(error):
    def fails():
        raise error

    with pytest.raises(WorkloadError, match=f"(?s)datasets\\(\\) failed while reading.*{type(error).__name__}"):
        call_user_code(fails, what="datasets()", doing="reading the data")


@pytest.mark.parametrize("error", [Final("x"), BaseException("x"), GeneratorExit(), SystemExit(3)])
def test_what_is_no_exception_does_not_end_the_process(error):
    def fails():
        raise error

    with pytest.raises(WorkloadError, match=f"the workload's code (raised {type(error).__name__}|called sys.exit)"):
        within_no_exit(fails)


def test_a_generator_that_is_closed_inside_is_no_mistake_of_user_code():
    ended = []
    code = "def rows(context, ended):\n    try:\n        with context:\n            yield 1\n    finally:\n        ended.append(1)"
    ours = {}
    exec(compile(code, user_code.__file__, "exec"), ours)  # a generator of scaleray's own
    generator = ours["rows"](no_exit("the workload's code"), ended)
    next(generator)
    generator.close()
    assert ended == [1]


def test_a_signal_that_ends_the_process_is_no_mistake_of_user_code():
    def handler(number, frame):
        sys.exit(15)  # as Ray answers SIGTERM

    before = signal.signal(signal.SIGTERM, handler)
    try:
        for run in (lambda call: call_user_code(call, what="datasets()", doing="reading"), within_no_exit):
            with pytest.raises(KeyboardInterrupt):
                run(lambda: signal.raise_signal(signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, before)


def within_no_exit(call):
    with no_exit("the workload's code"):
        call()
