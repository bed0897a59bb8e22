"""A gradient that is not what it should be is found, with its class: each bug is planted."""

from __future__ import annotations

import contextlib
import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from planted_mistakes import PLANTED
from small_runs import NUM_CLASSES, NUM_FEATURES, Classify, Tokens
from torch import nn
from verified import TRAINING_ON, broken_strategy, found, judge, judge_all, judge_with, knows_who_trains, many

from scaleray.strategies import Parallel, ddp
from scaleray.strategies.contract.weight_shares import whole
from scaleray.training.step.step import TrainStep

CLIP = {"optimizer.clip_norm": 0.3}


# loss normalisation


class MeanOfMeans(Tokens):
    """Says that its mean is a sum over one."""

    def loss(self, model, batch):
        total, count = super().loss(model, batch)
        return total / count, 1

    depends_on_micro_batch = True  # else the first batch is refused


def test_a_mean_in_place_of_the_sum_is_found_as_loss_normalisation(gloo):
    assert found(gloo.run(2, judge, MeanOfMeans(), {})[0])[:2] == ("loss normalisation", 1)


def test_a_mean_in_place_of_the_sum_is_found_with_accumulation_alone(gloo):
    assert found(gloo.run(1, judge, MeanOfMeans(), {}, 2)[0])[:2] == ("loss normalisation", 1)


@contextlib.contextmanager
def each_rank_its_own_mean():
    """The classic: every rank divides by what it counted, and the means are averaged. The reported loss is right."""

    def apply(model, mesh, config, workload):
        parallel = ddp.apply(model, mesh, config, workload)

        def mean_of_own(state, bucket):
            own = torch.tensor([OWN_COUNT[0]], dtype=torch.float64)
            everyone = own.clone()
            dist.all_reduce(everyone)
            ratio = (everyone / dist.get_world_size() / own).item()
            future = dist.all_reduce(bucket.buffer().mul_(ratio / dist.get_world_size()), async_op=True).get_future()
            return future.then(lambda f: f.value()[0])

        parallel.model.register_comm_hook(None, mean_of_own)
        return parallel

    with broken_strategy(apply):
        yield


OWN_COUNT = [0.0]


class Counted(Tokens):
    """Tells the plant what this rank counted."""

    def loss(self, model, batch):
        total, count = super().loss(model, batch)
        OWN_COUNT[0] = float(count)
        return total, count


def test_an_average_of_the_ranks_means_is_found_by_what_each_weighs(gloo):
    outcome = gloo.run(2, judge_with, each_rank_its_own_mean, Counted())[0]
    assert found(outcome) == ("loss normalisation", 1, "0.weight")
    assert "mean of means" in outcome.mismatch.why


class CountedRows(Classify):
    """The same for rows, which every rank has as many of until the last batch of an epoch."""

    def loss(self, model, batch):
        OWN_COUNT[0] = float(len(batch["y"]))
        return super().loss(model, batch)


def test_an_average_of_means_is_found_at_the_first_step_of_uneven_shares(gloo):
    outcome = gloo.run(2, judge_with, each_rank_its_own_mean, CountedRows(num_rows=27))[0]
    assert found(outcome) == ("loss normalisation", 4, "0.weight")
    assert "rank 0: 0.75; rank 1: 1.5" in outcome.mismatch.why


class TwoLosses(Classify):
    """Each moves a layer of its own."""

    def optimizer(self, model, settings):
        layers = {"early": model[0], "late": model[2]}
        return {name: torch.optim.SGD(layer.parameters(), settings.learning_rate) for name, layer in layers.items()}

    def losses(self):
        return {"early": self.loss, "late": self.loss}


@contextlib.contextmanager
def rows_weigh_by_their_rank():
    """Each rank divides by its own rows, and the means are averaged."""
    run = TrainStep._run_micro_batches

    def weighs_alike(self, batch, *, num_rows, synchronises, group):
        self._scale *= num_rows / self.place.data_parallel_size / max(1, batch.num_rows)
        return run(self, batch, num_rows=num_rows, synchronises=synchronises, group=group)

    with mock.patch.object(TrainStep, "_run_micro_batches", weighs_alike):
        yield


def test_of_several_losses_the_gradient_of_the_first_is_taken_apart(gloo):
    outcome = gloo.run(2, judge_with, rows_weigh_by_their_rank, TwoLosses(num_rows=27))[0]
    assert found(outcome)[:2] == ("loss normalisation", 4)
    assert "rank 0: 0.75; rank 1: 1.5" in outcome.mismatch.why


@contextlib.contextmanager
def only_its_own_loss():
    """Rank 0 reports its own loss; the training is right."""
    update = TrainStep._update

    def divided(self, loss_sum, count, **kwargs):
        return update(self, loss_sum / TRAINING_ON[0], count, **kwargs)

    with knows_who_trains(), mock.patch.object(TrainStep, "_update", divided):
        yield


def test_a_loss_that_is_divided_by_the_workers_is_found_as_loss_normalisation(gloo):
    assert found(gloo.run(2, judge_with, only_its_own_loss, Classify())[0])[:2] == ("loss normalisation", 1)


@contextlib.contextmanager
def accumulation_is_not_divided():
    update = TrainStep._update

    def larger(self, loss_sum, count, *, correction, **kwargs):
        factor = self.recipe.accumulation_steps if many() else 1
        return update(self, loss_sum, count, correction=correction * factor, **kwargs)

    with knows_who_trains(), mock.patch.object(TrainStep, "_update", larger):
        yield


def judge_both(place, plant, workload):
    """With and without accumulation: 2 workers x 2 micro-batches alone would leave two explanations."""
    with plant():
        return judge_all(place, workload, {}, (1, 2))


def test_a_gradient_that_is_not_divided_by_the_accumulation_is_told_from_double_synchronisation(gloo):
    right, wrong = gloo.run(2, judge_both, accumulation_is_not_divided, Classify())[0]
    assert right.verdict == "equal"
    assert found(wrong) == ("loss normalisation", 1, "0.weight")
    assert "accumulation steps are weighted wrongly" in wrong.mismatch.why


# gradient synchronisation


@contextlib.contextmanager
def no_synchronisation():
    def apply(model, mesh, config, workload):
        return Parallel(model=model, module=model)

    with broken_strategy(apply):
        yield


def test_gradients_that_are_not_synchronised_are_found(gloo):
    outcome = gloo.run(2, judge_with, no_synchronisation, Classify())[0]
    assert found(outcome) == ("missing gradient synchronisation", 1, "0.weight")
    assert "of any parameter" in outcome.mismatch.why


@contextlib.contextmanager
def one_parameter_forgotten():
    def apply(model, mesh, config, workload):
        model._ddp_params_and_buffers_to_ignore = ["2.bias"]
        return ddp.apply(model, mesh, config, workload)

    with broken_strategy(apply):
        yield


def test_one_parameter_that_is_not_synchronised_is_named(gloo):
    outcome = gloo.run(2, judge_with, one_parameter_forgotten, Classify())[0]
    assert found(outcome) == ("missing gradient synchronisation", 1, "2.bias")
    assert "1 of 4 parameters" in outcome.mismatch.why


@contextlib.contextmanager
def summed_not_averaged():
    def apply(model, mesh, config, workload):
        parallel = ddp.apply(model, mesh, config, workload)

        def add(state, bucket):
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])

        parallel.model.register_comm_hook(None, add)
        return parallel

    with broken_strategy(apply):
        yield


@contextlib.contextmanager
def averaged_twice():
    def apply(model, mesh, config, workload):
        return dataclasses.replace(ddp.apply(model, mesh, config, workload), gradient_divisor=1)

    with broken_strategy(apply):
        yield


@pytest.mark.parametrize("plant", [summed_not_averaged, averaged_twice])
@pytest.mark.parametrize("world_size", [2, 4])
def test_double_synchronisation_is_found_by_its_uniform_ratio(gloo, plant, world_size):
    outcome = gloo.run(world_size, judge_with, plant, Classify())[0]
    assert found(outcome) == ("double gradient synchronisation", 1, "0.weight")


@contextlib.contextmanager
def summed_at_every_micro_batch():
    """Sums after each micro-batch what has already been summed, and never divides twice."""

    def apply(model, mesh, config, workload):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
        return Parallel(model=model, module=model, weights=lambda: whole(model, keeps=True))

    with broken_strategy(apply):
        yield


def test_synchronisation_in_every_micro_batch_is_found_as_double(gloo):
    outcome = gloo.run(2, judge_with, summed_at_every_micro_batch, Classify(), {}, 2)[0]
    assert found(outcome) == ("double gradient synchronisation", 1, "0.weight")
    assert "more than once" in outcome.mismatch.why
    assert gloo.run(2, judge_with, summed_at_every_micro_batch, Classify())[0].verdict == "equal"


@contextlib.contextmanager
def only_the_last_micro_batch():
    objective = TrainStep._objective

    def forgetful(self, model, piece):
        if many():
            self.setup.optimizer.zero_grad(set_to_none=False)
        return objective(self, model, piece)

    with knows_who_trains(), mock.patch.object(TrainStep, "_objective", forgetful):
        yield


def test_lost_micro_batches_are_found(gloo):
    outcome = gloo.run(2, judge_with, only_the_last_micro_batch, Classify(), {}, 2)[0]
    assert found(outcome) == ("gradient accumulation", 1, "0.weight")


# clipping


@contextlib.contextmanager
def norm_of_its_own_shard():
    """Each rank takes the norm of the parameters it would own, as a sharded optimizer may do by mistake."""
    total = torch.nn.utils.get_total_norm

    def local(gradients, *args, **kwargs):
        return total(gradients[dist.get_rank() :: TRAINING_ON[0]] if many() else gradients, *args, **kwargs)

    with knows_who_trains(), mock.patch.object(torch.nn.utils, "get_total_norm", local):
        yield


def test_clipping_by_the_norm_of_a_shard_is_found(gloo):
    outcome = gloo.run(2, judge_with, norm_of_its_own_shard, Classify(), CLIP)[0]
    assert found(outcome)[:2] == ("clipping on a local norm", 1)
    assert "the norm of the whole gradient is" in outcome.mismatch.why


@contextlib.contextmanager
def clipped_before_synchronisation():
    with knows_who_trains(), PLANTED["clipped before synchronisation"].plant():
        yield


def test_clipping_before_synchronisation_is_found_by_leaving_it_out(gloo):
    outcome = gloo.run(2, judge_with, clipped_before_synchronisation, Classify(), CLIP)[0]
    assert found(outcome)[:2] == ("clipping on a local norm", 1)
    assert "without clipping, both runs agree" in outcome.mismatch.why


# dtype


class AddsItsBias(Classify):
    """Works with a bias of any dtype."""

    def build_model(self):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.randn(NUM_CLASSES, NUM_FEATURES))
                self.bias = nn.Parameter(torch.randn(NUM_CLASSES))

            def forward(self, x):
                return F.linear(x, self.weight) + self.bias

        return Net()


@contextlib.contextmanager
def bias_in_float32():
    def apply(model, mesh, config, workload):
        model.bias.data = model.bias.data.float()
        return ddp.apply(model, mesh, config, workload)

    with broken_strategy(apply):
        yield


def test_a_parameter_of_another_dtype_is_found_and_named(gloo):
    outcome = gloo.run(2, judge_with, bias_in_float32, AddsItsBias())[0]
    assert found(outcome) == ("dtype", 0, "bias")
    assert outcome.mismatch.why == "bias is float32 instead of float64"


@contextlib.contextmanager
def gradients_reduced_in_bf16():
    def apply(model, mesh, config, workload):
        parallel = ddp.apply(model, mesh, config, workload)

        def compress(state, bucket):
            small = bucket.buffer().to(torch.bfloat16) / dist.get_world_size()
            whole = bucket.buffer()
            return dist.all_reduce(small, async_op=True).get_future().then(lambda f: whole.copy_(f.value()[0]))

        parallel.model.register_comm_hook(None, compress)
        return parallel

    with broken_strategy(apply):
        yield


def test_gradients_that_went_through_bf16_are_found(gloo):
    outcome = gloo.run(2, judge_with, gradients_reduced_in_bf16, Classify())[0]
    assert found(outcome) == ("dtype", 1, "0.weight")
    assert "fits into bf16" in outcome.mismatch.why
