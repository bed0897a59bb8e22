"""Guards of the private parts of Ray and MLflow that scaleray overrides. Without a cluster."""

from __future__ import annotations

import inspect
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest

from scaleray.common import installed, private_parts
from scaleray.common.private_parts import FORKED_WORKERS, LEAN_NODE, LEAN_TRAINER, LOOPBACK, PARTS, SWITCH
from scaleray.config.loading import load_config, read_environment
from scaleray.errors import UsageError

ROOT = Path(__file__).parents[1]
READERS = {"scaleray/clusters/doctor/on_ray.py"}
"""Files that read a private value of Ray and override nothing."""
IMPORTED = re.compile(r"^\s*(?:import|from) ray\.\S*\b_\w+", re.MULTILINE)
OPTIONAL = [part for part in PARTS if not part.protects]


@pytest.fixture(autouse=True)
def nothing_logged_before(monkeypatch):
    monkeypatch.delenv(SWITCH, raising=False)
    private_parts._log_once.cache_clear()


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_the_installed_libraries_are_as_recorded(part, caplog):
    assert part.is_used(), caplog.text


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_the_switch_turns_off_what_only_saves_time(part, monkeypatch, caplog):
    monkeypatch.setenv(SWITCH, "0")
    assert part.is_possible() is part.is_used() is part.protects
    assert not caplog.records


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_another_release_turns_off_what_only_saves_time(part, monkeypatch, caplog):
    monkeypatch.setattr(installed, "NEWEST_TESTED", dict.fromkeys(installed.NEWEST_TESTED, "1.2"))
    assert part.is_used() is part.is_used() is part.protects
    assert len(caplog.records) == (0 if part.protects else 1)


@pytest.mark.parametrize(
    ("changed", "found"), [("(self, other)", r"\(self\)"), (None, "missing")], ids=["another parameter", "a new name"]
)
def test_another_signature_turns_a_part_off_with_one_line(changed, found, caplog):
    caplog.set_level(logging.WARNING)
    place, recorded = next(iter(LEAN_NODE.signatures.items()))
    signatures = {place: changed} if changed else {f"{place}_renamed": recorded}
    part = replace(LEAN_NODE, signatures=signatures)
    assert not part.is_used() and not part.is_used()
    [line] = [record.getMessage() for record in caplog.records]
    assert re.search(f"lean node is off: ray._private.node:Node.start_monitor.* is {found} instead of ", line)


def test_the_switch_is_no_key_of_the_config():
    assert read_environment({SWITCH: "0"}) == {}


def test_a_node_without_private_parts_is_rays_own(monkeypatch):
    import ray._private.node as node
    import ray._private.utils as utils

    from scaleray.launch.cluster import lean_node, worker_template

    monkeypatch.setenv(SWITCH, "0")
    before = node.Node, utils.get_dashboard_dependency_error
    with lean_node.nodes(template=None, has_dashboard=False, has_autoscaler=False):
        assert (node.Node, utils.get_dashboard_dependency_error) == before
    assert not worker_template.is_possible()


@pytest.mark.parametrize("off", [LEAN_NODE, FORKED_WORKERS], ids=lambda part: part.name)
def test_each_part_of_a_node_is_off_alone(off, monkeypatch):
    import ray._private.node as node

    from scaleray.launch.cluster import lean_node

    started = []
    monkeypatch.setattr(type(off), "is_used", lambda self: self is not off)
    monkeypatch.setattr(node.Node, "start_monitor", lambda self: started.append("monitor"))
    monkeypatch.setattr(
        node.Node, "start_raylet", lambda self: started.append(Path(self._ray_params.setup_worker_path).name)
    )
    template = type("Template", (), {"socket": "there"})()
    with lean_node.nodes(template=template, has_dashboard=True, has_autoscaler=False):
        made = node.Node.__new__(node.Node)
        made._ray_params = type("Parameters", (), {"setup_worker_path": "of_ray.py"})()
        made.start_monitor()
        made.start_raylet()
    assert started == (["monitor", "as_fork.py"] if off is LEAN_NODE else ["of_ray.py"])


@pytest.mark.parametrize("switch", ["0", "1"])
def test_a_trainer_without_private_parts_is_ray_trains_own(switch, monkeypatch):
    import ray
    from ray.train.torch import TorchTrainer

    from scaleray.launch.workers.ray_train import torch_trainer

    monkeypatch.setenv(SWITCH, switch)
    monkeypatch.setattr(ray, "put", lambda value: None)
    values = {"workload.name": "m:W", "batch.global_size": 8, "optimizer.learning_rate": 0.1, "stop.after": "1 epoch"}
    config = load_config(flags=values, environ={})
    trainer = torch_trainer(config, print, {}, num_workers=2, name="n", storage_path="/tmp")
    assert (type(trainer) is TorchTrainer) == (switch == "0")
    assert isinstance(trainer, TorchTrainer)


def test_a_ray_that_cannot_stay_on_loopback_needs_a_token(monkeypatch):
    from scaleray.launch.cluster import loopback, token

    monkeypatch.delenv(loopback.VARIABLE, raising=False)
    monkeypatch.setenv(token.MODE, "disabled")
    loopback.refuse_open()
    monkeypatch.setattr(loopback, "LOOPBACK", replace(LOOPBACK, signatures={"ray.util:none": "()"}))
    with pytest.raises(UsageError, match="must require a token"):
        loopback.refuse_open()
    monkeypatch.setenv(token.MODE, "token")
    loopback.refuse_open()
    assert not loopback.is_kept()


def test_each_file_with_private_names_of_ray_has_its_part():
    files = {
        str(path.relative_to(ROOT)) for path in (ROOT / "scaleray").rglob("*.py") if IMPORTED.search(path.read_text())
    }
    of_parts = {part.file for part in PARTS if part.library == "ray"}
    assert files - {"scaleray/common/private_parts.py"} == of_parts | READERS
    assert LEAN_TRAINER.file in files


def test_a_signature_is_compared_without_its_annotations():
    def annotated(a: int, *, b: str = "c") -> None: ...

    assert str(inspect.signature(annotated)) != "(a, *, b='c')"
    annotated.__module__ = __name__
    globals()["annotated"] = annotated
    assert private_parts.signature_of(f"{__name__}:annotated") == "(a, *, b='c')"


def test_a_class_that_ray_has_made_an_actor_of_has_its_recorded_signature():
    """Ray adds a parameter to its methods, so that the second training of a process was taken for one on another Ray."""
    from ray.train.v2._internal.execution.controller.controller import TrainController
    from ray.util.tracing.tracing_helper import _inject_tracing_into_class

    recorded = private_parts.signature_of(f"{TrainController.__module__}:TrainController")
    _inject_tracing_into_class(TrainController)
    assert private_parts.signature_of(f"{TrainController.__module__}:TrainController") == recorded
