"""A packed model runs the code in its folder, whatever lies in the current folder, in sys.path or in sys.modules."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import cloudpickle
import numpy as np
import pytest

import scaleray
from scaleray.errors import WorkloadError
from scaleray.models.load import find_parts
from scaleray.models.packed import pack
from scaleray.models.packed_code import installed_module, packed_module
from scaleray.models.trained_run import find_trained
from tests.models.conftest import WORKLOAD

MORE = """
import sharing_neighbour
from sharing_package.inner import ANSWER

class Versioned(Points):
    def predict(self, model, batch):
        import sharing_lazy
        answers = [sharing_neighbour.ANSWER, ANSWER, sharing_lazy.ANSWER]
        return {"said": torch.tensor([answers] * len(batch["x"]))}

    def preprocessor(self):
        return Halved()

class Halved:
    version = sharing_neighbour.ANSWER

    def transform(self, columns):
        return {**columns, "x": columns["x"] / np.float32(2)}
"""
ROWS = {"x": np.eye(4, dtype=np.float32)}
FILES = {"sharing_neighbour.py", "sharing_lazy.py", "sharing_package/inner.py"}


def write(folder, answer):
    (folder / "sharing_package").mkdir(parents=True, exist_ok=True)
    (folder / "sharing_package/__init__.py").touch()
    for name in FILES:
        (folder / name).write_text(f"ANSWER = {answer}\n")


@pytest.fixture(scope="module")
def packed(tmp_path_factory, empty_database):
    """The folder of a packed model whose code says 1, and its checkout."""
    checkout = tmp_path_factory.mktemp("checkout")
    (checkout / "sharing.py").write_text(WORKLOAD + MORE)
    write(checkout, 1)
    record = scaleray.train(
        {
            "workload.name": f"{checkout}/sharing.py:Versioned",
            "batch.global_size": 8,
            "optimizer.learning_rate": 0.02,
            "stop.after": "2 steps",
            "checkpoint.storage_path": str(checkout / "runs"),
            "tracking.uri": f"sqlite:///{shutil.copy(empty_database, checkout / 'mlflow.db')}",
            "tracking.system_metrics": False,
        },
        local=True,
    )
    import sharing_lazy

    assert sharing_lazy.ANSWER == 1
    pack(find_trained(record.run_dir), find_parts(record.run_dir), checkout / "packed")
    return checkout / "packed", checkout


def said(model):
    return model.predict(ROWS)["said"][0].tolist()


@pytest.mark.combination
def test_the_code_in_the_folder_is_what_runs(packed, monkeypatch):
    folder, checkout = packed
    write(checkout, 2)  # the working tree goes on
    monkeypatch.chdir(checkout)
    monkeypatch.syspath_prepend(str(checkout))
    for name in [name for name in sys.modules if name.startswith("sharing")]:
        monkeypatch.delitem(sys.modules, name)
    import sharing
    import sharing_neighbour

    assert sharing_neighbour.ANSWER == 2
    before = list(sys.path), sys.dont_write_bytecode
    model = scaleray.load(folder)
    assert said(model) == [1, 1, 1] and model.preprocessor.version == 1
    assert not isinstance(model.workload, sharing.Versioned)
    assert (sys.path, sys.dont_write_bytecode) == before and not list(folder.rglob("__pycache__"))


def test_two_versions_in_one_process_have_their_own_neighbours(packed, tmp_path):
    champion = scaleray.load(packed[0])
    write(Path(shutil.copytree(packed[0], tmp_path / "other")) / "code", 3)
    challenger = scaleray.load(tmp_path / "other")
    assert (said(champion), said(challenger)) == ([1, 1, 1], [3, 3, 3])
    assert (champion.preprocessor.version, challenger.preprocessor.version) == (1, 3)
    write(tmp_path / "other/code", 4)
    assert said(scaleray.load(tmp_path / "other")) == [4, 4, 4], "the content counts, not the place"


def test_a_module_that_lies_outside_is_refused(packed, tmp_path, monkeypatch):
    copy = Path(shutil.copytree(packed[0], tmp_path / "copy"))
    (tmp_path / "sharing_outsider.py").write_text("ANSWER = 9\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with (copy / "code/sharing_lazy.py").open("a") as file:
        file.write("def later():\n    import sharing_outsider\n")
    with pytest.raises(WorkloadError, match=r"sharing_outsider in sharing_lazy\.py leads to .*sharing_outsider\.py"):
        scaleray.load(copy)


def test_a_link_to_a_module_outside_is_refused(packed, tmp_path):
    copy = Path(shutil.copytree(packed[0], tmp_path / "copy"))
    outside = (copy / "code/sharing_neighbour.py").rename(tmp_path / "outside.py")
    (copy / "code/sharing_neighbour.py").symlink_to(outside)
    with pytest.raises(WorkloadError, match="is not Python code in"):
        scaleray.load(copy)


def test_a_neighbour_that_is_missing_is_not_looked_for_elsewhere(packed, tmp_path, monkeypatch):
    copy = Path(shutil.copytree(packed[0], tmp_path / "copy"))
    (copy / "code/sharing_lazy.py").unlink()
    monkeypatch.syspath_prepend(str(packed[1]))
    with pytest.raises(WorkloadError, match="sharing_lazy"):
        scaleray.load(copy)


def test_a_workload_of_an_installed_package_is_not_taken_from_the_working_tree(tmp_path, monkeypatch):
    (tmp_path / "sharing_shadow.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed_module("numpy.linalg").__name__ == "numpy.linalg"
    with pytest.raises(ImportError, match="was in an installed package"):
        installed_module("sharing_shadow")


DYNAMIC = (
    "import importlib\nFOUND = importlib.import_module('o' + 'wn').VALUE", "FOUND = __import__('own').VALUE",
    "import importlib as il\nFOUND = il.import_module(name='own').VALUE", "FOUND = __import__('part.deep').deep.VALUE",
    "from importlib import import_module as im, util\nFOUND = im('own').VALUE", "FOUND = __import__('own', fromlist=['VALUE']).VALUE",
    "import importlib.util\nFOUND = importlib.import_module('.deep', 'part').VALUE", "from importlib import *\nFOUND = import_module('own').VALUE",
    "import importlib\ndef f(name):\n    import importlib\n    return importlib.import_module(name)\nFOUND = f('part.deep').VALUE",
    "import importlib\nFOUND = importlib.import_module('.own', __package__).VALUE", "FOUND = __import__('own', globals(), level=1).VALUE",
    "import importlib\nFOUND = importlib.__import__('own').VALUE", "import importlib.util as u\nFOUND = 7 * (u.find_spec('json') is not None)",
    "import importlib\nFOUND = getattr(importlib, 'import_module')('own').VALUE",
)  # fmt: skip
"""Code that imports a module whose name is known when it runs, and puts its value into FOUND."""


@pytest.mark.parametrize("text", [
    "import own", "import own as o", "import own, json", "from own import VALUE", "import part.deep", "import part.deep as d",
    "from part import deep", "from part.deep import VALUE", "from part.deep import *", "from . import own",
    "def f():\n    import own\n    return own.VALUE\nf()", "import importlib\nimportlib.import_module('own')",
    "from importlib import import_module\nimport_module('part.deep')", *DYNAMIC, "try:\n    import missing\nexcept ImportError:\n    import own",
    "if True: import own, part.deep", "import numpy.linalg, own\nnumpy.linalg.norm", "from __future__ import annotations\nimport own",
])  # fmt: skip
def test_every_form_of_import_finds_the_neighbour(tmp_path, text):
    folder = tmp_path / "code"
    (folder / "part").mkdir(parents=True)
    for name in ("own.py", "part/deep.py"):
        (folder / name).write_text("VALUE = 7\n")
    (folder / "part/__init__.py").touch()
    shown = {
        "import own": "own.VALUE", "import own as o": "o.VALUE", "import part.deep": "part.deep.VALUE",
        "import part.deep as d": "d.VALUE", "from part import deep": "deep.VALUE", "from own import VALUE": "VALUE",
        "from part.deep import *": "VALUE",
    }.get(text, "FOUND" if text in DYNAMIC else "7")  # fmt: skip
    (folder / "main.py").write_text(f'"""Text."""\n{text}\nFOUND = {shown}\n')
    module = packed_module(folder, "main.py")
    assert module.FOUND == 7 and module.__file__ == str(folder / "main.py")
    assert not {"own", "part", "part.deep"} & set(sys.modules)


@pytest.mark.parametrize("text", DYNAMIC[:12])
def test_a_name_known_when_the_code_runs_is_not_looked_for_in_the_working_tree(tmp_path, monkeypatch, text):
    (tmp_path / "tree/part").mkdir(parents=True)
    for name in ("own.py", "part/deep.py", "part/__init__.py"):
        (tmp_path / "tree" / name).write_text("VALUE = 8\n")
    (tmp_path / "code").mkdir()
    (tmp_path / "code/main.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "tree"))
    with pytest.raises(ImportError, match=r"own|deep|part"):
        packed_module(tmp_path / "code", "main.py")
    assert not {"own", "part", "part.deep"} & set(sys.modules)


def test_functions_take_their_importlib_to_other_processes(tmp_path):
    (tmp_path / "main.py").write_text("import importlib\ndef f(name):\n    return importlib.import_module(name)\n")
    module = packed_module(tmp_path, "main.py")
    sent = cloudpickle.loads(cloudpickle.dumps(module.importlib))
    assert sent.package == module.__package__ and sent.import_module("json").loads("1") == 1


@pytest.mark.parametrize("inside", ["", "site-packages-copy"])
def test_a_package_outside_without_an_init_file_is_refused(tmp_path, monkeypatch, inside):
    (tmp_path / "code").mkdir()
    (tmp_path / "code/main.py").write_text("import sharing_space.mod\n")
    (tmp_path / inside / "sharing_space").mkdir(parents=True)
    (tmp_path / inside / "sharing_space/mod.py").write_text("VALUE = 8\n")
    monkeypatch.syspath_prepend(str(tmp_path / inside))
    with pytest.raises(WorkloadError, match=r"sharing_space in main\.py leads to .*sharing_space"):
        packed_module(tmp_path / "code", "main.py")


def test_a_file_called_as_a_library_still_imports_that_library(tmp_path):
    (tmp_path / "json.py").write_text("import json\nFOUND = json.dumps([1])\n")
    assert packed_module(tmp_path, "json.py").FOUND == "[1]"
