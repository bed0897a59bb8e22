"""A checkpoint that cannot be written costs nothing but itself; one that is written beside the training holds its own step."""

from __future__ import annotations

import errno
import threading
import time
from unittest import mock

import pytest
import torch
from saved_runs import assert_equal, catalog_of, make_saver, read_all, save, shards, snapshot
from small_runs import Classify, train, train_alone
from torch import nn

from scaleray.checkpoints.storage import Store
from scaleray.records.run_record import CheckpointRecord, EventRecord

FLAGS = {"checkpoint.every": "2 steps", "stop.after": "8 steps", "precision.dtype": "fp32", "checkpoint.keep_last": 100}
FULL = OSError(errno.ENOSPC, "No space left on device")
WRITE = Store.write


def refusing(matches):
    """Store.write that raises for the names that match."""

    def write(self, name, pieces, *, known=""):
        if matches(self.path(name)):
            raise FULL
        return WRITE(self, name, pieces)

    return mock.patch.object(Store, "write", write)


@pytest.mark.parametrize("part", [".bin", "manifest.json"])
def test_training_goes_on_when_the_disk_is_full(tmp_path, part):
    whole = train_alone(Classify(), FLAGS)
    with refusing(lambda path: "step-000000004" in path and part in path):
        finished = train_alone(Classify(), FLAGS, folder=tmp_path)
    assert finished.losses == whole.losses
    warnings = [m.text for m in finished.messages if isinstance(m, EventRecord) and m.kind == "warning"]
    assert len(warnings) == 1 and "step 4 could not be written" in warnings[0] and "No space left" in warnings[0]
    catalog = catalog_of(tmp_path)
    assert [m.step for m in catalog.complete()] == [8, 6, 2]
    assert all(catalog.check(m) == [] for m in catalog.complete())
    assert not (tmp_path / "checkpoints" / "step-000000004").exists() or not shards(
        tmp_path / "checkpoints" / "step-000000004"
    )


def train_with_one_full_disk(place, folder, full_rank):
    with refusing(lambda path: "step-000000004" in path and f"rank-{full_rank:05d}" in path):
        finished = train(place, Classify(), {**FLAGS, "batch.global_size": 12}, folder=folder)
    return finished.losses, finished.events, [c.step for c in finished.checkpoints]


@pytest.mark.parametrize("full_rank", [0, 1, 2])
def test_one_rank_with_a_full_disk_gives_the_checkpoint_up_for_all(gloo, tmp_path, full_rank):
    outcomes = gloo.run(3, train_with_one_full_disk, str(tmp_path), full_rank)
    losses, events, steps = outcomes[0]
    assert len(losses) == 8 and steps == [2, 6, 8]
    assert [e for e in events if "could not be written" in e and "No space left" in e]
    assert len(events) == 1 and all(not other[1] for other in outcomes[1:])
    catalog = catalog_of(tmp_path)
    assert [m.step for m in catalog.complete()] == [8, 6, 2]
    assert all(catalog.check(m) == [] for m in catalog.complete())
    assert not shards(tmp_path / "checkpoints" / "step-000000004"), "ranks that could write tidy up too"


def test_a_second_place_that_refuses_costs_the_copy_only(tmp_path):
    messages = []
    catalog = catalog_of(tmp_path / "run", tmp_path / "copies")
    saver = make_saver(catalog, messages=messages)
    with refusing(lambda path: "copies" in path):
        save(saver, 1, {"t": torch.ones(3)})
    assert isinstance(messages[0], CheckpointRecord) and "not stored in every location" in messages[1].text
    assert snapshot(tmp_path / "run") and not snapshot(
        tmp_path / "copies" if (tmp_path / "copies").exists() else tmp_path / "x"
    )
    save(saver, 2, {"t": torch.ones(3)})  # names the file of step 1
    assert all(damage.healed_from for m in catalog.complete() for damage in catalog.check(m))
    assert [path.relative_to(tmp_path / "run") for path in shards(tmp_path / "run")] == [
        path.relative_to(tmp_path / "copies" / "run") for path in shards(tmp_path / "copies")
    ]


def test_what_raises_before_publishing_gives_the_checkpoint_up(tmp_path):
    messages = []
    saver = make_saver(catalog_of(tmp_path), messages=messages)
    saver.before_publishing = mock.Mock(side_effect=[RuntimeError("the record is behind"), {"mlflow": 3}])
    save(saver, 1, {"t": torch.ones(3)})
    assert "step 1 could not be written: RuntimeError: the record is behind" in messages[0].text
    save(saver, 2, {"t": torch.ones(3)})
    assert saver.catalog.newest().facts["mlflow"] == 3
    assert len(shards(tmp_path)) == 1


def model(width):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


def saved_steps(folder, width, *, asynchronous, steps):
    """Train in plain torch with a checkpoint after every step; gives the catalog."""
    network = model(width)
    optimizer = torch.optim.SGD(network.parameters(), 0.05)
    catalog = catalog_of(folder)
    saver = make_saver(catalog, asynchronous=asynchronous, full_every=3)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        network(x).square().sum().backward()
        saver.wait_staged()
        optimizer.step()
        saver.save(step, network.state_dict(), volatile=set(), values=lambda gather: {}, facts={})
    saver.wait()
    return catalog


@pytest.mark.always("4-60")
@pytest.mark.parametrize(("width", "steps"), [(4, 60), (1024, 8)])
def test_a_checkpoint_beside_the_training_holds_the_values_of_its_own_step(tmp_path, width, steps):
    beside = saved_steps(tmp_path / "a", width, asynchronous=True, steps=steps)
    waiting = saved_steps(tmp_path / "b", width, asynchronous=False, steps=steps)
    assert [m.step for m in beside.complete()] == [m.step for m in waiting.complete()] == list(range(steps, 0, -1))
    for step in range(1, steps + 1):
        assert_equal(read_all(beside, beside.read(step)), read_all(waiting, waiting.read(step)))


def slow_staging():
    from scaleray.checkpoints.staging import Staging

    copy = Staging.copy

    def slowly(self, key, tensor):
        time.sleep(0.05)
        return copy(self, key, tensor)

    return mock.patch.object(Staging, "copy", slowly)


def test_the_optimizer_waits_until_its_tensors_are_copied(tmp_path):
    started = time.perf_counter()
    saver = make_saver(catalog_of(tmp_path), asynchronous=True)
    tensors = {f"t{i}": torch.zeros(10) for i in range(4)}
    with slow_staging():
        saver.save(1, tensors, volatile=set(), values=lambda gather: {}, facts={})
        saver.wait_staged()
        for tensor in tensors.values():
            tensor.add_(1.0)
        saver.wait()
    assert all(float(t.sum()) == 0 for t in read_all(saver.catalog, saver.catalog.read(1)).values())
    assert 0.0 < saver.stall_s <= time.perf_counter() - started, "the wait is counted, and nothing else"


def test_a_forward_pass_that_changes_a_parameter_is_noticed(tmp_path):
    messages = []
    saver = make_saver(catalog_of(tmp_path), asynchronous=True, messages=messages)
    tensors = {f"t{i}": torch.zeros(10) for i in range(4)}
    with slow_staging():
        saver.save(1, tensors, volatile=set(), values=lambda gather: {}, facts={})
        tensors["t2"].add_(1.0)  # as a normalisation in place does
        saver.wait()
    assert saver.catalog.newest() is None
    assert "t2 was changed by a forward pass" in messages[0].text
    saver.save(2, tensors, volatile=set(), values=lambda gather: {}, facts={})
    assert saver.catalog.read(2).step == 2, "from then on training waits for the copy"


def test_what_a_forward_pass_may_change_is_copied_at_once(tmp_path):
    saver = make_saver(catalog_of(tmp_path), asynchronous=True)
    buffer = torch.zeros(10)
    with slow_staging():
        saver.save(1, {"buffer": buffer, "t": torch.ones(3)}, volatile={"buffer"}, values=lambda gather: {}, facts={})
        buffer.add_(1.0)
        saver.wait()
    assert float(read_all(saver.catalog, saver.catalog.read(1))["buffer"].sum()) == 0


def test_no_thread_is_left(tmp_path):
    train_alone(Classify(), FLAGS, folder=tmp_path)
    assert not [t for t in threading.enumerate() if t.name == "scaleray-checkpoint"]
