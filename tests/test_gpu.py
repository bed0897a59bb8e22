"""The CUDA path: one worker on one card, in this process and through Ray Train with NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest

import scaleray

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

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
