"""Batches made ahead by the thread that reads: the same as those made in turn, and only where that can be told."""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest
import torch
from small_runs import make_job, train_alone
from torch import nn
from waiting import wait_until

from scaleray.data import Padding, Part, RankBatch, Split, StepPlan, StepStream, load_sources
from scaleray.data.blocks import LocalBlocks
from scaleray.data.collate_ahead import CollateAhead
from scaleray.data.collation import batch_values, collated
from scaleray.data.stream import MADE_AHEAD
from scaleray.errors import DataError, WorkloadError
from scaleray.training.step import micro_batches
from scaleray.training.step.micro_batches import cuts

LENGTHS = np.random.default_rng(0).integers(1, 9, size=26)


class Sequences:
    """Sequences of unequal length; `made` has the thread in which each batch was made."""

    depends_on_micro_batch = True  # the bias is counted in the padding, too

    def __init__(self):
        self.made = []

    def build_model(self):
        return nn.Linear(2, 3)

    def datasets(self):
        draw = np.random.default_rng(1)
        x = [draw.normal(size=(length, 2)).astype(np.float32) for length in LENGTHS]
        return {"train": {"x": x, "y": LENGTHS % 3}, "val": {"x": x[:5], "y": LENGTHS[:5] % 3}}

    def collate(self, rows):
        self.made.append((threading.current_thread().name, len(rows)))
        return {"x": nn.utils.rnn.pad_sequence([row["x"] for row in rows], batch_first=True), "y": rows.columns["y"]}

    def loss(self, model, batch):
        logits = model(batch["x"]).sum(1)
        return nn.functional.cross_entropy(logits, batch["y"], reduction="sum"), len(batch["y"])


FLAGS = {"stop.after": "9 steps", "batch.global_size": 6, "batch.micro_size": 2}


def in_turn(monkeypatch):
    """No batch is made ahead."""
    monkeypatch.setattr(micro_batches, "collate_ahead", lambda *given, **more: None)
    monkeypatch.setattr("scaleray.training.loop.collate_ahead", lambda *given, **more: None)


def threads_of(workload, *, rows=2):
    return {name for name, num in workload.made if num == rows}


def test_batches_are_made_by_the_thread_that_reads_and_are_those_made_in_turn_to_the_bit(monkeypatch):
    ahead = Sequences()
    found = train_alone(ahead, FLAGS)
    assert threads_of(ahead) == {"scaleray-input", "MainThread"}
    # the latter looks at the first batch, and evaluates rows that are kept
    assert sum(name == "MainThread" for name, num in ahead.made if num == 2) <= 4
    in_turn(monkeypatch)
    late = Sequences()
    assert train_alone(late, FLAGS).losses == found.losses and len(found.losses) == 9
    assert threads_of(late) == {"MainThread"}


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_resumed_run_has_the_batches_of_the_whole_one_to_the_bit(tmp_path, deterministic):
    flags = {**FLAGS, "deterministic": deterministic, "checkpoint.every": "1 steps"}
    whole = train_alone(Sequences(), flags)
    train_alone(Sequences(), flags, folder=tmp_path, kill_at=6)
    resumed = Sequences()
    assert train_alone(resumed, flags, folder=tmp_path).losses == whole.losses[6:]
    assert ("scaleray-input" in threads_of(resumed)) is not deterministic


def stream_of(workload, part, size):
    source = load_sources(workload)["train"]
    ahead = CollateAhead(workload.collate, False, lambda batch: cuts(batch.num_rows, size), row_bytes=64)
    return StepStream(lambda part, demand: LocalBlocks(source, part, chunk_bytes=99), part, collate=ahead)


def check(batch, size):
    """Every micro-batch is there, is that of its rows, and is given away once."""
    assert set(batch.made) == set(cuts(batch.num_rows, size)) and batch.num_rows
    for start, stop in list(batch.made):
        rows = {name: column[start:stop] for name, column in batch.columns.items()}
        expected = collated(Sequences().collate, rows, gives_tuples=False)
        for one, other in zip(batch_values(batch.take(start, stop).batch), batch_values(expected), strict=True):
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
        assert batch.take(start, stop) is None


def test_batches_follow_shares_that_are_cut_anew():
    part = Part(StepPlan(26, 8, seed=3), rank=1, world_size=2, first_step=0, last_step=6)
    stream = stream_of(Sequences(), part, 3)
    first = next(stream)
    assert first.num_rows == 4
    check(first, 3)
    stream.cut(1, (2, 6))
    rest = list(stream)
    assert [batch.num_rows for batch in rest] == [6, 6, 2, 6, 6]  # 26 rows: 8, 8, 8, 2
    for batch in rest:
        check(batch, 3)


def test_a_batch_that_was_made_for_other_micro_batches_is_made_again():
    batch = RankBatch(0, {"y": np.arange(6)}, 6, made={(0, 6): ["whole"]})
    pieces = [rows for rows, _ in micro_batches.micro_batches(batch, 3)]
    assert [rows["y"].tolist() for rows in pieces] == [[0, 1, 2], [3, 4, 5]]
    ((rows, weight),) = micro_batches.micro_batches(batch, 6)
    assert rows.batch == "whole" and weight == 6


def test_each_of_several_losses_has_a_batch_of_its_own():
    class Two(Sequences):
        def optimizer(self, model, settings):
            return {name: torch.optim.SGD([p], 0.1) for name, p in model.named_parameters()}

        def losses(self):
            return {"weight": self.shifting, "bias": self.loss}

        def shifting(self, model, batch):
            batch["x"] += 1.0  # in place: the other loss must not see it
            return self.loss(model, batch)

    found = Two()
    train_alone(found, {**FLAGS, "strategy.name": "ddp"})
    made = [name for name, num in found.made if num == 2]
    assert made.count("scaleray-input") >= 2 * 3 * 9 - 8 and made.count("MainThread") <= 8


class Drawing(Sequences):
    def collate(self, rows):
        return {**super().collate(rows), "noise": torch.rand(len(rows))}


class Counting(Sequences):
    calls = 0

    def collate(self, rows):
        self.calls += 1
        return super().collate(rows)


class Unrepeatable(Sequences):
    def __init__(self):
        super().__init__()
        self.draw = np.random.default_rng(0)

    def collate(self, rows):
        return {**super().collate(rows), "noise": self.draw.random(len(rows))}


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        (Drawing, r"collate\(\) at .*test_collating.py:\d+ draws from the generators of the process"),
        (Counting, r"collate\(\) at .*test_collating.py:\d+ changes the workload \(calls\)"),
        (Unrepeatable, r"collate\(\) at .*test_collating.py:\d+ returns different batches for the same rows"),
    ],
)
def test_what_cannot_be_made_ahead_is_made_in_turn_and_said_with_its_line(workload, words):
    job, _ = make_job(workload())
    warnings = [text for text in job.data_warnings() if text.startswith("the train data")]
    assert len(warnings) == 1 and re.search(words, warnings[0]), warnings
    made = workload()
    train_alone(made, FLAGS)
    assert threads_of(made) == {"MainThread"}


def test_a_collate_that_is_not_repeatable_is_refused_where_bits_are_promised():
    with pytest.raises(
        DataError, match=r"which deterministic requires: collate\(\) at .*test_collating.py:\d+ returns different"
    ):
        make_job(Unrepeatable(), {"deterministic": True})
    make_job(Drawing(), {"deterministic": True})  # those generators are in checkpoints


def test_an_error_in_a_collate_that_runs_ahead_has_its_line():
    class Failing(Sequences):
        def collate(self, rows):
            batch = super().collate(rows)
            if len(self.made) > 9:
                raise ValueError("no such row")
            return batch

    with pytest.raises(WorkloadError, match=r"collate\(\) failed while making a batch of 2 rows[^$]*no such row"):
        train_alone(Failing(), FLAGS)


def test_a_run_records_who_makes_its_batches():
    def found(workload):
        return Split.of("train", load_sources(workload)["train"], workload).reading("auto")["collated"]

    assert found(Sequences()) == "ahead of the training" and "draws" in found(Drawing())
    padding = type("Padded", (Sequences,), {"collate": Padding()})()
    assert found(padding) == "ahead of the training"


def test_batches_are_made_a_few_steps_ahead_and_no_further():
    workload = Sequences()
    stream = stream_of(workload, Part(StepPlan(26, 2), 0, 1, 0, 200), 2)
    wait_until(lambda: len(workload.made) == MADE_AHEAD + 1)  # one that waits for its place
    next(stream)
    wait_until(lambda: len(workload.made) == MADE_AHEAD + 2)
    stream.close(wait_s=9.0)
