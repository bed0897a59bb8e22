"""Whether workers use GPUs where the config leaves it to the cluster, and what is said of those that stay idle."""

import pytest
import torch

from scaleray.config import load_config
from scaleray.config.recipe.derive import derive
from scaleray.config.recipe.values import DataSize
from scaleray.errors import ConfigError
from scaleray.launch.cluster.connection import Node
from scaleray.launch.cluster.gpu_workers import idle_gpus, with_gpus_decided
from scaleray.launch.run.resume import changes
from scaleray.launch.workers.ray_train import worker_resources

NEEDED = {"workload.name": "m:W", "batch.global_size": 8, "optimizer.learning_rate": 0.1, "stop.after": "1 epoch"}


def config_of(**keys):
    return load_config(flags={**NEEDED, **{key.replace("__", "."): value for key, value in keys.items()}}, environ={})


def nodes(*gpus):
    return [Node(f"n{number}", {"CPU": 8.0, "GPU": float(count)}, {}) for number, count in enumerate(gpus)]


def decided(config, found, said=None):
    return with_gpus_decided(config, found, say=(said if said is not None else []).append)


@pytest.mark.parametrize(
    ("asked", "gpus", "is_built", "number"),
    [("auto", (4, 4), True, 1), ("auto", (0, 1), True, 1), ("auto", (0, 0), True, 0), ("auto", (4,), False, 0), (0, (4,), True, 0), (0.5, (4,), True, 0.5)],
)  # fmt: skip
def test_auto_is_one_where_the_cluster_has_gpus_and_what_was_asked_for_stays(
    monkeypatch, asked, gpus, is_built, number
):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: is_built)
    config = decided(config_of(scale__gpus_per_worker=asked), nodes(*gpus))
    assert config.scale.gpus_per_worker == config.scale.gpus == number
    assert config.to_dict()["scale"]["gpus_per_worker"] == number
    assert config.scale.backend == ("cpu:gloo,cuda:nccl" if number else "gloo")
    assert worker_resources(config).get("GPU", 0) == number


@pytest.mark.parametrize(
    ("asked", "gpus", "is_built", "words"),
    [
        (0, (4, 4), True, "8 GPUs are idle: the workers train on CPUs; --scale.gpus-per-worker 1 trains on them"),
        ("auto", (1,), False, "1 GPU is idle: this build of torch lacks CUDA"),
        ("auto", (4,), True, ""),
        ("auto", (0,), True, ""),
        (0, (0,), False, ""),
    ],
)
def test_idle_gpus_are_said_with_what_uses_them(monkeypatch, asked, gpus, is_built, words):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: is_built)
    said = []
    decided(config_of(scale__gpus_per_worker=asked), nodes(*gpus), said)
    assert len(said) == bool(words) and words in "".join(said)
    assert idle_gpus(2, 1, has_cuda=True) == ""


def test_a_run_of_one_process_looks_at_its_own_machine(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    for count in (0, 2):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert decided(config_of(), None).scale.gpus == bool(count)


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ({"memory__find_micro_size": True}, r"memory\.find_micro_size"),
        ({"precision__tf32": True}, r"precision\.tf32"),
        ({"strategy__name": "fsdp", "scale__workers": 2, "fsdp__cpu_offload": True}, r"fsdp\.cpu_offload"),
    ],
)
def test_what_needs_gpus_is_refused_once_it_is_known_that_there_are_none(monkeypatch, keys, refused):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    config = config_of(**keys)  # nobody knows yet
    derive(config, DataSize(64, None))
    derive(decided(config, nodes(2)), DataSize(64, None))
    with pytest.raises(ConfigError, match=refused):
        derive(decided(config, nodes(0)), DataSize(64, None))


def test_a_decided_config_is_the_one_that_named_the_number():
    config = decided(config_of(), nodes(0))
    assert config.hash() == config_of(scale__gpus_per_worker=0).hash()
    assert changes(config.to_dict(), config) == []
