"""Whatever only watches a training may fail: it is said once, and the weights come out the same to the bit."""

from __future__ import annotations

import itertools
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pynvml
import pytest
import torch
from small_runs import Classify, RankContext, make_job, same_generators, train, train_alone

import scaleray
from scaleray.checkpoints.catalog import Catalog
from scaleray.common.watchers import RETRIED, Guard, Watcher
from scaleray.errors import UsageError
from scaleray.records.run_record import StepRecord, SystemRecord
from scaleray.studies import running_study
from scaleray.training import loop
from scaleray.training.health import live_memory
from scaleray.training.health.system_metrics import SystemMetrics
from scaleray.training.state.checkpointing import Checkpointing

FLAGS = {
    "batch.micro_size": 4, "optimizer.name": "adamw", "stop.after": "6 steps", "precision.dtype": "fp32", "deterministic": True,
    "checkpoint.every": "2 steps", "evaluation.every": "3 steps",
}  # fmt: skip
WATCHED = {
    **FLAGS, "noise_scale.measure": True, "noise_scale.every_steps": 1, "tracking.system_metrics": True,
    "gossip.meet_every": 7,
}  # fmt: skip
ASKED_FOR = {Watcher.TRACES, Watcher.PUBLISHING}
"""Those that a run has on demand, or on a cluster alone: their own tests let them fail."""
OF_LAUNCH = {Watcher.DISPLAY, Watcher.RECORDING, Watcher.RECORD, Watcher.STALLS, Watcher.ALERTS}
"""Those that the loop does not know; any other is expected to watch a run of the loop."""


@pytest.fixture(autouse=True)
def torch_switches():
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def hasty(monkeypatch):
    """Ten seconds pass each time the loop asks, so that it samples the system after every step."""
    clock = SimpleNamespace(time=time.time, perf_counter=time.perf_counter, monotonic=itertools.count(0, 10).__next__)
    monkeypatch.setattr("scaleray.training.health.reporter.time", clock)


def failing(watcher, *, when, calls):
    """In place of `Guard._call`: one watcher raises, before it has looked or after."""

    def call(self, called, look):
        if called is not watcher:
            return look()
        calls.append(called)
        if when == "after":
            look()
        raise RuntimeError("planted")

    return call


def assert_same_bits(left, right):
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in right)


@pytest.mark.always("notes-after")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("watcher", [w for w in Watcher if w not in OF_LAUNCH | ASKED_FOR])
def test_a_watcher_that_fails_costs_the_training_nothing(tmp_path, monkeypatch, caplog, hasty, watcher, when):
    workload, calls = Classify(num_val=5), []
    plain = train_alone(workload, WATCHED, folder=tmp_path / "plain")
    monkeypatch.setattr(Guard, "_call", failing(watcher, when=when, calls=calls))
    finished = train_alone(workload, WATCHED, folder=tmp_path / "failing")
    assert calls, f"{watcher} watches nothing in this run: give it something to watch, or name it in OF_LAUNCH"
    assert finished.summary.verdict == "done" and finished.summary.steps == 6
    assert_same_bits(finished.weights, plain.weights)
    said = [*finished.events, *(record.getMessage() for record in caplog.records)]
    of_watcher = [text for text in said if text.startswith(str(watcher)) and "planted" in text]
    # checkpoints send from a thread of their own, and say so for themselves
    times = 2 if watcher is Watcher.MESSAGES else 1
    assert of_watcher and all(of_watcher.count(text) <= times for text in of_watcher), "each part once"
    if watcher is not Watcher.MESSAGES:
        assert finished.losses == plain.losses and len(finished.evaluations) == 2
        assert [c.step for c in finished.checkpoints] == [2, 4, 6]


@pytest.mark.always("recorded messages")
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("mlflow_database")
@pytest.mark.parametrize("watcher", sorted(OF_LAUNCH))
def test_a_watcher_of_the_launch_that_fails_costs_the_training_nothing(tmp_path, monkeypatch, watcher):
    calls = []
    monkeypatch.setattr(Guard, "_call", failing(watcher, when="before", calls=calls))
    settings = {
        **FLAGS,
        "workload.name": "watched",
        "batch.global_size": 8,
        "optimizer.learning_rate": 0.1,
        "tracking.system_metrics": False,
        "checkpoint.storage_path": str(tmp_path / "runs"),
        "tracking.uri": f"sqlite:///{tmp_path / 'mlflow.db'}",
    }
    with same_generators():
        record = scaleray.train(settings, Classify(num_val=5), local=True, show=mock.Mock(), say=mock.Mock())
    assert calls and record.status == "FINISHED"
    monkeypatch.undo()
    found = torch.load(Path(record.run_dir) / "weights.pt", weights_only=True)
    assert_same_bits(found, train_alone(Classify(num_val=5), FLAGS).weights)
    if watcher is not Watcher.RECORDING:  # which loses what it cannot write
        rows = (Path(record.run_dir) / "steps.csv").read_text().splitlines()
        assert len(rows) == 7 and record.metrics.keys() == {"val/loss", "val/accuracy"}


# the guard


def test_a_failure_is_said_once_and_the_watcher_left_alone():
    said, looks = [], mock.Mock(side_effect=ValueError("first line\nsecond"))
    guard = Guard(said.append)
    assert [guard(Watcher.MEMORY, looks, {}) for _ in range(3)] == [{}, {}, {}]
    assert looks.call_count == 1
    assert said == ["memory report: no longer observed (ValueError: first line); the training continues without it"]
    assert guard(Watcher.MEMORY, lambda: 1, 0, part="another") == 1, "parts fail alone"


@pytest.mark.parametrize("watcher", sorted(RETRIED))
def test_of_messages_each_is_tried(watcher):
    said, arrived = [], []

    def take(message):
        if message % 2:
            raise ConnectionError("refused")
        arrived.append(message)

    tell = Guard(said.append).wrapped(watcher, take)
    for message in range(5):
        tell(message)
    assert arrived == [0, 2, 4] and len(said) == 1 and "at least one is lost (ConnectionError: refused)" in said[0]


def test_whoever_cannot_say_it_writes_it_into_the_log(caplog):
    with caplog.at_level(logging.WARNING):
        assert (
            Guard(mock.Mock(side_effect=OSError("gone")))(Watcher.NOTES, mock.Mock(side_effect=KeyError("x")), 5) == 5
        )
    assert "notes: no longer observed (KeyError: 'x')" in caplog.text


def test_what_ends_a_program_ends_a_watcher_too():
    for ending in (KeyboardInterrupt, SystemExit):
        with pytest.raises(ending):
            Guard()(Watcher.DISPLAY, mock.Mock(side_effect=ending), None)


# what watches, failing at its own source


class Gpus:
    """Two GPUs as torch and NVML show them; `fails` is a function of NVML that raises NVMLError."""

    def __init__(self, monkeypatch, fails=None, number=pynvml.NVML_ERROR_NOT_SUPPORTED):
        for name in (
            "nvmlInit",
            "nvmlDeviceGetHandleByUUID",
            "nvmlDeviceGetMemoryInfo",
            "nvmlDeviceGetUtilizationRates",
            "nvmlDeviceGetPowerUsage",
        ):
            function = mock.Mock(side_effect=pynvml.NVMLError(number)) if name == fails else getattr(self, name)
            monkeypatch.setattr(pynvml, name, function)
        self.contexts = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"uuid-{index}"))
        monkeypatch.setattr(torch.cuda, "mem_get_info", self.mem_get_info)

    def mem_get_info(self, index):
        self.contexts.append(index)
        return 3e9, 4e9

    def nvmlInit(self): ...

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if not uuid.startswith("GPU-"):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return int(uuid[-1])

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=1e9 * (handle + 1), total=4e9)

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=90 + handle)

    def nvmlDeviceGetPowerUsage(self, handle):
        return 300_000 + handle


def gpu_figures(sample):
    return {name: value for name, value in sample.items() if name.startswith("gpu_")}


def test_what_the_network_carried_is_not_below_nothing_after_an_interface_has_gone(monkeypatch):
    counts = iter([(5e6, 7e6), (6e6, 9e6), (1e6, 2e6)])
    read = lambda: SimpleNamespace(**dict(zip(("bytes_recv", "bytes_sent"), next(counts), strict=True)))
    monkeypatch.setattr("psutil.net_io_counters", read)
    metrics = SystemMetrics(Guard())
    names = ("network_receive_megabytes", "network_transmit_megabytes")
    found = [[sample[name] for name in names] for sample in (metrics.sample(), metrics.sample())]
    assert found == [[1.0, 2.0], [0.0, 0.0]]


def test_gpus_are_watched_without_a_context_on_any(monkeypatch):
    gpus, said = Gpus(monkeypatch), []
    assert gpu_figures(SystemMetrics(Guard(said.append)).sample()) == {
        "gpu_0_memory_usage_megabytes": 1000.0,
        "gpu_0_memory_usage_percentage": 25.0,
        "gpu_0_utilization_percentage": 90.0,
        "gpu_0_power_usage_watts": 300.0,
        "gpu_1_memory_usage_megabytes": 2000.0,
        "gpu_1_memory_usage_percentage": 50.0,
        "gpu_1_utilization_percentage": 91.0,
        "gpu_1_power_usage_watts": 300.001,
    }
    assert gpus.contexts == [] and said == []


@pytest.mark.parametrize(
    ("fails", "lost"),
    [
        ("nvmlInit", {"utilization", "power"}), ("nvmlDeviceGetHandleByUUID", {"utilization", "power"}),
        ("nvmlDeviceGetMemoryInfo", {"memory"}), ("nvmlDeviceGetUtilizationRates", {"utilization"}),
        ("nvmlDeviceGetPowerUsage", {"power"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("number", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_GPU_IS_LOST])
def test_each_call_of_nvml_may_fail(monkeypatch, fails, lost, number):
    gpus, said = Gpus(monkeypatch, fails, number), []
    metrics = SystemMetrics(Guard(said.append))
    samples = [metrics.sample() for _ in range(3)]
    for sample in samples:
        assert {"cpu_utilization_percentage", "system_memory_usage_megabytes"} <= sample.keys()
        kinds = {name.split("_")[2] for name in gpu_figures(sample)}
        assert kinds == {"memory", "utilization", "power"} - lost
    # without NVML a worker asks about its own GPU, where it has a context anyway
    without_nvml = fails in ("nvmlInit", "nvmlDeviceGetHandleByUUID")
    assert set(gpus.contexts) == ({1} if without_nvml else set())
    assert len(said) == (1 if fails == "nvmlInit" else 2), "once a GPU"
    assert all("system metrics" in text and "NVMLError" in text for text in said)


def test_a_slice_of_a_gpu_is_found_by_its_own_uuid(monkeypatch):
    Gpus(monkeypatch)
    asked = []

    def by_uuid(uuid):
        asked.append(uuid)
        if uuid.startswith("GPU-"):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return 0

    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", by_uuid)
    assert "gpu_1_power_usage_watts" in SystemMetrics(Guard()).sample()
    assert asked == ["GPU-uuid-0", "MIG-uuid-0", "GPU-uuid-1", "MIG-uuid-1"]


@pytest.mark.parametrize("fails", ["cpu_percent", "virtual_memory", "disk_usage", "net_io_counters"])
def test_a_node_whose_figures_cannot_be_read_trains_on(monkeypatch, hasty, fails):
    monkeypatch.setattr(f"psutil.{fails}", mock.Mock(side_effect=PermissionError("/proc is not for you")))
    finished = train_alone(Classify(), {"tracking.system_metrics": True})
    assert finished.summary.verdict == "done"
    assert not any(isinstance(message, SystemRecord) for message in finished.messages)
    assert sum("system metrics" in event and "/proc is not for you" in event for event in finished.events) == 1


def test_a_tensor_that_cannot_be_counted_costs_the_memory_report_only(monkeypatch):
    plain = train_alone(Classify(), FLAGS)
    monkeypatch.setattr(live_memory, "_has_storage", mock.Mock(side_effect=RuntimeError("no storage")))
    finished = train_alone(Classify(), FLAGS)
    assert plain.summary.memory["activations_bytes"] > 0 and finished.summary.memory == {}
    assert_same_bits(finished.weights, plain.weights)
    assert sum("memory report" in event and "no storage" in event for event in finished.events) == 1


def test_an_emit_that_raises_loses_its_messages_and_no_checkpoint(tmp_path, caplog):
    def emit(message):
        if isinstance(message, StepRecord):
            raise ConnectionError("the recorder is away")
        taken.append(message)

    taken, plain = [], train_alone(Classify(), FLAGS)
    finished = train_with(emit, tmp_path)
    assert_same_bits(finished, plain.weights)
    assert [type(m).__name__ for m in taken].count("CheckpointRecord") == 3
    assert sum("messages to the recorder" in getattr(m, "text", "") for m in taken) == 1


def train_with(emit, folder):
    """The final weights of a run whose records go to `emit`."""
    job, sources = make_job(Classify(), FLAGS)
    weights = {}
    checkpointing = Checkpointing(job, RankContext(), Catalog.of_run(str(folder)), emit=emit)
    with same_generators():
        loop.run(
            job,
            RankContext(),
            sources=sources,
            emit=emit,
            checkpointing=checkpointing,
            save_weights=lambda share, name: weights.update(share.tensors),
        )
    return weights


NOISE = {"noise_scale.measure": True, "noise_scale.every_steps": 1, "batch.global_size": 12, "stop.after": "7 steps"}
ADAM = {"optimizer.name": "adamw", "optimizer.learning_rate": 0.01, "noise_scale.preconditioned": True}
WAYS = {
    "ddp": {},
    "ddp, adam": ADAM,
    "zero1": {"strategy.name": "zero1"},
    "fsdp": {"strategy.name": "fsdp"},
    "fsdp, adam": {**ADAM, "strategy.name": "fsdp"},
    "fsdp, sharded accumulation": {"strategy.name": "fsdp", "fsdp.accumulate": "sharded", "batch.micro_size": 2},
    "tensor, accumulation": {"strategy.name": "tensor", "parallel.tensor": 2, "batch.micro_size": 4},
    "tensor, consecutive steps": {"strategy.name": "tensor", "parallel.tensor": 2},
}
FROM_LOOK = {"as the meter is made": 1, "in the first step": 3, "later": 6}


def with_a_broken_meter(place, workload, flags, number):
    """(a run whose rank 1 fails to measure from its look `number` on, the same without measuring)."""
    plain = train(place, workload, {k: v for k, v in flags.items() if not k.startswith("noise_scale")})
    looks = itertools.count(1)

    def call(self, watcher, look):
        if watcher is Watcher.NOISE and place.rank == 1 and next(looks) >= number:
            raise RuntimeError("planted")
        return look()

    with mock.patch.object(Guard, "_call", call):
        return train(place, workload, flags), plain


@pytest.mark.always("ddp", "[fsdp-in")
@pytest.mark.parametrize(
    ("way", "since"),
    [*((way, "in the first step") for way in WAYS), ("ddp", "as the meter is made"), ("fsdp", "later")],
)
def test_a_rank_that_cannot_measure_noise_goes_on_with_the_others(gloo, way, since):
    flags = {**NOISE, **WAYS[way]}
    outcomes = gloo.run(2, with_a_broken_meter, Classify(num_rows=60), flags, FROM_LOOK[since])
    (first, plain), (second, _) = outcomes
    assert_same_bits(first.weights, plain.weights)
    assert first.losses == plain.losses
    assert sum("gradient noise scale" in event and "planted" in event for event in second.events) == 1
    assert not any("planted" in event for event in first.events)
    # what one rank could not see counts for none
    assert first.summary.noise.get("num_measurements", 0) <= (1 if since == "later" else 0)


@pytest.mark.parametrize(("error", "said"), [(RuntimeError("odd"), "RuntimeError: odd"), (UsageError("a", 1, "b"), "a is 1: b.")])  # fmt: skip
def test_a_model_whose_operations_cannot_be_counted_is_studied_without_mfu(monkeypatch, error, said):
    monkeypatch.setattr(running_study, "profile_workload", mock.Mock(side_effect=error))
    split = SimpleNamespace(gives_tuples=False)
    study_size = SimpleNamespace(job=SimpleNamespace(workload=None, splits={"train": split}))
    config = SimpleNamespace(precision=None)
    study = SimpleNamespace(study_sizes={0: study_size}, sources={"train": mock.Mock()}, config=config, profile=None)
    running_study.RunningStudy._count_operations(study)
    assert study.profile == said
