"""On a device that computes beside the host, steps are launched before the results of earlier ones are read: nothing of
a steady step waits for the device, and the training is the same. The CPU takes the part of such a device here."""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from small_runs import Classify, RankContext, Tokens, make_job, same_generators, train, train_alone

from scaleray.checkpoints.catalog import Catalog
from scaleray.checkpoints.manifest import folder_name
from scaleray.errors import LeftEarly, NonFiniteLossError, WorkloadError
from scaleray.records.run_record import StepRecord
from scaleray.strategies.contract.later import STEPS_AHEAD
from scaleray.training import loop
from scaleray.training.state.checkpointing import Checkpointing, Control

sys.path.append(str(Path(__file__).parents[3] / "jobs" / "benchmarks"))

from host_reads import HostReads, reads_of_steps

READ = "strategies/contract/later.py:read"
EVERYWHERE_BUT_ONE = ("ddp", "zero1", "fsdp", "tensor", "pipeline", "local_sgd", "diloco", "gossip", "async_sgd")
ADAMW = {"optimizer.name": "adamw", "optimizer.clip_norm": 0.5, "on_nonfinite": "skip"}


def runs_ahead():
    """Context in which this process treats its device as one that computes beside the host."""
    return mock.patch.object(loop, "steps_ahead", return_value=STEPS_AHEAD)


def reads_by_step(place, flags):
    """Where the host reads tensors between the beginning of each step and the next one."""
    with reads_of_steps() as found, runs_ahead():
        train(place, Tokens(num_rows=64), {"stop.after": "7 steps", **flags})
    return found


NUMBERS_OF_MICRO_BATCHES = {"strategies/pipeline/apply.py:forward"}  # tensors of the CPU, for torch's schedules
VERDICT = {READ}  # once, as the optimizer's kernel cannot leave a step out by itself
STEADY = [
    *[({"strategy.name": name, **ADAMW}, set()) for name in ("ddp", "zero1", "fsdp", "local_sgd", "diloco")],
    *[({"strategy.name": name, **ADAMW}, set()) for name in ("gossip", "async_sgd")],
    ({"strategy.name": "pipeline", **ADAMW}, NUMBERS_OF_MICRO_BATCHES),
    ({"strategy.name": "pipeline", "pipeline.schedule": "1f1b", "batch.micro_size": 1, **ADAMW}, NUMBERS_OF_MICRO_BATCHES),
    ({"strategy.name": "ddp"}, set()),  # sgd
    ({**ADAMW, "batch.micro_size": 1}, set()),
    ({**ADAMW, "precision.dtype": "bf16"}, set()),
    ({**ADAMW, "precision.dtype": "fp16"}, set()),
    ({**ADAMW, "strategy.name": "fsdp", "precision.dtype": "fp16"}, set()),
    ({**ADAMW, "tracking.every_steps": 1}, set()),
    *[({**ADAMW, "compression.name": name}, set()) for name in ("powersgd", "int8")],
    # what cannot do without
    ({"strategy.name": "tensor", **ADAMW}, VERDICT),  # torch has no fused kernel for DTensors of several meshes
    ({"strategy.name": "fsdp"}, VERDICT),  # nor a fused SGD for DTensors
    ({"precision.dtype": "fp16"}, VERDICT),  # whose fused SGD forgets a momentum when a first step is skipped
    ({"optimizer.name": "lars"}, VERDICT),
    # LAMB's counts of steps lie on the CPU, like those of torch's own optimizers
    ({"optimizer.name": "lamb"}, VERDICT | {"training/setup/large_batch_optimizers.py:<listcomp>"}),
    # no gradient may be sent before all ranks know that none ran out of memory
    ({**ADAMW, "memory.on_out_of_memory": "halve"}, {"training/step/back_off.py:agree_on"}),
]  # fmt: skip


@pytest.mark.always("'fsdp'", "'ddp'", "pipeline")
@pytest.mark.parametrize(("flags", "expected"), STEADY, ids=[str(flags) for flags, _ in STEADY])
def test_a_steady_step_waits_for_nothing_that_the_device_computes(gloo, flags, expected):
    for of_rank in gloo.run(2, reads_by_step, {"strategy.name": "ddp", **flags}):
        assert {where for step in range(3, 8) for where in of_rank[step]} <= expected
        assert max((reads.get(READ, 0) for reads in of_rank.values()), default=0) <= 1


def test_noise_is_measured_on_the_host_in_the_steps_that_are_due(gloo):
    flags = {"strategy.name": "ddp", **ADAMW, "noise_scale.measure": True, "noise_scale.every_steps": 3}
    of_rank = gloo.run(2, reads_by_step, flags)[0]
    assert [step for step, reads in of_rank.items() if reads] == [3, 6]


def test_a_read_is_counted_where_it_is_written():
    with HostReads() as reads:
        value = torch.ones(2)
        float(value[0]), value.tolist(), value[1].item(), bool(value[0] > 0), value[0].double() + 1
    assert sum(reads.found.values()) == 4


# the same training


def both_ways(place, workload, flags, **options):
    """A run that knows each step before the next one, and one that runs ahead."""
    known = train(place, workload, flags, **options)
    with runs_ahead():
        return known, train(place, workload, flags, **options)


def same_bits(known, ahead):
    """Whether two runs told the same and ended in the same weights; times aside."""
    told = lambda finished: [
        (s.step, s.loss, s.count, s.grad_norm, s.learning_rate, s.epoch, s.is_finite, s.loss_scale, s.sent_bytes)
        for s in finished.steps
    ]
    equal = all(torch.equal(known.weights[name], ahead.weights[name]) for name in known.weights)
    return str(told(known)) == str(told(ahead)) and equal and known.weights.keys() == ahead.weights.keys()


SAME = [
    *[{"strategy.name": n, "optimizer.name": "adamw", "deterministic": True} for n in EVERYWHERE_BUT_ONE],
    *[{"strategy.name": name, "optimizer.momentum": 0.9} for name in ("ddp", "fsdp", "local_sgd")],
    {"strategy.name": "ddp", "precision.dtype": "fp16", "optimizer.name": "adamw"},
    {"strategy.name": "ddp", "optimizer.name": "lamb", "optimizer.clip_norm": 0.3},
    {"strategy.name": "ddp", "compression.name": "topk", "on_nonfinite": "skip"},
]


@pytest.mark.always("'fsdp', 'optimizer.name'", "fp16", "topk")
@pytest.mark.parametrize("flags", SAME, ids=str)
def test_a_run_ahead_is_the_same_training_to_the_bit(gloo, flags):
    flags = {"batch.global_size": 12, "stop.after": "9 steps", "evaluation.every": "4 steps", **flags}
    for known, ahead in gloo.run(2, both_ways, Classify(num_rows=54, num_val=7), flags):
        assert same_bits(known, ahead)
        assert [(e.step, e.metrics) for e in known.evaluations] == [(e.step, e.metrics) for e in ahead.evaluations]


@pytest.mark.parametrize("workload", [Classify(), Tokens()])
def test_a_factor_in_the_optimizers_kernel_is_one_multiplied_before_it_but_for_rounding(workload):
    flags = {
        "optimizer.name": "adamw",
        "optimizer.clip_norm": 0.05,
        "stop.after": "12 steps",
        "precision.dtype": "fp64",
    }
    known = train_alone(workload, flags)
    with runs_ahead():
        ahead = train_alone(workload, flags)
    assert len(known.steps) == len(ahead.steps) == 12
    assert all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(known.losses, ahead.losses, strict=True))
    assert all(torch.allclose(known.weights[n], ahead.weights[n], rtol=1e-5, atol=1e-8) for n in known.weights)


# steps that are not finite


class NanAt(Classify):
    """A loss that is not a number in some steps, of two rows each."""

    def __init__(self, *steps):
        super().__init__(num_rows=24)
        self.bad, self.calls = steps, 0

    def loss(self, model, batch):
        self.calls += torch.is_grad_enabled()
        total, count = super().loss(model, batch)
        return (total * math.nan if self.calls in self.bad else total), count


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lamb"])
@pytest.mark.parametrize("policy", ["skip", "stop", "raise"])
def test_a_bad_step_changes_nothing_though_others_are_launched_after_it(policy, optimizer):
    flags = {"on_nonfinite": policy, "optimizer.name": optimizer, "optimizer.momentum": 0.9, "stop.after": "9 steps"}
    flags = (
        {**flags, "batch.global_size": 2}
        if optimizer == "sgd"
        else {**flags, "batch.global_size": 2, "optimizer.momentum": 0.0}
    )
    ends = pytest.raises(NonFiniteLossError, match="at step 4") if policy == "raise" else contextlib.nullcontext()
    with ends:
        known = train_alone(NanAt(4), flags)
    with ends, runs_ahead():
        ahead = train_alone(NanAt(4), flags)
    if policy != "raise":
        assert same_bits(known, ahead)
        assert known.summary.verdict == ahead.summary.verdict
        assert known.summary.nonfinite_steps == ahead.summary.nonfinite_steps == 1
        assert len(ahead.steps) == (4 if policy == "stop" else 9)


def test_an_average_does_not_move_after_the_step_that_ends_the_training():
    flags = {"on_nonfinite": "stop", "batch.global_size": 2, "stop.after": "9 steps", "averaging.decay": 0.9}
    known = train_alone(NanAt(4), flags)
    with runs_ahead():
        ahead = train_alone(NanAt(4), flags)
    assert len(known.steps) == 4 and known.trained.keys() == known.weights.keys()
    assert same_bits(known, ahead)


class CountsNothingAt(Classify):
    def loss(self, model, batch):
        total, count = super().loss(model, batch)
        return total * 0.0, 0 * count


def test_a_batch_of_which_nothing_counts_is_refused_as_soon_as_it_is_known():
    job_flags = {"stop.after": "6 steps"}
    with runs_ahead(), pytest.raises(WorkloadError, match="count"):
        train_alone(CountsNothingAt(), job_flags)


# what is decided


def test_a_checkpoint_holds_what_is_known_of_every_step_before_it(tmp_path):
    flags = {"checkpoint.every": "3 steps", "checkpoint.keep_last": 9, "stop.after": "8 steps", "batch.global_size": 12}
    with runs_ahead():
        whole = train_alone(Tokens(num_rows=54), flags, folder=tmp_path)
        catalog = Catalog.of_run(str(tmp_path))
        for step in catalog.steps():
            done = whole.steps[step - 1]
            assert catalog.read(step).values["progress"]["count_per_row"] == done.count / done.num_samples
        for step in (6, 8):
            shutil.rmtree(next(tmp_path.rglob(folder_name(step))))
        resumed = train_alone(Tokens(num_rows=54), flags, folder=tmp_path)
    assert [step.step for step in resumed.steps] == [4, 5, 6, 7, 8]
    assert resumed.losses == whole.losses[3:]
    assert all(torch.equal(whole.weights[name], resumed.weights[name]) for name in whole.weights)


class FromFourthOn:
    """A wish to leave that comes while the fourth step runs."""

    def __init__(self):
        self.asked = 0

    def is_set(self):
        self.asked += 1
        return self.asked >= 4


def test_a_wish_to_leave_is_heard_some_steps_later_by_all_and_loses_none(tmp_path):
    job, sources = make_job(Classify(num_rows=54), {"stop.after": "20 steps"})
    control, messages = Control(wants_leave=FromFourthOn()), []
    saves = Checkpointing(job, RankContext(), Catalog.of_run(str(tmp_path)), emit=messages.append, control=control)
    with runs_ahead(), same_generators(), pytest.raises(LeftEarly, match="after step 6"):
        loop.run(job, RankContext(), sources=sources, emit=messages.append, checkpointing=saves)
    assert [m.step for m in messages if isinstance(m, StepRecord)] == [1, 2, 3, 4, 5, 6]
    assert Catalog.of_run(str(tmp_path)).steps() == [6]
