"""What has not changed is not written again, for a bounded number of checkpoints."""

from __future__ import annotations

import pytest
import torch
from saved_runs import assert_equal, catalog_of, make_saver, read_all, save
from small_runs import Classify, TiedAndFrozen, train, train_alone
from torch import nn


class FineTune(Classify):
    """A frozen body with 90 % of the parameters, and a head that is trained."""

    def build_model(self):
        body = nn.Sequential(nn.Linear(6, 512), nn.Tanh(), nn.Linear(512, 196), nn.Tanh()).requires_grad_(False)
        head = nn.Sequential(nn.Linear(196, 57), nn.Tanh(), nn.Linear(57, 3))
        frozen, trained = (sum(p.numel() for p in part.parameters()) for part in (body, head))
        assert 0.9 < frozen / (frozen + trained) < 0.902
        return nn.Sequential(body, head)


FLAGS = {
    "checkpoint.every": "1 steps", "stop.after": "12 steps", "checkpoint.keep_last": 100, "optimizer.name": "adamw", "precision.dtype": "fp32",
}  # fmt: skip


# AdamW keeps two more numbers for each trained parameter, so a checkpoint holds 1 + 2 * 0.1 times the model, of which
# 3 * 0.1 changes: 25 %. SGD's momentum is one more: 18 %.
@pytest.mark.parametrize(("optimizer", "limit"), [("adamw", 0.25), ("sgd", 0.18)])
def test_a_fine_tune_with_90_percent_frozen_writes_a_quarter_of_the_bytes_at_most(tmp_path, optimizer, limit):
    flags = {**FLAGS, "optimizer.name": optimizer}
    incremental = train_alone(FineTune(), flags, folder=tmp_path / "a")
    full = train_alone(FineTune(), {**flags, "checkpoint.full_every": 1}, folder=tmp_path / "b")
    assert len({c.bytes_written for c in full.checkpoints}) == 1
    assert incremental.checkpoints[0].bytes_written == full.checkpoints[0].bytes_written, "the first is always full"
    parts = [a.bytes_written / b.bytes_written for a, b in zip(incremental.checkpoints, full.checkpoints, strict=True)]
    print(
        f"each after the first: {min(parts[1:]):.2%} to {max(parts[1:]):.2%} of a full one; all {len(parts)}: {sum(parts) / len(parts):.1%}"
    )
    assert max(parts[1:]) <= limit
    assert_equal(incremental.weights, full.weights)


@pytest.mark.always("[3]")
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_leave_out_what_is_unchanged_as_well(gloo, tmp_path, world_size):
    flags = {**FLAGS, "batch.global_size": 12, "stop.after": "4 steps"}
    finished = gloo.run(world_size, train_in, FineTune(), flags, str(tmp_path))[0]
    first, *others = [c.bytes_written for c in finished.checkpoints]
    assert len(others) == 3 and max(others) <= 0.25 * first
    catalog = catalog_of(tmp_path)
    for manifest in catalog.complete():
        assert catalog.check(manifest) == []


def train_in(place, workload, flags, folder):
    return train(place, workload, flags, folder=folder)


def test_a_resumed_fine_tune_does_not_write_the_frozen_part_again(tmp_path):
    train_alone(FineTune(), FLAGS, folder=tmp_path, kill_at=3)
    resumed = train_alone(FineTune(), FLAGS, folder=tmp_path)
    assert all(c.bytes_written < 0.5 * c.total_bytes for c in resumed.checkpoints)


def test_chains_are_bounded(tmp_path):
    catalog = catalog_of(tmp_path)
    saver = make_saver(catalog, full_every=4)
    tensors = {"frozen": torch.ones(100), "trained": torch.zeros(4)}
    for step in range(1, 10):
        save(saver, step, {**tensors, "trained": torch.full((4,), float(step))})
    chains = [m.chain for m in reversed(list(catalog.complete()))]
    assert chains == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    again = make_saver(catalog, full_every=4)
    again.start_from(catalog.read(8))  # the chain goes on where it was
    save(again, 9, tensors)
    assert catalog.read(9).chain == 0


def test_a_change_of_one_row_writes_its_tensor_as_a_whole(tmp_path):
    catalog = catalog_of(tmp_path)
    saver = make_saver(catalog)
    embedding = torch.zeros(1000, 16)
    save(saver, 1, {"embedding": embedding, "other": torch.ones(1000)})
    embedding[3] = 1.0
    save(saver, 2, {"embedding": embedding, "other": torch.ones(1000)})
    assert catalog.read(2).bytes_written == 64000
    save(saver, 3, {"embedding": embedding, "other": torch.ones(1000)})
    assert catalog.read(3).bytes_written == 0
    assert_equal(read_all(catalog, catalog.read(3)), {"embedding": embedding, "other": torch.ones(1000)})


def test_another_shape_or_dtype_with_the_same_bytes_is_another_tensor(tmp_path):
    catalog = catalog_of(tmp_path)
    saver = make_saver(catalog)
    for step, tensors in enumerate(
        [
            {"t": torch.zeros(4, 2)},
            {"t": torch.zeros(2, 4)},
            {"t": torch.zeros(2, 4, dtype=torch.int32)},
            {"u": torch.zeros(2, 4)},
        ]
    ):
        save(saver, step, tensors)
        assert_equal(read_all(catalog, catalog.read(step)), tensors)


def test_tied_and_frozen_weights_come_back(tmp_path):
    whole = train_alone(TiedAndFrozen(), FLAGS)
    train_alone(TiedAndFrozen(), FLAGS, folder=tmp_path, kill_at=5)
    resumed = train_alone(TiedAndFrozen(), FLAGS, folder=tmp_path)
    assert resumed.losses == whole.losses[5:]


def test_a_base_that_was_removed_from_outside_is_noticed_and_written_again(tmp_path):
    catalog, messages = catalog_of(tmp_path), []
    saver = make_saver(catalog, messages=messages)
    tensors = {"frozen": torch.ones(100), "trained": torch.zeros(4)}
    save(saver, 1, tensors)
    for file in tmp_path.rglob("*.bin"):
        file.unlink()
    save(saver, 2, {**tensors, "trained": torch.ones(4)})
    assert [m.step for m in catalog.complete()] == [1], "it would name bytes that are gone"
    assert "is missing" in messages[-1].text
    save(saver, 3, tensors)
    assert catalog.read(3).chain == 0
    assert_equal(read_all(catalog, catalog.read(3)), tensors)


def test_a_few_unchanged_bytes_do_not_keep_an_older_file(tmp_path):
    catalog = catalog_of(tmp_path)
    saver = make_saver(catalog, keep_last=1)
    for step in (1, 2):
        save(saver, step, {"large": torch.full((1000,), float(step)), "generator": torch.ones(40)})
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000000002"]
    assert catalog.read(2).chain == 0
