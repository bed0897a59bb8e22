"""Random transforms in a Dataset: whole trainings repeat, resume and spread as if their rows were stored."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from random_rows import Augmented, DrawsForNothing, OwnGenerator, RarelyDraws, Training, Unmoved
from small_runs import make_job, relative_differences, train, train_alone
from verified import found, judge

from scaleray.data import Part
from scaleray.data.blocks import LocalBlocks
from scaleray.errors import DataError
from scaleray.records.run_record import EventRecord
from scaleray.training.step import evaluation
from scaleray.verification.verification_plan import make_plan
from scaleray.verification.verify_options import VerifyOptions

FLAGS = {"stop.after": "10 steps", "deterministic": True}


def noisy(*, dropout=False):
    return Training(Augmented(), val=Augmented(11, seed=1), dropout=dropout)


def test_a_run_with_random_transforms_repeats_itself_to_the_bit():
    first, second = (train_alone(noisy(dropout=True), FLAGS) for _ in range(2))
    assert first.losses == second.losses
    assert [e.metrics for e in first.evaluations] == [e.metrics for e in second.evaluations]
    assert train_alone(noisy(), {**FLAGS, "seed": 7}).losses[0] != first.losses[0]
    assert first.summary.sample_order.endswith("random transforms follow from seed, epoch and row")


def test_the_draws_of_the_data_leave_the_masks_of_dropout_as_they_are():
    plain, drawing = (train_alone(Training(d, dropout=True), FLAGS) for d in (Unmoved(), DrawsForNothing()))
    assert plain.losses == drawing.losses
    assert all(torch.equal(value, drawing.weights[name]) for name, value in plain.weights.items())


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_number_of_workers_reads_the_same_values(gloo, world_size):
    flags = {"stop.after": "8 steps", "batch.global_size": 6}
    alone = train_alone(noisy(), flags)
    spread = gloo.run(world_size, train, noisy(), flags)[0]
    assert max(relative_differences(spread.losses, alone.losses)) < 1e-9
    assert spread.evaluations[-1].metrics == pytest.approx(alone.evaluations[-1].metrics, rel=1e-9)


@pytest.mark.parametrize("kill_at", [3, 5])
def test_a_run_resumed_in_the_middle_of_an_epoch_reads_the_same_values(tmp_path, kill_at):
    flags = {**FLAGS, "checkpoint.every": "1 steps"}
    whole = train_alone(noisy(dropout=True), flags)
    train_alone(noisy(dropout=True), flags, folder=tmp_path, kill_at=kill_at)
    resumed = train_alone(noisy(dropout=True), flags, folder=tmp_path)
    assert len(resumed.losses) == 10 - kill_at
    assert resumed.losses == whole.losses[kill_at:]


def test_every_evaluation_of_a_split_reads_the_same_values(monkeypatch):
    monkeypatch.setattr(evaluation, "KEPT_BYTES", 0)
    flags = {**FLAGS, "evaluation.every": "2 steps", "optimizer.learning_rate": 1e-30}
    losses = [record.metrics["val/loss"] for record in train_alone(noisy(), flags).evaluations]
    assert len(losses) == 5 and len(set(losses)) == 1


def test_an_evaluation_split_follows_from_the_runs_seed():
    def values(seed):
        job, sources = make_job(noisy(), {"seed": seed})
        plan = job.evaluation_plan(job.splits["val"])
        blocks = LocalBlocks(sources["val"], Part(plan, 0, 1, 0, plan.steps_per_epoch), chunk_bytes=1)
        return np.concatenate([block["x"] for block in blocks])

    assert np.array_equal(values(1), values(1)) and not np.array_equal(values(1), values(2))


def test_a_deterministic_run_seeds_a_row_that_the_first_look_passed_over():
    first, second = (train_alone(Training(RarelyDraws()), FLAGS) for _ in range(2))
    assert first.losses == second.losses


def test_data_that_cannot_be_had_again_are_named_in_the_run_and_refused_where_bits_are_promised():
    workload = Training(Unmoved(), val=OwnGenerator())
    run = train_alone(workload, {"stop.after": "1 steps"})
    (warning,) = [m for m in run.messages if isinstance(m, EventRecord) and m.kind == "warning"]
    assert warning.text.startswith("the val data: the values of the rows are not repeatable: row 0 differs in column x")
    order = train_alone(Training(OwnGenerator()), {"stop.after": "1 steps"}).summary.sample_order
    assert order.startswith("exact: ") and "; but the values of the rows are not repeatable" in order
    with pytest.raises(DataError, match="the val data is not repeatable, which deterministic requires") as caught:
        make_job(workload, {"deterministic": True})
    assert "global generators of torch, numpy or `random`" in str(caught.value)


# verify


@pytest.mark.combination
def test_verify_finds_random_transforms_equal_on_two_workers(gloo):
    assert gloo.run(2, judge, noisy(), {})[0].verdict == "equal"


@pytest.mark.combination
def test_verify_tells_data_that_are_not_repeatable_from_another_order(gloo):
    outcome = gloo.run(2, judge, Training(OwnGenerator(only=1)), {})[0]
    assert found(outcome)[0] == "data not repeatable"
    assert "one process reads other values in step" in outcome.mismatch.why


def test_verify_refuses_data_that_the_first_look_finds_not_repeatable():
    job, sources = make_job(Training(OwnGenerator()))
    with pytest.raises(
        DataError, match=r"the train data is not repeatable: .*Runs can be compared only on the same values"
    ):
        make_plan(job.config, VerifyOptions(strategies=("ddp",)), job.workload, sources)
