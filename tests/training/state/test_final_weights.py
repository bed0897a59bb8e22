"""Final weights: no rank waits for another one's file, none holds more than its share, and half a set is never taken for whole."""

from __future__ import annotations

import errno
import json
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_pool import COLLECTIVE_TIMEOUT_S
from safetensors.torch import load_file
from small_runs import DEFAULTS, Classify, largest_difference, make_job, same_generators, train, train_in_plain_torch
from small_transformer import SmallTransformer
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor

from scaleray.checkpoints.catalog import Catalog
from scaleray.checkpoints.storage import Store
from scaleray.errors import CheckpointError, StorageError
from scaleray.launch.run import train as run
from scaleray.launch.workers import local_run
from scaleray.strategies.contract.weight_shares import Placed, WeightShare, shared_out
from scaleray.training import loop
from scaleray.training.health.worker_progress import Progress
from scaleray.training.setup import fine_tuning
from scaleray.training.state import final_weight_files
from scaleray.training.state.checkpointing import Checkpointing

SHARDED = {
    "fsdp": {"strategy.name": "fsdp"},
    "tensor": {"strategy.name": "tensor", "parallel.tensor": 2},
    "pipeline": {"strategy.name": "pipeline", "parallel.pipeline": 2},
}
ON_FOUR = {
    "hsdp": {"strategy.name": "fsdp", "parallel.replicate": 2},
    "tensor x fsdp": SHARDED["tensor"],
    "pipeline x ddp": SHARDED["pipeline"],
    "pipeline x fsdp": {**SHARDED["pipeline"], "parallel.shard": "auto"},
}
ADAMW = {"optimizer.name": "adamw", "optimizer.learning_rate": 0.01, "batch.micro_size": 2, "stop.after": "2 steps"}


class KeepsModel(SmallTransformer):
    """Knows the model that it built, as a user's workload may."""

    def build_model(self):
        self.model = super().build_model()
        return self.model


def run_loop(place, workload, flags, save, *, on_step=lambda job: None, **options):
    """The loop alone, with what is done with this rank's weights."""
    job, sources = make_job(workload, {**ADAMW, **flags}, world_size=place.world_size)

    class Probe:
        def on_setup(self, setup): ...

        def on_batch(self, batch): ...

        def on_gradients(self, correction): ...

        def on_step(self, result, learning_rate):
            on_step(job)

    with same_generators():
        return loop.run(
            job.on(place.world_size),
            place,
            sources=sources,
            emit=lambda m: None,
            save_weights=save,
            probe=Probe(),
            **options,
        )


def set_time_limit(seconds):
    for group in dist.distributed_c10d._world.pg_map:
        _set_pg_timeout(timedelta(seconds=seconds), group)


SHORT_S = 8.0  # of a collective: far more than one takes here, and how long a peer was waited for before


def end_with_a_slow_writer(place, flags, slow, folder):
    """Rank `slow` is not done with its file before all others have ended, however long that takes them."""
    ended = Path(folder, f"ended-{place.rank}")
    others = [Path(folder, f"ended-{rank}") for rank in range(place.world_size) if rank != place.rank]

    def save(share, name):
        deadline = time.monotonic() + 600
        while place.rank == slow and not all(other.exists() for other in others):
            assert time.monotonic() < deadline
            time.sleep(0.02)

    try:
        run_loop(place, SmallTransformer(num_blocks=2), flags, save, on_step=lambda job: set_time_limit(SHORT_S))
        return "ended well"
    finally:
        ended.touch()
        set_time_limit(COLLECTIVE_TIMEOUT_S)


@pytest.mark.each_value
@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("name", SHARDED)
def test_ranks_end_while_another_one_is_still_writing(gloo, tmp_path, name, slow):
    outcomes = gloo.attempt(2, end_with_a_slow_writer, SHARDED[name], slow, str(tmp_path))
    assert outcomes == ["ended well"] * 2


def end_with_slow_removals(place, folder):
    """Whether rank 0's peers were in the collectives of the end while it still removed old checkpoints."""
    came = Path(folder, "came")
    seen: list[bool] = []

    class Slow(Catalog):
        def prune(self, *args, **options):
            deadline = time.monotonic() + 1.0
            while not came.exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            seen.append(came.exists())
            return super().prune(*args, **options)

    flags = {**SHARDED["fsdp"], "checkpoint.every": "2 steps"}
    job, _ = make_job(SmallTransformer(), {**ADAMW, **flags}, world_size=place.world_size)
    checkpointing = Checkpointing(job, place, Slow([Store(folder)]), emit=lambda m: None)

    class AtTheEnd(Progress):
        def enter(self, phase):
            if phase == "end":
                came.touch()
            super().enter(phase)

    run_loop(
        place, SmallTransformer(), flags, lambda share, name: None, checkpointing=checkpointing, progress=AtTheEnd()
    )
    return seen


@pytest.mark.combination
def test_ranks_wait_for_the_removal_of_old_checkpoints_where_waiting_has_an_hour(gloo, tmp_path):
    first, _ = gloo.run(2, end_with_slow_removals, str(tmp_path))
    assert first == [False]


def end_and_look(place, flags, folder):
    """(this rank's share: bytes, the largest layer, all bytes; what the user's model is made of afterwards)"""
    workload, shares = KeepsModel(tie_head=False), []

    def save(share, name):
        shares.append(share)
        # tiny files, so that a share becomes several
        final_weight_files.save_weights(share, folder, rank=place.rank, max_bytes=1500)

    run_loop(place, workload, flags, save)
    (share,) = shares
    own = sum(t.numel() * t.element_size() for t in share.tensors.values())
    layers: dict[str, int] = {}
    for name, placed in share.layout.items():
        layer = name.rpartition(".")[0]
        layers[layer] = layers.get(layer, 0) + placed.num_bytes
    kinds = {type(p.data) for p in workload.model.parameters()}
    return own, max(layers.values()), sum(layers.values()), kinds, {p.device.type for p in share.tensors.values()}


@pytest.mark.always("fsdp")
@pytest.mark.parametrize(("world_size", "name"), [(2, n) for n in SHARDED] + [(4, n) for n in ON_FOUR])
def test_every_rank_writes_its_share_and_together_they_are_the_model(gloo, tmp_path, world_size, name):
    flags, path = {**SHARDED, **ON_FOUR}[name], tmp_path / "run"
    found = gloo.run(world_size, end_and_look, flags, str(path))
    for own, layer, total, kinds, devices in found:
        assert 0 < own <= total / world_size + layer and devices == {"cpu"}
        # what was shards is shards still: nothing was made whole for a worker that ends
        assert kinds == ({DTensor} if "strategy.name" in flags and flags["strategy.name"] != "pipeline" else kinds)
    assert sum(own for own, *_ in found) == found[0][2]
    folder = path / "weights"
    with pytest.raises(CheckpointError, match="missing"):  # all files are, and nobody has said so yet
        final_weight_files.read_weights(path)
    names = final_weight_files.complete(str(path))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert sorted(names) == sorted(f"weights/{n}" for n in (*files, "model.safetensors.index.json"))
    assert sorted(p.name for p in folder.iterdir()) == sorted([*(Path(n).name for n in names), "sha256.json"])
    assert len(files) > world_size and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    plain = train_in_plain_torch(SmallTransformer(tie_head=False), ADAMW).weights
    read = final_weight_files.read_weights(path)
    assert list(read) == list(plain) and largest_difference(plain, read) < 1e-9
    assert index["metadata"]["total_size"] == found[0][2] == sum(t.numel() * t.element_size() for t in read.values())
    # what other programs see: each file alone, where the index says
    assert all(name in load_file(folder / file) for name, file in index["weight_map"].items())


def start_from(place, flags, where):
    """Parameters after a step that changes nothing."""
    still = {**flags, "workload.weights": where, "optimizer.learning_rate": 1e-300, "stop.after": "1 steps", "seed": 5}
    return train(place, SmallTransformer(tie_head=False), {**ADAMW, **still}).weights


def test_a_training_starts_from_them_under_any_strategy_by_the_run_or_the_folder(gloo, tmp_path):
    gloo.run(2, end_and_look, SHARDED["fsdp"], str(tmp_path))
    final_weight_files.complete(str(tmp_path))
    wanted = final_weight_files.read_weights(tmp_path)
    for flags, where in (({"strategy.name": "ddp"}, tmp_path), (SHARDED["pipeline"], tmp_path / "weights")):
        started = gloo.run(2, start_from, flags, str(where))[0]
        assert largest_difference(wanted, started) < 1e-12


# what goes wrong


def end_on_a_full_disk(place, folder):
    write, error = Store.write, OSError(errno.ENOSPC, "No space left on device")

    def refuse(self, name, pieces):
        if name.endswith(".safetensors"):
            raise error
        return write(self, name, pieces)

    if place.rank == 1:
        Store.write = refuse
    try:
        run_loop(
            place,
            SmallTransformer(),
            SHARDED["fsdp"],
            lambda share, name: final_weight_files.save_weights(share, folder, name, rank=place.rank),
        )
    except StorageError as exc:
        return str(exc)
    finally:
        Store.write = write


@pytest.mark.combination
def test_a_full_disk_on_one_rank_is_that_ranks_error_and_the_weights_are_not_whole(gloo, tmp_path):
    first, second = gloo.run(2, end_on_a_full_disk, str(tmp_path))
    assert first is None
    assert "rank 1" in second and "No space left on device" in second and f"--resume {tmp_path}" in second
    with pytest.raises(StorageError, match=r"model-00002-of-00002\.safetensors is missing or torn"):
        final_weight_files.complete(str(tmp_path))
    with pytest.raises(CheckpointError, match="missing"):
        final_weight_files.read_weights(tmp_path)


def shares(num=2, *, value=1.0, rows=4):
    """A small model as `num` ranks have it."""
    tensors = {f"layer{n}.weight": torch.full((rows, 3), value + n) for n in range(num)}
    layout = {name: Placed(rank, 12 * rows) for rank, name in enumerate(tensors)}
    return [WeightShare({name: tensors[name]}, layout) for name in tensors]


def save_all(folder, given):
    for rank, share in enumerate(given):
        final_weight_files.save_weights(share, str(folder), rank=rank)


@pytest.mark.parametrize("spoil", [
    lambda file: file.unlink(), lambda file: file.write_bytes(file.read_bytes()[:-1]), lambda file: file.write_bytes(b""),
    lambda file: file.write_bytes(b"no safetensors at all"),
    lambda file: file.write_bytes((file.parent / "model-00001-of-00002.safetensors").read_bytes()),
])  # fmt: skip
def test_a_set_with_a_file_missing_cut_or_of_others_is_not_declared_whole(tmp_path, spoil):
    save_all(tmp_path, shares())
    spoil(tmp_path / "weights" / "model-00002-of-00002.safetensors")
    with pytest.raises(StorageError, match="model-00002-of-00002"):
        final_weight_files.complete(str(tmp_path))
    assert not (tmp_path / "weights" / "model.safetensors.index.json").exists()


def test_a_run_that_goes_on_has_no_final_weights_until_it_ends_again(tmp_path):
    save_all(tmp_path, shares())
    final_weight_files.complete(str(tmp_path))
    final_weight_files.forget(str(tmp_path))
    final_weight_files.save_weights(shares(value=7.0)[0], str(tmp_path), rank=0)  # new and old files lie side by side
    with pytest.raises(CheckpointError, match="missing"):
        final_weight_files.read_weights(tmp_path)
    save_all(tmp_path, shares(3, value=7.0))  # on more workers in the end
    assert len(final_weight_files.complete(str(tmp_path))) == 4
    assert len(list((tmp_path / "weights").iterdir())) == 5  # with the hashes; those of two are gone
    assert final_weight_files.read_weights(tmp_path)["layer2.weight"].eq(9.0).all()


def test_the_other_form_goes_when_a_run_ends_under_another_strategy(tmp_path):
    plain = WeightShare({"a": torch.ones(2)})
    final_weight_files.save_weights(plain, str(tmp_path), rank=0)
    assert list(final_weight_files.complete(str(tmp_path))) == ["weights.pt"]
    save_all(tmp_path, shares())
    final_weight_files.complete(str(tmp_path))
    assert not (tmp_path / "weights.pt").exists()
    final_weight_files.save_weights(plain, str(tmp_path), rank=0)
    assert list(final_weight_files.complete(str(tmp_path))) == ["weights.pt"] and not (tmp_path / "weights").exists()
    assert final_weight_files.read_weights(tmp_path)["a"].eq(1).all()


def test_a_plain_file_is_whole_or_as_it_was(tmp_path, monkeypatch):
    final_weight_files.save_weights(WeightShare({"a": torch.ones(2)}), str(tmp_path), rank=0)

    def cut_off(state, stream):
        stream.write(b"PK")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", cut_off)
    with pytest.raises(StorageError, match="No space left"):
        final_weight_files.save_weights(WeightShare({"a": torch.zeros(2)}), str(tmp_path), rank=0)
    assert final_weight_files.read_weights(tmp_path)["a"].eq(1).all()
    assert [p.name for p in tmp_path.iterdir()] == ["weights.pt"]


# how they are shared out


@pytest.mark.parametrize("num", [1, 2, 3, 7, 64])
def test_shares_are_even_but_for_a_layer_and_layers_stay_whole(num):
    sizes = {f"{n}.{part}": size for n, size in enumerate([5, 900, 3, 3, 3, 400, 20, 1]) for part in ("weight", "bias")}
    parts = shared_out(sizes, num)
    assert list(parts) == list(sizes) and list(parts.values()) == sorted(parts.values())
    assert all(0 <= part < num for part in parts.values())
    assert all(parts[f"{n}.weight"] == parts[f"{n}.bias"] for n in range(8))
    total = sum(sizes.values())
    for part in range(num):
        assert sum(size for name, size in sizes.items() if parts[name] == part) <= total / num + 2 * 900


def test_what_has_no_bytes_at_all_is_shared_out_too():
    assert set(shared_out({"a": 0, "b.c": 0}, 4).values()) <= {0, 1, 2, 3} and shared_out({}, 4) == {}


def test_files_are_a_ranks_own_and_no_larger_than_the_limit_or_one_tensor():
    layout = {"a": Placed(0, 60), "b": Placed(0, 60), "c": Placed(2, 500), "d": Placed(2, 10), "e": Placed(0, 30)}
    files = final_weight_files.file_names(layout, max_bytes=100)
    assert files == {
        "a": "model-00001-of-00004.safetensors",
        "b": "model-00002-of-00004.safetensors",
        "e": "model-00002-of-00004.safetensors",
        "c": "model-00003-of-00004.safetensors",
        "d": "model-00004-of-00004.safetensors",
    }
    assert list(files) == list(layout)


class WithExtraState(Classify):
    def build_model(self):
        class Counts(nn.Linear):
            def get_extra_state(self):
                return {"calls": 3}

            def set_extra_state(self, state): ...

        return nn.Sequential(Counts(6, 8), nn.Tanh(), nn.Linear(8, 3))


def test_extra_state_that_no_such_file_can_hold_is_named(gloo):
    finished = gloo.run(2, train, WithExtraState(), {"strategy.name": "fsdp", "stop.after": "1 steps"})[0]
    assert [e for e in finished.events if "0._extra_state" in e]
    assert list(finished.weights) == ["0.weight", "0.bias", "2.weight", "2.bias"]


LORA = {"fine_tuning.lora_rank": 2, "fine_tuning.lora_layers": ["0", "2"]}


def test_adapters_are_merged_where_their_layer_is(gloo):
    workload = Classify()
    merged = gloo.run(2, train, workload, {**LORA, "strategy.name": "fsdp"})[0].weights
    alone = gloo.run(1, train, workload, LORA)[0].weights
    assert list(merged) == list(alone) and largest_difference(alone, merged) < 1e-9
    assert not fine_tuning.has_adapters(merged)


# what a run makes of them


def in_two_shares(run_path, *, torn):
    """What two workers would have left of a worker's `weights.pt`."""
    plain = torch.load(Path(run_path, "weights.pt"), weights_only=True)
    layout = {n: Placed(number % 2, t.numel() * t.element_size()) for number, (n, t) in enumerate(plain.items())}
    for rank in (0,) if torn else (0, 1):
        own = {name: plain[name] for name, placed in layout.items() if placed.rank == rank}
        final_weight_files.save_weights(WeightShare(own, layout), run_path, rank=rank)
    return plain


@pytest.fixture
def sharded_run(tmp_path, monkeypatch, mlflow_database):
    """A run in this process whose workers leave shares; half of them are there with `torn`."""

    def start(*, torn):
        left = []

        def run_here(*args, run_path, **options):
            real(*args, run_path=run_path, **options)
            left.append((run_path, in_two_shares(run_path, torn=torn)))

        real = local_run.run_here
        monkeypatch.setattr(local_run, "run_here", run_here)
        flags = {
            **DEFAULTS,
            "stop.after": "2 steps",
            "checkpoint.storage_path": str(tmp_path / "runs"),
            "tracking.uri": f"sqlite:///{mlflow_database}",
        }
        try:
            return run.train(flags, Classify(), local=True), *left[0]
        finally:
            monkeypatch.undo()

    return start


def test_the_driver_declares_them_whole_and_mlflow_has_them(sharded_run):
    record, folder, plain = sharded_run(torn=False)
    read = final_weight_files.read_weights(folder)
    assert list(read) == list(plain) and all(torch.equal(read[name], plain[name]) for name in plain)
    assert len(record.weights) == 3 and all(
        Store(folder).digest(n)[0] == f["sha256"] for n, f in record.weights.items()
    )
    assert record.status == "FINISHED" and not Path(folder, "weights.pt").exists()
    from mlflow import MlflowClient

    files = sorted(f.path for f in MlflowClient(record.tracking_uri).list_artifacts(record.run_id, "model"))
    assert files == [
        "model/model-00001-of-00002.safetensors",
        "model/model-00002-of-00002.safetensors",
        "model/model.safetensors.index.json",
        "model/sha256.json",
    ]


def test_a_run_whose_weights_are_torn_has_failed(sharded_run, mlflow_database):
    with pytest.raises(StorageError, match="missing or torn"):
        sharded_run(torn=True)
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{mlflow_database}")
    experiments = [e.experiment_id for e in client.search_experiments()]
    assert [r.info.status for r in client.search_runs(experiments)] == ["FAILED"]
