"""One optimizer step and the look at the first batch: what a loss may return, and what is wrong with the data."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_runs import (
    Classify,
    Tokens,
    WithBatchNorm,
    largest_difference,
    make_job,
    relative_differences,
    rows,
    same_generators,
    train,
    train_alone,
    train_in_plain_torch,
)
from torch import nn

from scaleray.data import RankBatch
from scaleray.errors import DataError, RunFailedError, WorkloadError
from scaleray.training.setup.model_setup import prepare
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.step.first_batch import check_first_batch
from scaleray.training.step.micro_batches import micro_batches, to_device
from scaleray.training.step.step import TrainStep
from scaleray.training.step.sum_and_count import check_sum_and_count


class Returns(Classify):
    """A classifier whose loss gives something else; `result` makes it of the losses of all rows."""

    def __init__(self, result, **kwargs):
        super().__init__(**kwargs)
        self.result = result

    def loss(self, model, batch):
        return self.result(F.cross_entropy(model(batch["x"]), batch["y"], reduction="none"))


# what a loss may return


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda losses: losses.mean(), "a tensor of shape []"),
        (lambda losses: losses, "a tensor of shape [8]"),
        (lambda losses: None, "NoneType"),
        (lambda losses: losses.sum().item(), "float"),
        (lambda losses: (losses.sum(), 8, 1), "tuple"),
        (lambda losses: [losses.sum(), 8], "list"),
        (lambda losses: (losses, 8), "the sum returned by loss()"),
        (lambda losses: (losses.sum().item(), 8), "the sum returned by loss()"),
        (lambda losses: (losses.sum(), "8"), "the count returned by loss()"),
        (lambda losses: (losses.sum(), -8), "the count returned by loss()"),
        (lambda losses: (losses.sum(), True), "the count returned by loss()"),
        (lambda losses: (losses.sum(), float("nan")), "the count returned by loss()"),
        (lambda losses: (losses.sum(), float("inf")), "the count returned by loss()"),
        (lambda losses: (losses.sum(), torch.ones(8)), "the count returned by loss()"),
        (lambda losses: (losses.sum(), losses.sum()), "the count returned by loss()"),
    ],
)
def test_a_loss_that_is_no_sum_and_count_is_refused_with_what_it_was(result, words):
    with same_generators(), pytest.raises(WorkloadError) as caught:
        # with gradient, as in training: a count must not have one
        check_sum_and_count(result(torch.ones(8, requires_grad=True) * 2), what="loss()")
    assert words in str(caught.value)


@pytest.mark.parametrize("result", [lambda losses: losses.mean(), lambda losses: losses, lambda losses: None])
def test_the_loop_refuses_such_a_loss_before_the_first_step(result):
    with pytest.raises(WorkloadError, match=r"\(sum, count\)"):
        train_alone(Returns(result))


@pytest.mark.parametrize("count", [8, 8.0, np.int64(8), torch.tensor(8), torch.tensor([8.0])])
def test_a_count_may_be_any_kind_of_number(count):
    total, found = check_sum_and_count((torch.tensor([[3.0]]), count), what="loss()")
    assert total.shape == () and float(found) == 8


@pytest.mark.parametrize("num_rows", [2, 3, 8])
def test_a_mean_dressed_up_as_a_sum_is_found_out(num_rows):
    with pytest.raises(WorkloadError, match="it must return the sum over the micro-batch"):
        train_alone(Returns(lambda losses: (losses.mean(), len(losses)), num_rows=32), {"batch.global_size": num_rows})


class MeanOverTokens(Tokens):
    def loss(self, model, batch):
        total, count = super().loss(model, batch)
        return total / count, count


def test_a_mean_over_tokens_is_found_out_although_rows_count_differently():
    with pytest.raises(WorkloadError, match="it must return the sum over the micro-batch"):
        train_alone(MeanOverTokens())


def test_sums_are_not_taken_for_means():
    for workload in (Classify(), Tokens(), Returns(lambda losses: (losses.sum(), len(losses)))):
        for size in (1, 2, 5):
            assert train_alone(workload, {"batch.global_size": size, "stop.after": "1 steps"}).summary.steps == 1
    zero = Returns(lambda losses: ((losses * 0).sum(), len(losses)))
    assert train_alone(zero).losses[0] == 0


@pytest.mark.parametrize("count", [0, torch.tensor(0), torch.tensor(float("nan"))])
def test_a_batch_that_counts_nothing_is_refused(count):
    with pytest.raises(WorkloadError, match="at least one sample or token must count"):
        train_alone(Returns(lambda losses: (losses.sum(), count)))


# what is wrong with the data


def with_data(**columns):
    workload = Classify(num_rows=16)
    data = {**rows(16), **columns}
    workload.datasets = lambda: {"train": data}
    return workload


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_name_their_column(value):
    x = rows(16)["x"]
    x[[1, 7], 2] = value
    with pytest.raises(DataError) as caught:
        train_alone(with_data(x=x), {"batch.global_size": 16})
    assert "column x" in str(caught.value) and "in 2 of 16 rows" in str(caught.value)


@pytest.mark.parametrize("label", [3, 99, -1])
def test_a_label_out_of_range_in_the_first_rows_is_a_data_error(label):
    with pytest.raises(DataError, match="below the number of classes"):
        train_alone(with_data(y=np.full(16, label)))


def test_a_label_out_of_range_later_on_is_a_data_error_too():
    y = rows(16)["y"]
    y[15] = 3
    with pytest.raises(DataError, match="below the number of classes"):
        train_alone(with_data(y=y), {"data.shuffle": False})


def test_a_token_beyond_the_embedding_is_a_data_error_early_and_late():
    for place in (0, 25):
        workload = Tokens()
        data = workload.datasets()["train"]
        data["tokens"][place, 2] = Tokens.vocabulary
        workload.datasets = lambda data=data: {"train": data}
        with pytest.raises(DataError, match="a label or token"):
            train_alone(workload, {"data.shuffle": False})


class Slips(Classify):
    """An error of the user's own code, in the first batch or later."""

    calls = 0

    def __init__(self, at_call):
        super().__init__()
        self.at_call = at_call

    def loss(self, model, batch):
        self.calls += 1
        if self.calls == self.at_call:
            [][3]
        return super().loss(model, batch)


@pytest.mark.parametrize(("at_call", "error"), [(1, WorkloadError), (5, RunFailedError)])
def test_an_index_error_of_the_users_own_code_is_not_taken_for_a_label(at_call, error):
    with pytest.raises(error, match="list index out of range") as caught:
        train_alone(Slips(at_call))
    assert "test_step.py" in str(caught.value) and "training/step/step.py" not in str(caught.value)


class LogOfZero(Classify):
    def loss(self, model, batch):
        total, count = super().loss(model, batch)
        return total + torch.log(batch["x"].sum() * 0), count


@pytest.mark.parametrize("flags", [{"batch.micro_size": 1}, {}])
def test_batch_norm_on_a_single_row_says_what_to_change_and_the_advice_works(flags):
    """The last batch of an epoch, or every micro-batch, has one row: torch cannot normalise over it."""
    with pytest.raises(DataError, match=r"--batch\.drop-last, or enlarge batch\.micro_size"):
        train_alone(WithBatchNorm(num_rows=9), flags)
    advised = {"batch.micro_size": 2} if flags else {}
    assert train_alone(WithBatchNorm(num_rows=9), {"batch.drop_last": True, **advised}).summary.steps == 2


def test_a_first_loss_that_is_not_finite_says_that_the_inputs_are():
    with pytest.raises(DataError, match="a log of zero"):
        train_alone(LogOfZero())


def test_the_look_at_the_first_batch_leaves_no_trace():
    """Neither parameters nor buffers nor the generator move, and the model is in training mode afterwards."""
    with same_generators():
        workload = Returns(lambda losses: (losses.sum() + 0 * torch.rand(3).sum(), len(losses)))  # draws by itself
        workload.build_model = lambda: nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)
        )
        job, sources = make_job(workload)
        setup = prepare(workload, job.config, job.recipe, RankContext())
        module = setup.parallel.module
        before = {name: value.clone() for name, value in module.state_dict().items()}
        generator = torch.get_rng_state()
        batch = RankBatch(0, sources["train"].read(np.arange(8)), 8)
        check_first_batch(workload, job.config, batch, setup, RankContext(), gives_tuples=False, micro_batch_size=4)
        assert torch.equal(torch.get_rng_state(), generator)
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        assert all(p.grad is None for p in module.parameters()) and module.training


# the arithmetic of a step


def take_steps(workload, flags, num_steps):
    """Results and gradients of single steps, outside of the loop."""
    with same_generators():
        job, sources = make_job(workload, flags)
        setup = prepare(workload, job.config, job.recipe, RankContext())
        step = TrainStep(workload, setup, job.config, job.recipe, RankContext(), gives_tuples=False)
        plan = job.train_plan()
        results = []
        for number in range(num_steps):
            columns = sources["train"].read(plan.global_indices(number))
            batch = RankBatch(number, columns, plan.num_rows(number))
            results.append(step(batch, num_rows=plan.num_rows(number), want_norm=False))
        return results, [p.grad for p in setup.parallel.module.parameters()]


@pytest.mark.parametrize("flags", [{}, {"optimizer.name": "adamw", "batch.micro_size": 4, "optimizer.clip_norm": 0.5}])
def test_what_happens_in_one_of_many_steps_would_be_seen(flags):
    flags = {**flags, "stop.after": "150 steps", "optimizer.learning_rate": 0.01}
    finished, plain = train_alone(Classify(), flags), train_in_plain_torch(Classify(), flags)
    assert len(finished.losses) == 150
    assert max(relative_differences(plain.losses, finished.losses)) < 1e-9
    assert largest_difference(plain.weights, finished.weights) < 1e-9


def test_what_happens_in_one_of_many_steps_of_two_workers_would_be_seen(gloo):
    flags = {"stop.after": "60 steps", "optimizer.learning_rate": 0.01, "batch.micro_size": 2}
    finished, plain = gloo.run(2, train, Classify(), flags)[0], train_in_plain_torch(Classify(), flags)
    assert max(relative_differences(plain.losses, finished.losses)) < 1e-9
    assert largest_difference(plain.weights, finished.weights) < 1e-9


def test_gradients_after_clipping_have_the_norm_that_was_asked_for():
    results, gradients = take_steps(Tokens(), {"optimizer.clip_norm": 0.01, "optimizer.learning_rate": 1e-9}, 3)
    assert all(result.grad_norm > 0.02 for result in results)
    assert float(nn.utils.get_total_norm(gradients)) == pytest.approx(0.01, rel=1e-3)  # torch too adds 1e-6 to the norm


def test_the_norm_is_computed_only_where_someone_needs_it():
    assert take_steps(Classify(), {}, 1)[0][0].grad_norm is None
    for flags in ({"optimizer.clip_norm": 1e9}, {"on_nonfinite": "skip"}, {"on_nonfinite": "stop"}):
        assert take_steps(Classify(), flags, 1)[0][0].grad_norm > 0


def test_loss_and_count_are_those_of_the_whole_batch_whatever_the_micro_batches():
    for workload in (Classify(), Tokens()):
        whole, _ = take_steps(workload, {}, 4)
        for size in (1, 2, 4):
            pieces, _ = take_steps(workload, {"batch.micro_size": size}, 4)
            assert [p.count for p in pieces] == [w.count for w in whole]
            assert [p.loss for p in pieces] == pytest.approx([w.loss for w in whole], rel=1e-12)


def test_micro_batches_cut_rows_in_order_and_keep_placeholders_apart():
    columns = {"a": np.arange(5), "b": np.arange(10).reshape(5, 2)}
    pieces = list(micro_batches(RankBatch(0, columns, 5), 2))
    assert [weight for _, weight in pieces] == [2, 2, 1]
    assert np.array_equal(np.concatenate([p["b"] for p, _ in pieces]), columns["b"])
    placeholder = {name: values[:1] for name, values in columns.items()}
    assert [weight for _, weight in micro_batches(RankBatch(0, placeholder, 0), 2)] == [0]


@pytest.mark.parametrize(
    ("num_rows", "size", "sizes"), [(9, 4, [4, 3, 2]), (5, 4, [3, 2]), (7, 3, [3, 2, 2]), (1, 4, [1])]
)
def test_no_micro_batch_has_a_single_row_beside_larger_ones(num_rows, size, sizes):
    """Batch normalisation cannot train on one, and a share of the global batch may be any number."""
    columns = {"a": np.arange(num_rows)}
    pieces = list(micro_batches(RankBatch(0, columns, num_rows), size))
    assert [weight for _, weight in pieces] == sizes
    assert np.array_equal(np.concatenate([p["a"] for p, _ in pieces]), columns["a"])


def test_a_placeholder_counts_nothing_and_moves_nothing():
    with same_generators():
        workload = Classify()
        job, sources = make_job(workload)
        setup = prepare(workload, job.config, job.recipe, RankContext())
        step = TrainStep(workload, setup, job.config, job.recipe, RankContext(), gives_tuples=False)
        with pytest.raises(WorkloadError, match="a total count of 0"):
            step(RankBatch(0, sources["train"].read(np.array([0])), 0), num_rows=8, want_norm=False)
        assert all(p.grad.abs().max() == 0 for p in setup.parallel.module.parameters())


class OnTuples(Classify):
    """Data as a torch Dataset of tuples, which the loss receives as tuples."""

    def datasets(self):
        data = rows(self.num_rows)
        return {"train": torch.utils.data.TensorDataset(torch.from_numpy(data["x"]), torch.from_numpy(data["y"]))}

    def loss(self, model, batch):
        x, y = batch
        return super().loss(model, {"x": x, "y": y})


def test_tuples_of_a_torch_dataset_train_like_the_same_arrays():
    assert train_alone(OnTuples()).losses == train_alone(Classify()).losses


def test_a_strategy_that_averages_is_asked_for_the_sum():
    """`gradient_divisor` is what the strategy divides by; with one worker pretending to be two the gradient doubles."""
    with same_generators():
        workload = Classify()
        job, sources = make_job(workload)
        gradients = []
        for divisor in (1, 2):
            setup = prepare(workload, job.config, job.recipe, RankContext())
            setup = dataclasses.replace(setup, parallel=dataclasses.replace(setup.parallel, gradient_divisor=divisor))
            step = TrainStep(workload, setup, job.config, job.recipe, RankContext(), gives_tuples=False)
            step(RankBatch(0, sources["train"].read(np.arange(8)), 8), num_rows=8, want_norm=False)
            gradients.append(next(setup.parallel.module.parameters()).grad)
        assert torch.allclose(2 * gradients[0], gradients[1])


def test_records_of_a_run_count_what_the_loss_counted():
    finished, plain = train_alone(Tokens()), train_in_plain_torch(Tokens())
    real = Tokens().datasets()["train"]["real"]
    assert sum(step.count for step in finished.steps[:4]) == real.sum()  # one epoch of 26 rows
    assert [step.num_samples for step in finished.steps] == [8, 8, 8, 2] * 2
    assert finished.losses == pytest.approx(plain.losses, rel=1e-12)


def test_columns_begin_where_torch_begins_its_own_tensors():
    memory = np.zeros(64 + 32 * 8, dtype=np.uint8)
    start = -memory.ctypes.data % 64 + 16
    columns = {"x": memory[start : start + 128].view(np.float32), "y": torch.zeros(40)[3:]}
    found = to_device(columns, torch.device("cpu"), None)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in found.values())
    assert [tuple(tensor.shape) for tensor in found.values()] == [(32,), (37,)]
