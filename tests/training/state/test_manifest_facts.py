"""What a manifest says of its checkpoint, value by value: a fact that is merely there may be that of another step."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time

import pytest
import torch
import xxhash
from small_runs import Classify, Tokens, train, train_alone

from scaleray.checkpoints.catalog import Catalog
from scaleray.checkpoints.manifest import FORMAT
from scaleray.checkpoints.tensor_files import ALIGNMENT, read_tensor

FLAGS = {
    "optimizer.name": "adamw", "optimizer.learning_rate": 0.01, "optimizer.weight_decay": 0.1, "schedule.name": "cosine",
    "stop.after": "10 steps", "checkpoint.every": "4 steps", "checkpoint.keep_last": 10, "evaluation.every": "3 steps",
}  # fmt: skip
FACTS = {"run": "mine", "config_hash": "c", "environment_hash": "e", "data": {"train": "d"}, "config": {"seed": 0}}


def manifests(folder):
    return {m.step: m for m in Catalog.of_run(str(folder)).complete()}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with checkpoints after 4, 8 and 10 of its 10 steps of 8 of 26 rows: (folder, what it left, when it ran)."""
    folder = tmp_path_factory.mktemp("run")
    before = time.time()
    finished = train_alone(Classify(num_val=5), FLAGS, folder=folder, facts=FACTS)
    return folder, finished, (before, time.time())


def test_a_manifest_names_its_step_its_workers_and_its_time(run):
    folder, _, (before, after) = run
    found = manifests(folder)
    assert [*found] == [10, 8, 4]
    assert {(m.world_size, m.strategy, m.format) for m in found.values()} == {(1, "single", FORMAT)}
    assert before <= found[4].created_at <= found[8].created_at <= found[10].created_at <= after


def test_the_facts_are_those_of_the_run_and_of_the_newest_evaluation(run):
    folder, finished, _ = run
    by_step = {e.step: e.metrics for e in finished.evaluations}
    assert sorted(by_step) == [3, 6, 9, 10]
    for step, evaluated_at in ((4, 3), (8, 6), (10, 10)):
        manifest = manifests(folder)[step]
        assert manifest.facts == {**FACTS, "metrics": by_step[evaluated_at], "evaluated_at": evaluated_at}
        assert manifest.own_metrics == (by_step[10] if step == 10 else {})


def test_the_progress_is_that_of_the_step(run):
    folder, finished, _ = run
    by_step = {e.step: e.metrics for e in finished.evaluations}
    for step, place, evaluated_at in ((4, (1, 0), 3), (8, (2, 0), 6), (10, (2, 16), 10)):
        progress = dict(manifests(folder)[step].values["progress"])
        seconds = sum(s.step_time_s for s in finished.steps[:step])
        assert progress.pop("training_time_s") == pytest.approx(seconds, rel=1e-9)
        assert progress == {
            "best": None,
            "step": step,
            "epoch": place[0],
            "sample_in_epoch": place[1],
            "global_batch_size": 8,
            "origin": None,
            "count_per_row": 1.0,
            "nonfinite_steps": 0,
            "nonfinite_in_a_row": 0,
            "metrics": by_step[evaluated_at],
            "evaluated_at": evaluated_at,
            "verdict": None,
            "noise_scale": None,
            "shares": None,
            "micro_batch_size": None,
        }


def test_schedule_and_optimizer_stand_before_the_next_step(run):
    folder, finished, _ = run
    for step, manifest in manifests(folder).items():
        next_rate = 0.01 * (1 + math.cos(math.pi * step / 10)) / 2
        assert step == 10 or finished.steps[step].learning_rate == pytest.approx(next_rate, rel=1e-12)
        schedule = manifest.values["schedule"]
        assert (schedule["last_epoch"], schedule["_step_count"], schedule["base_lrs"]) == (step, step + 1, [0.01])
        assert schedule["_last_lr"] == pytest.approx([next_rate], abs=1e-15)
        (group,) = manifest.values["optimizer"]["groups"]
        assert group["lr"] == pytest.approx(next_rate, abs=1e-15) and group["weight_decay"] == 0.1
        assert group["betas"] == {"tuple": [0.9, 0.999]}
        assert group["params"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
        assert manifest.values["optimizer"]["others"] == {}
        assert manifest.values["scaler"] == manifest.values["workload"] == manifest.values["model"] == {}


def test_the_tensors_are_those_of_the_step(run):
    folder, finished, _ = run
    catalog, found = Catalog.of_run(str(folder)), manifests(folder)
    for step, manifest in found.items():
        assert float(read_tensor(catalog.stores, manifest.tensors["optimizer.0.weight.step"])) == step
        names = {name.rpartition(".")[0] if name.startswith("optimizer.") else name for name in manifest.tensors}
        assert names == {f"{item}.{name}" for item in ("model", "optimizer") for name in finished.weights} | {
            f"random.0.{generator}" for generator in ("torch", "numpy", "python")
        }
    for name, weights in finished.weights.items():
        tensor = found[10].tensors[f"model.{name}"]
        assert (tensor.dtype, tensor.shape) == ("float64", tuple(weights.shape))
        assert torch.equal(read_tensor(catalog.stores, tensor), weights)


def assert_bytes_are_as_stated(folder):
    """Every file, chunk, hash and sum of every manifest against the files themselves."""
    for manifest in manifests(folder).values():
        chunks = [(tensor, chunk) for tensor in manifest.tensors.values() for chunk in tensor.chunks]
        assert manifest.files.keys() == {chunk.file for _, chunk in chunks}
        for name, stored in manifest.files.items():
            content = (folder / "checkpoints" / name).read_bytes()
            assert stored.sha256 == hashlib.sha256(content).hexdigest() and stored.num_bytes == len(content)
        for tensor, chunk in chunks:
            content = (folder / "checkpoints" / chunk.file).read_bytes()[chunk.start : chunk.start + chunk.length]
            assert chunk.length == len(content) == math.prod(chunk.sizes) * getattr(torch, tensor.dtype).itemsize
            assert chunk.digest == xxhash.xxh3_128_hexdigest(content)
            assert chunk.start % ALIGNMENT == 0 and len(chunk.offsets) == len(chunk.sizes) == len(tensor.shape)
            assert all(o + s <= whole for o, s, whole in zip(chunk.offsets, chunk.sizes, tensor.shape, strict=True))
        for tensor in manifest.tensors.values():
            assert sum(math.prod(chunk.sizes) for chunk in tensor.chunks) == math.prod(tensor.shape)
        own = [stored.num_bytes for name, stored in manifest.files.items() if name.startswith(f"{manifest.name}/")]
        assert manifest.bytes_written == sum(own)
        assert manifest.total_bytes == sum(chunk.length for _, chunk in chunks)
        assert (manifest.chain == 0) == (len(own) == len(manifest.files))


def test_files_chunks_hashes_and_sums_are_as_stated(run):
    folder, finished, _ = run
    assert_bytes_are_as_stated(folder)
    found = manifests(folder)
    assert [(c.step, c.bytes_written, c.total_bytes) for c in finished.checkpoints] == [
        (step, found[step].bytes_written, found[step].total_bytes) for step in (4, 8, 10)
    ]
    assert [found[step].chain for step in (4, 8, 10)] == [0, 1, 2], "numpy's generator is never drawn from"


def test_a_rebuilt_checkpoint_says_the_same_of_its_training(run):
    folder, _, _ = run
    catalog, before = Catalog.of_run(str(folder)), manifests(folder)[8]
    rebuilt = catalog.rebuild(before)
    assert catalog.read(8) == rebuilt
    where_it_lies = {"tensors", "files", "chain", "bytes_written", "sha256"}
    for field in dataclasses.fields(before):
        assert field.name in where_it_lies or getattr(rebuilt, field.name) == getattr(before, field.name), field.name
    assert_bytes_are_as_stated(folder)


class Exploding(Tokens):
    """The loss is NaN in steps 3, 4 and 6."""

    calls = 0

    def loss(self, model, batch):
        total, count = super().loss(model, batch)
        self.calls += model.training
        return total * (float("nan") if model.training and self.calls in (3, 4, 6) else 1.0), count


def test_skipped_steps_counts_and_the_loss_scale_are_in_the_manifest(tmp_path):
    flags = {"on_nonfinite": "skip", "checkpoint.every": "1 steps", "checkpoint.keep_last": 10, "stop.after": "7 steps"}
    finished = train_alone(Exploding(), {**flags, "precision.dtype": "fp16"}, folder=tmp_path)
    found = manifests(tmp_path)
    progress = [found[step].values["progress"] for step in range(1, 8)]
    assert [p["nonfinite_in_a_row"] for p in progress] == [0, 0, 1, 2, 0, 1, 0]
    assert [p["nonfinite_steps"] for p in progress] == [0, 0, 1, 2, 2, 3, 3]
    assert [p["count_per_row"] for p in progress] == [s.count / s.num_samples for s in finished.steps]
    assert [found[step].values["scaler"]["scale"] for step in range(1, 8)] == [s.loss_scale for s in finished.steps]


def test_why_a_run_stopped_for_good_is_in_its_last_manifest(tmp_path):
    flags = {"on_nonfinite": "stop", "checkpoint.every": "1 steps", "stop.after": "7 steps"}
    finished = train_alone(Exploding(), flags, folder=tmp_path)
    assert finished.summary.verdict.startswith("stopped")
    assert manifests(tmp_path)[3].values["progress"]["verdict"] == finished.summary.verdict
    assert manifests(tmp_path)[2].values["progress"]["verdict"] is None


def test_where_the_batch_changed_is_in_the_manifest(tmp_path):
    flags = {"checkpoint.every": "3 steps", "stop.after": "2 epochs"}
    train_alone(Classify(num_rows=48), flags, folder=tmp_path, kill_at=3)
    train_alone(Classify(num_rows=48), {**flags, "batch.global_size": 12}, folder=tmp_path)
    before, after = (manifests(tmp_path)[step].values["progress"] for step in (6, 9))
    assert before["origin"] == after["origin"] == {"step": 3, "epoch": 0, "sample": 24}
    # 24 rows are left of the first epoch, in steps of 12
    assert [(p["global_batch_size"], p["epoch"], p["sample_in_epoch"]) for p in (before, after)] == [
        (12, 1, 12),
        (12, 2, 0),
    ]


def two_workers(place, workload, flags, folder):
    return train(place, workload, flags, folder=folder)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_manifest_of_two_workers_has_the_parts_of_both(gloo, tmp_path, strategy):
    flags = {"strategy.name": strategy, "checkpoint.every": "3 steps", "stop.after": "3 steps", "batch.micro_size": 4}
    finished = gloo.run(2, two_workers, Tokens(), flags, str(tmp_path))[0]
    manifest = manifests(tmp_path)[3]
    assert (manifest.world_size, manifest.strategy) == (2, strategy)
    assert {name.split(".")[1] for name in manifest.tensors if name.startswith("random.")} == {"0", "1"}
    assert manifest.values["progress"]["count_per_row"] == finished.steps[2].count / finished.steps[2].num_samples
    assert_bytes_are_as_stated(tmp_path)
    stores = Catalog.of_run(str(tmp_path)).stores
    for name, weights in finished.weights.items():
        assert torch.equal(read_tensor(stores, manifest.tensors[f"model.{name}"]), weights)
