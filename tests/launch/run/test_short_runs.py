"""Runs that leave no checkpoint, and those that are refused before their first step."""

from __future__ import annotations

import pytest
import torch
from lit_modules import Data, Plain
from torch import nn
from torch.nn import functional as F

import scaleray
from scaleray import Workload
from scaleray.cli.main import run_command
from scaleray.errors import WorkloadError
from scaleray.lightning import as_workload


class Line(Workload):
    def build_model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def datasets(self):
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(32, 4, generator=draw)
        return {"train": {"x": x, "y": x[:, :3].argmax(1)}}

    def loss(self, model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])


class Mean(Line):
    def loss(self, model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"]), len(batch["y"])


class Manual(Plain):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


@pytest.fixture
def config(tmp_path, uri):
    return {
        "workload.name": f"{__file__}:Line",
        "batch.global_size": 8,
        "optimizer.learning_rate": 0.1,
        "stop.after": "2 epochs",
        "checkpoint.storage_path": str(tmp_path / "runs"),
        "tracking": {"uri": uri, "run_name": "base", "system_metrics": False},
    }


@pytest.mark.parametrize("named", ["base", "{run}", "{run}/weights.pt"])
def test_a_run_without_a_checkpoint_is_what_another_starts_from(config, named):
    first = scaleray.train(config, Line, local=True)
    started = {}

    class Look(Line):
        def loss(self, model, batch):
            started.setdefault("weights", {n: p.detach().clone() for n, p in model.named_parameters()})
            return super().loss(model, batch)

    more = {"workload.weights": named.format(run=first.run_dir), "tracking.run_name": "next"}
    scaleray.train({**config, **more}, Look, local=True)
    final = torch.load(f"{first.run_dir}/weights.pt", weights_only=True)
    assert all(torch.equal(final[name], value) for name, value in started["weights"].items()) and started["weights"]


def test_the_adapters_of_a_run_without_a_checkpoint_are_exported(config, tmp_path, capsys):
    from safetensors.torch import load_file

    tuned = {"fine_tuning": {"lora_rank": 2, "lora_layers": ["0", "2"]}}
    run = scaleray.train({**config, **tuned}, Line, local=True)
    assert run_command(["export", run.run_dir, "--out", str(tmp_path / "adapter"), "--format", "adapter"]) == 0
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(adapter) == 4 and all(value.any() for value in adapter.values())


@pytest.mark.parametrize(
    ("workload", "why"),
    [(Mean, "a mean"), (as_workload(Manual, Data), "takes 0 steps of optimizer 0")],
    ids=["mean", "manual"],
)
def test_what_is_refused_before_the_first_step_takes_no_name_and_is_no_failed_run(config, tmp_path, uri, workload, why):
    from mlflow import MlflowClient

    for _ in range(2):
        with pytest.raises(WorkloadError, match=why):
            scaleray.train(config, workload, local=True)
    assert not list((tmp_path / "runs").iterdir())
    client = MlflowClient(uri)
    assert not client.search_runs([e.experiment_id for e in client.search_experiments()])
