"""Code of the user's folder on its way to workers that cannot import it."""

import functools
import importlib
import subprocess
import sys

from ray import cloudpickle

from scaleray.launch.workers.loaded_workload import ship_user_code

TEXT = """
import functools

@functools.cache
def table():
    return [1, 2, 3]

@functools.lru_cache(maxsize=7)
def half(x):
    return x / 2

class Net:
    def build_model(self): ...
    def datasets(self): return table()
    def loss(self, model, batch): return half(4)
"""
READ = "import sys, pickle; w = pickle.load(sys.stdin.buffer); print(w.datasets(), w.loss(0, 0), type(w).loss.__globals__['half'].cache_parameters()['maxsize'])"


def test_functions_under_a_cache_travel_by_value_like_all_others(tmp_path, monkeypatch):
    (tmp_path / "cached_code.py").write_text(TEXT)
    monkeypatch.syspath_prepend(str(tmp_path))
    workload = importlib.import_module("cached_code").Net()
    ship_user_code(workload)
    told = subprocess.run([sys.executable, "-c", READ], input=cloudpickle.dumps(workload), capture_output=True, cwd="/")
    assert told.stdout.split() == [b"[1,", b"2,", b"3]", b"2.0", b"7"], told.stderr.decode()[-500:]


def test_cached_functions_of_installed_packages_are_named_as_before():
    assert cloudpickle.loads(cloudpickle.dumps(named_as_before)) is named_as_before


@functools.cache
def named_as_before():
    return 1
