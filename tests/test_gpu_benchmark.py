"""The GPU benchmark's sides and its report, with a toy on the CPU: that they run and count alike, not how fast."""

import dataclasses
import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from small_runs import same_generators

sys.path.append(str(Path(__file__).parent.parent / "jobs"))
sys.path.append(str(Path(__file__).parent.parent / "jobs" / "benchmarks"))
sys.path.append(str(Path(__file__).parent.parent / "jobs" / "benchmarks" / "sides"))

import gpu_checks
import gpu_training
import on_one_gpu
from on_one_gpu import Task

from scaleray.config.hardware.catalogue import find_gpu
from scaleray.records.workload_profile import mfu

TASK = Task(
    side="scaleray", size="smoke", sequence_length=16, batch_size=4, micro_batch_size=2, steps=3, warmup_steps=1, device="cpu",
    compiled="nothing", is_checkpointed=False, is_sharded=False, float8="none", uses_ray=False, seed=0, result="",
)  # fmt: skip


@pytest.mark.always("sharded")
@pytest.mark.parametrize(
    ("side", "changes"),
    [
        ("plain", {"is_checkpointed": True}),
        ("scaleray", {}),
        ("scaleray", {"is_sharded": True, "is_checkpointed": True, "compiled": "blocks"}),
        ("scaleray", {"float8": "tensorwise"}),
    ],
    ids=["plain", "scaleray", "sharded", "float8"],
)
def test_every_side_measures_a_training(tmp_path, side, changes):
    task = dataclasses.replace(TASK, side=side, result=str(tmp_path / "result.json"), **changes)
    run = on_one_gpu.by_hand if side == "plain" else lambda task: on_one_gpu.without_ray(task, str(tmp_path))
    with same_generators():
        figures = run(task)
    assert figures.keys() == {"time_s", "peak_memory_bytes"} and min(figures.values()) > 0


def test_both_sides_are_told_the_same():
    config = TASK.config("/tmp")
    assert (config.optimizer.learning_rate, config.optimizer.betas) == (on_one_gpu.LEARNING_RATE, on_one_gpu.BETAS)
    assert (config.optimizer.clip_norm, config.precision.dtype) == (on_one_gpu.CLIP_NORM, "bf16")
    on_a_card = dataclasses.replace(TASK, device="cuda", compiled="model", float8="tensorwise").config("/tmp")
    assert on_a_card.scale.gpus_per_worker == 1 and not on_a_card.precision.emulate_float8
    assert (on_a_card.compilation.backend, on_a_card.compilation.must_succeed) == ("inductor", True)


@pytest.mark.combination
def test_the_report_counts_utilisation_from_the_planners_peak():
    arguments = Namespace(
        peak_tflops=None, variants=["plain", "scaleray"], accumulation=1, steps=3, warmup_steps=1, seed=0, repeats=1
    )
    peak, said = gpu_training.peak_flops_per_s(arguments, "NVIDIA H200")
    assert peak == find_gpu("H200").peak_flops("bf16") and "989 TFLOP/s for h200" in said
    assert gpu_training.peak_flops_per_s(arguments, "an unknown card")[0] is None
    profile = gpu_training.counted("smoke")
    found = [
        {
            "side": side,
            "round": 0,
            "tokens_per_s": speed,
            "peak_memory_bytes": 2**30,
            "mfu": mfu(speed, time_s=1, peak_flops_per_s=1e4),
        }
        for side, speed in (("plain", 5000.0), ("scaleray", 6000.0))
    ]
    text = gpu_training.describe("smoke", found, profile, (1e4, "Peak: as given."), arguments)
    assert (
        "| scaleray | 6000     | 1.200 | 60.0   | 1.0" in text
        and "best of scaleray in bf16: scaleray, 60.0 % MFU" in text
    )
    json.dumps(dataclasses.asdict(profile))


def test_spans_that_lie_under_others_are_counted_once():
    computed, copied = [(0.0, 4.0), (2.0, 6.0), (10.0, 12.0)], [(5.0, 7.0), (6.5, 8.0), (11.0, 12.0)]
    found = gpu_checks.shares(computed, copied, [])
    assert found == {"computes": 8 / 12, "copies under it": pytest.approx(2 / 4), "communication under it": None}


@pytest.mark.combination
def test_a_part_that_fails_says_why():
    arguments = Namespace(device="no device", quick=True)
    found = gpu_training.check("checkpoint", arguments, workers=2, timeout_s=60.0)
    assert "exit codes [1]" in found["not_run"] and "no device" in found["not_run"]
