"""The loop from the first batch to the summary: ends, schedules, evaluations, what is not finite, and what it reports."""

import itertools
import math
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gloo_pool import Failure
from small_runs import (
    NUM_CLASSES,
    NUM_FEATURES,
    Classify,
    Tokens,
    WithBatchNorm,
    WithDropout,
    job_of,
    largest_difference,
    make_job,
    rows,
    same_generators,
    train,
    train_alone,
    train_job,
)
from torch import nn

from scaleray.config import load_config
from scaleray.config.recipe.lr_rules import learning_rate_factor
from scaleray.errors import ConfigError, DataError, NonFiniteLossError, RunFailedError, ScaleRayError, WorkloadError
from scaleray.records.run_record import SystemRecord
from scaleray.training.setup.rank_context import RankContext
from scaleray.workload import load_workload

ROOT = Path(__file__).parents[2]


# ends


def test_a_run_reports_every_step_and_ends_with_its_summary():
    finished = train_alone(Classify(num_val=5))
    assert [step.step for step in finished.steps] == list(range(1, 9))
    assert [step.epoch for step in finished.steps] == [n / 4 for n in range(1, 9)]
    assert finished.messages[-1] is finished.summary
    assert finished.summary.verdict == "done" and finished.summary.steps == 8
    assert finished.summary.model["num_parameters"] == 6 * 8 + 8 + 8 * 3 + 3
    assert finished.summary.sample_order.startswith("exact: a global permutation")
    assert set(finished.weights) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_a_run_reaches_its_target_early():
    flags = {"stop.after": "40 epochs", "evaluation.every": "1 epoch", "stop.at": "val/accuracy >= 0.8"}
    finished = train_alone(Classify(num_rows=64, num_val=20), flags)
    accuracies = [evaluation.metrics["val/accuracy"] for evaluation in finished.evaluations]
    assert finished.summary.verdict == "target reached: val/accuracy >= 0.8"
    assert finished.summary.steps == 8 * len(accuracies) < 320
    assert accuracies[-1] >= 0.8 and all(accuracy < 0.8 for accuracy in accuracies[:-1])
    assert finished.weights  # an early end keeps the weights too


def test_a_loss_can_be_a_target_from_above():
    flags = {"stop.after": "40 epochs", "evaluation.every": "1 epoch", "stop.at": "val/loss <= 0.6"}
    finished = train_alone(Classify(num_rows=64, num_val=20), flags)
    assert finished.evaluations[-1].metrics["val/loss"] <= 0.6 < finished.evaluations[0].metrics["val/loss"]


@pytest.mark.parametrize("target", ["test/accuracy >= 0.5", "val/acuracy >= 0.5"])
def test_a_target_that_nothing_measures_is_refused_with_what_there_is(target):
    with pytest.raises(ConfigError, match=r"there are: .*val/loss"):
        train_alone(Classify(num_val=5), {"evaluation.every": "2 steps", "stop.at": target})


def test_weights_are_not_gathered_when_nobody_wants_them():
    assert train_alone(Classify(), {"checkpoint.save_final": False}).weights == {}


def test_a_run_can_be_one_step_long():
    summary = train_alone(Classify(), {"stop.after": "1 steps"}).summary
    assert summary.steps == 1 and summary.samples_per_s is None  # one step shows no steady state


# the learning rate


@pytest.mark.parametrize("name", ["constant", "cosine", "linear"])
def test_the_learning_rate_follows_the_schedule(name):
    flags = {"schedule.name": name, "schedule.warmup": "3 steps", "schedule.final_ratio": 0.1, "stop.after": "12 steps"}
    rates = [step.learning_rate for step in train_alone(Classify(), flags).steps]
    expected = [
        0.1 * learning_rate_factor(s, name=name, warmup_steps=3, schedule_steps=12, final_ratio=0.1) for s in range(12)
    ]
    assert rates == pytest.approx(expected)


def test_the_rule_of_the_batch_size_reaches_the_optimizer():
    flags = {"optimizer.rule": "linear", "optimizer.reference_batch_size": 2}
    assert train_alone(Classify(), flags).steps[0].learning_rate == pytest.approx(0.4)
    assert train_alone(Classify(), flags).losses == train_alone(Classify(), {"optimizer.learning_rate": 0.4}).losses


class OwnOptimizer(Classify):
    """Two groups with rates of their own, from the derived values."""

    def optimizer(self, model, settings):
        self.settings = settings
        return torch.optim.Adagrad(
            [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": settings.learning_rate / 10}],
            lr=settings.learning_rate,
        )


def test_a_workload_may_bring_its_own_optimizer_and_the_schedule_moves_all_of_its_groups():
    workload = OwnOptimizer()
    flags = {"schedule.warmup": "4 steps", "optimizer.rule": "sqrt", "optimizer.reference_batch_size": 2}
    finished = train_alone(workload, flags)
    assert workload.settings.learning_rate == pytest.approx(0.2)
    assert [step.learning_rate for step in finished.steps[:4]] == pytest.approx([0.05, 0.1, 0.15, 0.2])
    assert finished.losses != train_alone(Classify(), flags).losses
    still = train_alone(workload, {**flags, "optimizer.learning_rate": 1e-300})
    moved = {name: (finished.weights[name] - still.weights[name]).abs().max() for name in still.weights}
    assert all(moved[name] > 0 for name in moved)


def test_an_optimizer_that_is_none_is_refused():
    workload = Classify()
    workload.optimizer = lambda model, settings: "adam"
    with pytest.raises(WorkloadError, match=r"torch\.optim\.Optimizer, several of them by name, or None"):
        train_alone(workload)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_configured_optimizer_has_the_configured_values(name):
    flags = {
        "optimizer.name": name,
        "optimizer.weight_decay": 0.5,
        "optimizer.learning_rate": 0.3,
        "optimizer.momentum": 0.0,
    }
    plain = train_alone(Classify(), {**flags, "optimizer.weight_decay": 0.0, "stop.after": "1 steps"})
    decayed = train_alone(Classify(), {**flags, "stop.after": "1 steps"})
    start = train_alone(Classify(), {**flags, "optimizer.learning_rate": 1e-300, "stop.after": "1 steps"})
    for weight in plain.weights:
        expected = plain.weights[weight] - 0.3 * 0.5 * start.weights[weight]
        assert torch.allclose(decayed.weights[weight], expected)


# evaluations


def test_evaluations_come_at_their_distance_and_at_the_end_but_not_twice():
    def steps(every, after):
        flags = {"stop.after": after, **({"evaluation.every": every} if every else {})}
        return [evaluation.step for evaluation in train_alone(Classify(num_val=5), flags).evaluations]

    assert steps(None, "7 steps") == [7]
    assert steps("3 steps", "7 steps") == [3, 6, 7]
    assert steps("3 steps", "6 steps") == [3, 6]
    assert steps("1 epoch", "2 epochs") == [4, 8]


def test_an_evaluation_leaves_the_training_as_it_was():
    for workload in (WithDropout, WithBatchNorm):
        often = train_alone(workload(num_rows=32, num_val=5), {"evaluation.every": "1 steps"})
        never = train_alone(workload(num_rows=32))
        assert often.losses == never.losses


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("num_val", [1, 3, 17])
def test_an_uneven_split_is_evaluated_as_if_at_once(gloo, world_size, num_val):
    """Batches of 2 rows a worker: the last ones are partial, and some workers have no row in them."""
    flags = {"evaluation.micro_size": 2}
    finished = gloo.run(world_size, train, Classify(num_val=num_val), flags)[0]
    model = Classify().build_model().double()
    model.load_state_dict(finished.weights)
    val = {name: torch.from_numpy(values) for name, values in rows(num_val, seed=1).items()}
    with torch.no_grad():
        logits = model(val["x"].double())
    metrics = finished.evaluations[-1].metrics
    assert metrics["val/loss"] == pytest.approx(F.cross_entropy(logits, val["y"]).item(), rel=1e-12)
    assert metrics["val/accuracy"] == (logits.argmax(dim=1) == val["y"]).double().mean().item()


class OwnMetrics(Classify):
    def datasets(self):
        return {"train": rows(16), "val": rows(9, seed=1), "test": rows(4, seed=2)}

    def metrics(self, model, batch):
        return {"mean_label": (batch["y"].sum(), len(batch["y"])), "parts/zero": (torch.tensor(0.0), 1)}


def test_metrics_of_the_workload_are_named_by_split():
    metrics = train_alone(OwnMetrics()).evaluations[-1].metrics
    assert set(metrics) == {
        f"{split}/{name}" for split in ("val", "test") for name in ("loss", "mean_label", "parts/zero")
    }
    assert metrics["test/mean_label"] == pytest.approx(rows(4, seed=2)["y"].mean())


def test_a_metric_that_is_no_sum_and_count_is_named():
    workload = Classify(num_val=4)
    workload.metrics = lambda model, batch: {"accuracy": 0.5}
    with pytest.raises(WorkloadError, match=r"metrics\(\)\['accuracy'\]"):
        train_alone(workload)


class LossInMetrics(Classify):
    """Has the loss at hand while it measures, and notes when `loss` is called for an evaluation."""

    calls = 0

    def loss(self, model, batch):
        self.calls += not model.training
        return super().loss(model, batch)

    def metrics(self, model, batch):
        return {"loss": super().loss(model, batch), **super().metrics(model, batch)}


def test_a_workload_that_measures_its_loss_with_the_metrics_saves_a_forward_pass():
    ours, plain = LossInMetrics(num_val=9), Classify(num_val=9)
    flags = {"evaluation.every": "1 epoch"}
    assert [e.metrics for e in train_alone(ours, flags).evaluations] == [
        e.metrics for e in train_alone(plain, flags).evaluations
    ]
    assert ours.calls == 0  # in evaluations; those of the look at the first batch are taken back


def test_a_metric_that_counted_nothing_is_named():
    workload = Classify(num_val=4)
    workload.metrics = lambda model, batch: {"accuracy": (torch.tensor(0.0), 0)}
    with pytest.raises(WorkloadError, match="val/accuracy"):
        train_alone(workload)


def test_a_workload_without_metrics_evaluates_its_loss():
    class Bare:
        build_model, datasets, loss = Classify.build_model, Classify.datasets, Classify.loss
        num_rows, num_val = 16, 5

    assert set(train_alone(Bare()).evaluations[-1].metrics) == {"val/loss"}


def test_a_large_split_is_read_again_each_time_with_the_same_result(monkeypatch):
    flags = {"evaluation.every": "1 epoch"}
    kept = train_alone(Classify(num_val=9), flags)
    monkeypatch.setattr("scaleray.training.step.evaluation.KEPT_BYTES", 0)
    read_again = train_alone(Classify(num_val=9), flags)
    assert [e.metrics for e in read_again.evaluations] == [e.metrics for e in kept.evaluations]


# what is not finite


def poisoned(*steps, num_rows=96):
    """Rows in file order whose label is 0 except in these steps (from 1, batches of 8), where the loss becomes NaN."""
    data = rows(num_rows)
    bad = np.zeros(num_rows, dtype=bool)
    for step in steps:
        bad[8 * (step - 1)] = True
    return Poisoned({**data, "bad": bad}), {"data.shuffle": False, "stop.after": "1 epoch"}


class Poisoned(Classify):
    def __init__(self, data):
        super().__init__()
        self.data = data

    def datasets(self):
        return {"train": self.data}

    def loss(self, model, batch):
        total, count = super().loss(model, batch)
        return total * (float("nan") if batch["bad"].any() else 1.0), count


class InfiniteGradient(Poisoned):
    """The loss stays finite where the gradient does not: the square root of zero."""

    def loss(self, model, batch):
        total, count = Classify.loss(self, model, batch)
        zero = (model(batch["x"]) * 0).sum()
        return total + (torch.sqrt(zero) if batch["bad"].any() else zero), count


def test_raise_names_rank_node_and_step():
    workload, flags = poisoned(3)
    with pytest.raises(NonFiniteLossError) as caught:
        train_alone(workload, flags)
    assert "rank 0 on local: the loss became nan at step 3" in str(caught.value)
    assert "every number in the rows of that step is finite. Lower the learning rate" in str(caught.value)
    assert "optimizer.clip_norm" in str(caught.value) and "on_nonfinite" in str(caught.value)


class WithGaps(Poisoned):
    """A number is missing in a row of the third batch: in the data, or after the transform has divided by zero."""

    def transform(self, rows, rng):
        with np.errstate(all="ignore"):
            return {**rows, "x": rows["x"] / (rows.pop("divisor")[:, None] if "divisor" in rows else 1)}


@pytest.mark.parametrize(
    ("column", "words"),
    [("x", "column x of row 19 of the train data contains nan. Clean"), ("divisor", r"column x of row 19 of the train data contains \w+, after WithGaps.transform but not before it. Clean")],
)  # fmt: skip
def test_a_number_that_is_missing_in_the_data_is_named_in_place_of_the_learning_rate(column, words):
    workload, flags = poisoned()
    data = {**workload.data, "divisor": np.ones(len(workload.data["x"]), np.float32)} if column == "divisor" else {**workload.data}  # fmt: skip
    data[column] = data[column].copy()
    data[column][19] = np.nan if column == "x" else 0
    with pytest.raises(NonFiniteLossError, match=f"the loss became nan at step 3: {words}|the loss became inf at step 3: {words}"):  # fmt: skip
        train_alone(WithGaps(data), flags)
    verdict = train_alone(WithGaps(data), {**flags, "on_nonfinite": "stop"}).summary.verdict
    assert verdict.startswith("stopped: the loss became") and "column x of row 19" in verdict


def test_stop_keeps_the_weights_so_far():
    workload, flags = poisoned(3)
    finished = train_alone(workload, {**flags, "on_nonfinite": "stop"})
    assert finished.summary.verdict == "stopped: the loss became nan at step 3"
    assert finished.summary.nonfinite_steps == 1 and finished.summary.steps == 3
    before = train_alone(workload, {**flags, "stop.after": "2 steps"})
    assert largest_difference(before.weights, finished.weights) == 0


def test_skip_counts_and_goes_on_as_if_the_step_had_not_been():
    workload, flags = poisoned(3, 5)
    finished = train_alone(workload, {**flags, "on_nonfinite": "skip"})
    assert [step.step for step in finished.steps if not step.is_finite] == [3, 5]
    assert finished.summary.nonfinite_steps == 2 and finished.summary.verdict == "done"
    assert all(math.isfinite(step.loss) == step.is_finite for step in finished.steps)
    good = {n: np.delete(v, np.r_[16:24, 32:40], axis=0) for n, v in workload.data.items()}
    assert largest_difference(train_alone(Poisoned(good), flags).weights, finished.weights) == 0


def test_skipping_ends_when_ten_steps_in_a_row_were_not_finite():
    workload, flags = poisoned(*range(2, 12))
    with pytest.raises(NonFiniteLossError, match="10 steps in a row up to step 11"):
        train_alone(workload, {**flags, "on_nonfinite": "skip"})
    workload, flags = poisoned(*range(2, 11), 12)  # nine, a good one, and another
    assert train_alone(workload, {**flags, "on_nonfinite": "skip"}).summary.nonfinite_steps == 10


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_gradient_that_is_not_finite_never_reaches_the_weights(policy):
    workload, flags = poisoned(3)
    finished = train_alone(InfiniteGradient(workload.data), {**flags, "on_nonfinite": policy})
    assert finished.summary.nonfinite_steps == 1
    assert not finished.steps[2].is_finite
    assert all(value.isfinite().all() for value in finished.weights.values())


def test_a_gradient_that_is_not_finite_raises_where_its_norm_is_looked_at():
    workload, flags = poisoned(3)
    with pytest.raises(NonFiniteLossError, match="the gradient norm became nan at step 3"):
        train_alone(InfiniteGradient(workload.data), flags)


def test_all_ranks_skip_together_what_was_not_finite_on_one(gloo):
    workload, flags = poisoned(3)
    first, second = gloo.run(2, train, workload, {**flags, "on_nonfinite": "skip"})
    assert first.summary.nonfinite_steps == second.summary.nonfinite_steps == 1
    assert largest_difference(train_alone(workload, {**flags, "on_nonfinite": "skip"}).weights, first.weights) < 1e-9


# failures


class FailsAt(Classify):
    """Raises in training, on one rank and at one step."""

    def __init__(self, *, rank, step):
        super().__init__(num_rows=64)
        self.rank, self.step, self.calls = rank, step, 0

    def loss(self, model, batch):
        if model.training:
            self.calls += 1
            is_here = not torch.distributed.is_initialized() or torch.distributed.get_rank() == self.rank
            if is_here and self.calls == self.step:
                raise KeyError("no such thing")
        return super().loss(model, batch)


def test_an_error_in_the_users_code_names_rank_node_and_step_and_shows_only_that_code(gloo):
    outcomes = gloo.attempt(2, train, FailsAt(rank=1, step=3))
    assert all(isinstance(outcome, Failure) for outcome in outcomes)
    message = str(outcomes[1].error)
    assert isinstance(outcomes[1].error, RunFailedError)
    assert "rank 1 on node 1, step 3" in message and "KeyError: 'no such thing'" in message
    assert "test_loop.py" in message and "scaleray/training" not in message


@pytest.mark.parametrize("kind", [Exception, ValueError, RuntimeError, IndexError])
@pytest.mark.parametrize("where", ["row", "loss"])
def test_an_error_whose_text_fails_is_named_with_the_line_that_raised_it(kind, where):
    class NoText(kind):
        def __str__(self):
            raise RuntimeError("no text")

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, index):
            if (where, index) == ("row", 13):
                raise NoText  # here
            return {"x": np.ones(6, np.float32), "y": 0}

    class Fails(Classify):
        def datasets(self):
            return {"train": Rows()}

        def loss(self, model, batch):
            if where == "loss":
                raise NoText  # here
            return super().loss(model, batch)

    with pytest.raises(ScaleRayError, match=r"(?s)raise NoText  # here\n.*NoText: ") as raised:
        train_alone(Fails())
    assert "__str__" not in str(raised.value)


def test_an_error_of_the_source_arrives_as_it_is():
    workload = Classify(num_rows=64)
    job, sources = make_job(workload)
    read = sources["train"].read

    def read_until(indices):
        if 40 in indices:
            raise DataError("row 40", "damaged", "it must be readable")
        return read(indices)

    sources["train"].read = read_until
    with same_generators(), pytest.raises(DataError, match="row 40"):
        train_job(RankContext(), job, sources)


def test_a_model_that_fails_to_build_shows_the_users_line():
    workload = Classify()
    workload.build_model = lambda: nn.Linear(6, -3)
    with pytest.raises(WorkloadError, match="failed while building the model"):
        train_alone(workload)


# figures


def test_the_figures_of_a_run_add_up():
    flags = {"stop.after": "40 steps", "evaluation.every": "7 steps"}
    finished = train_alone(Tokens(num_rows=64), flags)
    summary, steps = finished.summary, finished.steps
    assert summary.training_time_s == pytest.approx(sum(step.step_time_s for step in steps))
    steady = steps[10:]  # a fifth of 40 is 8, and at least 10 are left out
    assert summary.samples_per_s == pytest.approx(8 * 30 / sum(s.step_time_s for s in steady))
    assert summary.step_time_s == pytest.approx(np.median([s.step_time_s for s in steady]))
    assert summary.input_wait_share == pytest.approx(
        sum(s.input_wait_s for s in steady) / sum(s.step_time_s for s in steady), abs=1e-9
    )
    assert 0 <= summary.input_wait_share <= 1
    assert all(0 <= step.input_wait_s <= step.step_time_s for step in steps)
    assert summary.time_to_first_step_s > 0
    assert 2**20 < summary.peak_memory_bytes < 2**40


def test_tokens_per_second_follow_from_the_length_of_a_sample():
    from scaleray.data import TokenSource

    class Bytes(Tokens):
        def datasets(self):
            tokens = np.random.default_rng(0).integers(0, 11, 16 * 7 + 1)
            return {"train": TokenSource(tokens, sequence_length=7)}

        def loss(self, model, batch):
            return super().loss(model, {**batch, "real": torch.ones(len(batch["tokens"]), 7)})

    summary = train_alone(Bytes(), {"stop.after": "4 steps"}).summary
    assert summary.tokens_per_s == pytest.approx(7 * summary.samples_per_s)
    assert train_alone(Classify()).summary.tokens_per_s is None


def test_system_metrics_are_sampled_by_the_first_worker_of_a_node(monkeypatch):
    clock = SimpleNamespace(time=time.time, perf_counter=time.perf_counter, monotonic=itertools.count(0, 10).__next__)
    monkeypatch.setattr("scaleray.training.health.reporter.time", clock)  # ten seconds later each time it is asked
    with same_generators():
        finished = train(RankContext(), Classify(), {"tracking.system_metrics": True})
        silent = train(RankContext(local_rank=1), Classify(), {"tracking.system_metrics": True})
    samples = [message for message in finished.messages if isinstance(message, SystemRecord)]
    assert len(samples) == 8
    assert {"cpu_utilization_percentage", "system_memory_usage_megabytes"} <= set(samples[-1].metrics)
    assert all(0 <= sample.metrics["cpu_utilization_percentage"] <= 100 for sample in samples)
    assert not any(isinstance(message, SystemRecord) for message in silent.messages)


# determinism


@pytest.fixture
def torch_switches():
    """Puts torch's switches back, which `deterministic: true` sets for the whole process."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.backends.cudnn.benchmark = before[1]


class KnowsItsSwitches(WithDropout):
    """Remembers whether torch was asked for deterministic algorithms."""

    def loss(self, model, batch):
        self.is_deterministic = torch.are_deterministic_algorithms_enabled()
        return super().loss(model, batch)


def test_two_deterministic_runs_are_equal_to_the_bit(torch_switches):
    flags = {"deterministic": True, "precision.dtype": "fp32", "batch.micro_size": 4}
    workload = KnowsItsSwitches(num_val=5)
    first, second = (train_alone(workload, flags) for _ in range(2))
    assert workload.is_deterministic
    assert first.losses == second.losses and first.grad_norms == second.grad_norms
    assert first.evaluations[-1].metrics == second.evaluations[-1].metrics
    assert largest_difference(first.weights, second.weights) == 0
    assert first.summary.model["initial_hash"] == second.summary.model["initial_hash"]


def test_another_seed_is_another_run():
    first, second = (train_alone(Classify(), {"seed": seed}) for seed in (1, 2))
    assert first.losses != second.losses
    assert first.summary.model["initial_hash"] != second.summary.model["initial_hash"]


# the reference workload


@pytest.mark.combination
def test_digits_reaches_97_percent_on_images_it_has_not_seen():
    config = load_config(ROOT / "jobs/digits.yaml", environ={})
    job, sources = job_of(config, load_workload("jobs/digits.py:Digits", {}, base_dir=ROOT))
    with same_generators():
        finished = train_job(RankContext(), job, sources)
    assert finished.evaluations[-1].metrics["test/accuracy"] >= 0.97


class Ends(Classify):
    """Calls sys.exit(0) in one of its methods, as a script does that is done."""

    where = ""

    def at(self, where):
        if where and where == self.where:
            sys.exit(0)

    def datasets(self):
        class Rows(torch.utils.data.Dataset):
            def __len__(given):
                return 16

            def __getitem__(given, index):
                self.at("getitem" if index == 9 else "")
                return {"x": np.zeros(NUM_FEATURES, dtype=np.float32), "y": index % NUM_CLASSES}

        return {"train": Rows(), "val": Rows()}

    def build_model(self):
        self.at("build_model")
        return super().build_model()

    def loss(self, model, batch):
        self.at("loss" if not model.training or torch.is_grad_enabled() else "")
        return super().loss(model, batch)

    def metrics(self, model, batch):
        self.at("metrics")
        return super().metrics(model, batch)

    def optimizer(self, model, settings):
        self.at("optimizer")


@pytest.mark.parametrize("where", ["", "getitem", "build_model", "loss", "metrics", "optimizer"])
def test_an_exit_in_user_code_is_an_error_wherever_it_stands(where):
    workload = type("EndsThere", (Ends,), {"where": where})()
    if not where:
        assert train(RankContext(), workload, {"stop.after": "1 epoch"}).summary.steps == 2
        return
    with pytest.raises(WorkloadError, match=r"sys\.exit\(0\)|SystemExit: 0"):
        train(RankContext(), workload, {"stop.after": "1 epoch"})
