"""The CUDA path: one worker on one card, in this process and through Ray Train with NCCL."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from torch import nn

import scaleray
from scaleray.config.precision import PrecisionSettings
from scaleray.errors import ConfigError
from scaleray.training.setup.float8 import check_device, convert

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

ROOT = Path(__file__).parent.parent


def digits(tmp_path, **more):
    return scaleray.load_config(
        ROOT / "jobs" / "digits.yaml",
        flags={
            "workload.name": f"{ROOT / 'jobs' / 'digits.py'}:Digits",
            "scale.gpus_per_worker": 1,
            "tracking.uri": f"sqlite:///{tmp_path / 'mlflow.db'}",
            "checkpoint.storage_path": str(tmp_path / "runs"),
            **more,
        },
        environ={},
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_digits_learn_on_one_card(tmp_path, dtype):
    record = scaleray.train(digits(tmp_path, **{"precision.dtype": dtype}), local=True)
    assert record.metrics["test/accuracy"] >= 0.97
    assert record.environment["workers"][0]["device"].startswith("cuda")


def test_digits_learn_through_ray_train_and_nccl(tmp_path):
    record = scaleray.train(digits(tmp_path))
    assert record.metrics["test/accuracy"] >= 0.97
    assert record.environment["workers"][0]["accelerators"]["nccl"]


def test_doctor_sees_the_cards_of_this_machine_and_measures_each(tmp_path):
    record = scaleray.doctor(local=True, storage=str(tmp_path / "runs"), uri=f"sqlite:///{tmp_path}/mlflow.db")
    [node] = record.measured.nodes
    assert len(node.gpus) == node.torch_gpus == torch.cuda.device_count() and node.accelerators["driver"]
    checks = {check.name: check for check in record.checks}
    assert checks["GPUs visible"].verdict == checks["GPU drivers"].verdict == "green"
    if checks["GPUs idle"].verdict == "green":
        assert [rate.device for rate in record.measured.rates] == [f"GPU {n}" for n in range(len(node.gpus))]
        assert all(rate.flops_per_s > 1e12 for rate in record.measured.rates), "a card, not the processor"
    else:
        assert "in use" in record.measured.not_measured["rates"]


@pytest.mark.parametrize("num_rows", [32, 5])
@pytest.mark.parametrize("float8", ["tensorwise", "rowwise"])
def test_float8_products_are_those_that_emulation_gives(float8, num_rows):
    device = torch.device("cuda")
    settings = {
        is_emulated: PrecisionSettings(dtype="bf16", float8=float8, emulate_float8=is_emulated)
        for is_emulated in (True, False)
    }
    try:
        check_device(device, settings[False])
    except ConfigError as exc:
        pytest.skip(str(exc))
    x = torch.randn(num_rows, 64, device=device, generator=torch.Generator(device).manual_seed(0))
    found = []
    for choice in settings.values():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 128, device=device), nn.Linear(128, 16, device=device))
        with contextlib.ExitStack() as undo, torch.autocast("cuda", dtype=torch.bfloat16):
            convert(model, device, choice, None, undo)
            result = model[0](x)
            result.float().square().sum().backward()
        found.append((result.float(), model[0].weight.grad))
    for emulated, real in zip(*found, strict=True):
        # both round operands alike; the result of the card's product is in bf16, with 8 bits
        torch.testing.assert_close(real, emulated, rtol=2e-2, atol=2e-2 * emulated.abs().max().item())
