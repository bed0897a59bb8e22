"""Each class of mismatch is planted and found; correct training, in all its variety, passes."""

from __future__ import annotations

import contextlib
import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from small_runs import NUM_CLASSES, NUM_FEATURES, Classify, TiedAndFrozen, Tokens, WithBatchNorm, WithDropout, make_job
from torch import nn

from scaleray.launch.local import stream_opener
from scaleray.strategies import STRATEGIES, Parallel, ddp
from scaleray.training import loop, model_setup, optimizers, verification
from scaleray.training.step import TrainStep
from scaleray.training.verification import Assignment, Outcome, Promise, Variant, short_job, verify_group

STEPS = 6  # of 8 rows; the fourth has the 2 that are left of 26
CLIP = {"optimizer.clip_norm": 0.3}


def variant(workload, flags, world_size, accumulation, strategy=None):
    share = 8 // world_size
    more = {"scale.workers": world_size, "batch.micro_size": share // accumulation, "precision.dtype": "fp32"}
    job, sources = make_job(workload, {**flags, **more})
    if strategy is not None:
        job = dataclasses.replace(job, recipe=dataclasses.replace(job.recipe, strategy=strategy))
    in_check, own = short_job(job, steps=STEPS, precision="fp64"), short_job(job, steps=STEPS)
    return Variant(job.recipe.strategy, world_size, accumulation, in_check, own), sources


def judge(place, workload, flags, accumulation=1, strategy=None):
    """The outcome of one variant on the ranks of the pool, beside one process."""
    reference, sources = variant(workload, flags, 1, 1)
    other, _ = variant(workload, flags, place.world_size, accumulation, strategy)
    opener = stream_opener(reference.job, sources, lambda message: None)
    outcomes, _ = verify_group(place, Assignment(reference, (other,), 1e-9), {}, open_stream=opener)
    return outcomes[0]


def judge_with(place, plant, workload, flags=None, accumulation=1):
    """The same with a bug planted in every process; it must only strike where several ranks train."""
    with plant():
        return judge(place, workload, flags or {}, accumulation, strategy=STRATEGY_OF.get(plant))


def many():
    """Whether several ranks train right now; rank 0 runs the single process, too, inside the same group."""
    return TRAINING_ON[0] > 1


TRAINING_ON = [1]


@contextlib.contextmanager
def knows_who_trains():
    run = loop.run

    def told(job, place, **kwargs):
        TRAINING_ON[0] = place.world_size
        try:
            return run(job, place, **kwargs)
        finally:
            TRAINING_ON[0] = 1

    with mock.patch.object(verification.loop, "run", told):
        yield


@contextlib.contextmanager
def broken_strategy(apply):
    with mock.patch.dict(STRATEGIES, {"broken": apply}), knows_who_trains():
        yield


def found(outcome: Outcome):
    assert outcome.verdict == "differs", outcome
    return outcome.mismatch.cause, outcome.mismatch.step, outcome.mismatch.parameter


# what is right passes


RECIPES = {
    "sgd": {},
    "momentum": {"optimizer.momentum": 0.9, "optimizer.weight_decay": 0.05, "optimizer.nesterov": True},
    "adamw, clipping": {"optimizer.name": "adamw", "optimizer.learning_rate": 0.01, "optimizer.clip_norm": 0.3},
    "schedule": {"schedule.name": "cosine", "schedule.warmup": "3 steps"},
    "dropped last batch": {"batch.drop_last": True},
}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("workload", [Classify, Tokens, TiedAndFrozen])
def test_correct_training_is_equal_within_1e_9_and_to_rounding_in_float32(gloo, workload, recipe, world_size):
    outcome = gloo.run(world_size, judge, workload(), recipe, 2)[0]
    assert outcome.verdict == "equal" and outcome.words == "", outcome
    assert outcome.comparison.largest < 1e-13
    assert outcome.own.largest < 1e-4


def test_one_process_repeats_itself_to_the_bit_and_with_accumulation_within_rounding(gloo):
    assert gloo.run(1, judge, Tokens(), {})[0].comparison.largest == 0
    accumulating = gloo.run(1, judge, Tokens(), {}, 2)[0]
    assert accumulating.verdict == "equal" and 0 < accumulating.comparison.largest < 1e-13


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("workload", "words"), [(WithDropout, "dropout off: masks differ"), (WithBatchNorm, "BatchNorm frozen")]
)
def test_dropout_and_batch_norm_are_judged_without_what_differs_by_design(gloo, workload, words, world_size):
    outcome = gloo.run(world_size, judge, workload(num_rows=32), {}, 2)[0]
    assert outcome.verdict == "equal" and outcome.comparison.largest < 1e-12
    assert words in outcome.words
    if world_size > 1:
        assert outcome.own.loss > 1e-3  # the model as it is, for information


class FunctionalDropout(Classify):
    """Dropout without a module, which evaluation mode switches off."""

    def build_model(self):
        class Net(nn.Sequential):
            def forward(self, x):
                return super().forward(F.dropout(x, 0.5, self.training))

        return Net(nn.Linear(NUM_FEATURES, NUM_CLASSES))


def test_dropout_without_a_module_is_judged_in_evaluation_mode(gloo):
    outcome = gloo.run(2, judge, FunctionalDropout(), {})[0]
    assert outcome.verdict == "equal" and "evaluation mode" in outcome.words


# loss normalisation


class MeanOfMeans(Tokens):
    """Says that its mean is a sum over one."""

    def loss(self, model, batch):
        total, count = super().loss(model, batch)
        return total / count, 1


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
        reference, sources = variant(workload, {}, 1, 1)
        others = tuple(variant(workload, {}, place.world_size, n)[0] for n in (1, 2))
        opener = stream_opener(reference.job, sources, lambda message: None)
        return verify_group(place, Assignment(reference, others, 1e-9), {}, open_stream=opener)[0]


def test_a_gradient_that_is_not_divided_by_the_accumulation_is_told_from_double_synchronisation(gloo):
    right, wrong = gloo.run(2, judge_both, accumulation_is_not_divided, Classify())[0]
    assert right.verdict == "equal"
    assert found(wrong) == ("loss normalisation", 1, "0.weight")
    assert "accumulation steps count wrongly" in wrong.mismatch.why


# data order


@contextlib.contextmanager
def every_rank_reads_the_same():
    """The forgotten DistributedSampler: all ranks read the part of rank 0."""
    init = verification._Group.__init__

    def broken(self, place, assignment, references, open_stream):
        def same_part(split, part):
            return open_stream(split, dataclasses.replace(part, rank=0))

        init(self, place, assignment, references, same_part)

    with mock.patch.object(verification._Group, "__init__", broken):
        yield


def test_ranks_that_read_the_same_rows_are_found_as_data_order(gloo):
    outcome = gloo.run(2, judge_with, every_rank_reads_the_same, Classify())[0]
    assert found(outcome) == ("data order", 1, None)
    assert "4 of 8 rows are missing, 4 come twice" in outcome.mismatch.why


@contextlib.contextmanager
def another_order_in_the_second_epoch():
    init = verification._Group.__init__

    def broken(self, place, assignment, references, open_stream):
        def reseeded(split, part):
            from scaleray.data.step_plan import StepPlan

            class Later(StepPlan):
                def _order(self, epoch, positions):
                    return super()._order(epoch + 7 * (epoch > 0), positions)

            plan = Later(**dataclasses.asdict(part.plan)) if part.world_size > 1 else part.plan
            return open_stream(split, dataclasses.replace(part, plan=plan))

        init(self, place, assignment, references, reseeded)

    with mock.patch.object(verification._Group, "__init__", broken):
        yield


def test_another_order_of_the_second_epoch_is_found_at_its_first_step(gloo):
    outcome = gloo.run(2, judge_with, another_order_in_the_second_epoch, Classify())[0]
    assert found(outcome) == ("data order", 5, None)
    assert "belong to other steps" in outcome.mismatch.why


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
        return Parallel(model=model, module=model)

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


# dropout and other random numbers


class AlwaysNoisy(Classify):
    """Draws random numbers in evaluation mode as well."""

    def loss(self, model, batch):
        x = batch["x"]
        return super().loss(model, {**batch, "x": x + 0.1 * torch.randn_like(x)})


def test_random_numbers_that_cannot_be_switched_off_are_found(gloo):
    outcome = gloo.run(2, judge, AlwaysNoisy(), {})[0]
    assert found(outcome)[:2] == ("dropout or random numbers", 1)
    assert "use nn.Dropout" in outcome.mismatch.why


@contextlib.contextmanager
def one_seed_for_all():
    with mock.patch.object(model_setup, "stream_seed", return_value=7):
        yield


def test_the_same_masks_on_all_ranks_are_found(gloo):
    outcome = gloo.run(2, judge_with, one_seed_for_all, WithDropout())[0]
    assert found(outcome)[:2] == ("dropout or random numbers", 1)
    assert "the same units on each" in outcome.mismatch.why


def test_equal_generators_are_no_mismatch_without_dropout(gloo):
    assert gloo.run(2, judge_with, one_seed_for_all, Classify())[0].verdict == "equal"


@contextlib.contextmanager
def dropout_comes_back():
    """A strategy that turns dropout on again, as one that builds the model anew would."""

    def apply(model, mesh, config, workload):
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.5
        return ddp.apply(model, mesh, config, workload)

    with broken_strategy(apply):
        yield


def test_dropout_on_one_side_only_is_found(gloo):
    outcome = gloo.run(2, judge_with, dropout_comes_back, WithDropout())[0]
    assert found(outcome)[:2] == ("dropout or random numbers", 1)
    assert "in evaluation mode both runs agree" in outcome.mismatch.why


# BatchNorm


class HandwrittenNorm(nn.Module):
    """Batch statistics that torch's own class does not announce."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        if not self.training:
            return x - self.mean
        mean = x.mean(dim=0)
        self.mean.lerp_(mean.detach(), 0.1)
        return x - mean


class WithHandwrittenNorm(Classify):
    def build_model(self):
        return nn.Sequential(nn.Linear(NUM_FEATURES, 8), HandwrittenNorm(), nn.Tanh(), nn.Linear(8, NUM_CLASSES))


@pytest.mark.parametrize(("world_size", "accumulation"), [(2, 1), (1, 2)])
def test_batch_statistics_are_found(gloo, world_size, accumulation):
    outcome = gloo.run(world_size, judge, WithHandwrittenNorm(num_rows=32), {}, accumulation)[0]
    assert found(outcome)[:2] == ("BatchNorm statistics", 1)


# schedule


@contextlib.contextmanager
def schedule_steps_once_per_worker():
    build = optimizers.build_schedule

    def faster(optimizer, config, recipe):
        schedule = build(optimizer, config, recipe)
        step = schedule.step
        schedule.step = lambda: [step() for _ in range(TRAINING_ON[0])]
        return schedule

    with knows_who_trains(), mock.patch.object(optimizers, "build_schedule", faster):
        yield


def test_a_schedule_that_steps_once_per_worker_is_found(gloo):
    outcome = gloo.run(2, judge_with, schedule_steps_once_per_worker, Classify(), {"schedule.name": "cosine"})[0]
    assert found(outcome)[:2] == ("schedule or learning-rate step count", 2)
    assert "learning rate is" in outcome.mismatch.why


@contextlib.contextmanager
def optimizer_steps_twice():
    build = optimizers.build_schedule

    def eager(optimizer, config, recipe):
        schedule = build(optimizer, config, recipe)
        step = optimizer.step
        optimizer.step = lambda: [step() for _ in range(TRAINING_ON[0])][-1]
        return schedule

    with knows_who_trains(), mock.patch.object(optimizers, "build_schedule", eager):
        yield


def test_an_optimizer_that_steps_once_per_worker_is_found(gloo):
    outcome = gloo.run(2, judge_with, optimizer_steps_twice, Classify())[0]
    assert found(outcome)[:2] == ("schedule or learning-rate step count", 1)
    assert "2 updates in place of 1" in outcome.mismatch.why


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
    assert "that of the whole gradient is" in outcome.mismatch.why


@contextlib.contextmanager
def clipped_before_synchronisation():
    init = TrainStep.__init__

    def clipping(self, *args, **kwargs):
        init(self, *args, **kwargs)
        limit = self.config.optimizer.clip_norm
        if many() and limit is not None:
            for p in self.parameters:
                p.register_hook(lambda g: g * torch.clamp(limit / 4 / g.norm(), max=1.0))

    with knows_who_trains(), mock.patch.object(TrainStep, "__init__", clipping):
        yield


def test_clipping_before_synchronisation_is_found_by_leaving_it_out(gloo):
    outcome = gloo.run(2, judge_with, clipped_before_synchronisation, Classify(), CLIP)[0]
    assert found(outcome)[:2] == ("clipping on a local norm", 1)
    assert "without clipping both runs agree" in outcome.mismatch.why


# initial parameters


class DrawnByWorldSize(Classify):
    """All ranks agree, but not with one process."""

    def build_model(self):
        torch.manual_seed(TRAINING_ON[0])
        return super().build_model()


def test_initial_parameters_that_depend_on_the_world_size_are_found(gloo):
    outcome = gloo.run(2, judge_with, knows_who_trains, DrawnByWorldSize())[0]
    assert found(outcome) == ("initial parameters", 0, "0.weight")


class DrawnByRank(Classify):
    def build_model(self):
        torch.manual_seed(dist.get_rank() if many() else 0)
        return super().build_model()


@contextlib.contextmanager
def keeps_own_parameters():
    def apply(model, mesh, config, workload):
        return Parallel(model=model, module=model)

    with broken_strategy(apply):
        yield


def test_initial_parameters_that_differ_from_rank_to_rank_are_found(gloo):
    outcome = gloo.run(2, judge_with, keeps_own_parameters, DrawnByRank())[0]
    assert found(outcome)[:2] == ("initial parameters", 0)
    assert "0.weight differs between rank 0 and rank 1" in outcome.mismatch.why


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
    assert outcome.mismatch.why == "bias is float32 in place of float64"


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


class LossInFloat32(Classify):
    """Casts its outputs, as many models do before the softmax."""

    def loss(self, model, batch):
        return F.cross_entropy(model(batch["x"]).float(), batch["y"], reduction="sum"), len(batch["y"])


def test_a_loss_in_float32_explains_why_the_bound_is_missed(gloo):
    outcome = gloo.run(2, judge, LossInFloat32(), {})[0]
    assert found(outcome)[0] == "dtype"
    assert "computes its loss in float32" in outcome.mismatch.why


# what does not promise equality, and what is refused


@contextlib.contextmanager
def average_later():
    """Local SGD over three steps, in few lines."""

    def apply(model, mesh, config, workload):
        return Parallel(model=model, module=model)

    with broken_strategy(apply), mock.patch.dict(verification.PROMISES, {"broken": PROMISE}):
        yield


PROMISE = Promise(False, verification.PROMISES["local_sgd"].keeps, "replicas train apart")


def test_a_strategy_that_does_not_promise_equality_is_judged_by_what_it_promises(gloo):
    outcome = gloo.run(2, judge_with, average_later, Classify())[0]
    assert outcome.verdict == "as promised" and outcome.words == "replicas train apart"
    assert outcome.comparison.largest > 1e-3


@contextlib.contextmanager
def average_later_on_other_rows():
    with average_later(), every_rank_reads_the_same():
        yield


def test_a_broken_promise_is_a_mismatch_of_its_class(gloo):
    outcome = gloo.run(2, judge_with, average_later_on_other_rows, Classify())[0]
    assert found(outcome)[:2] == ("data order", 1)


@contextlib.contextmanager
def a_strategy_that_refuses():
    def apply(model, mesh, config, workload):
        from scaleray.errors import WorkloadError

        raise WorkloadError("blocks()", None, "this strategy splits the model by its blocks")

    with broken_strategy(apply):
        yield


def test_a_strategy_that_does_not_take_the_workload_is_listed_with_the_reason(gloo):
    outcome = gloo.run(2, judge_with, a_strategy_that_refuses, Classify())[0]
    assert outcome.verdict == "refused" and "splits the model by its blocks" in outcome.words


STRATEGY_OF = dict.fromkeys(
    (
        each_rank_its_own_mean, no_synchronisation, one_parameter_forgotten, summed_not_averaged, averaged_twice,
        summed_at_every_micro_batch, dropout_comes_back, keeps_own_parameters, bias_in_float32,
        gradients_reduced_in_bf16, average_later, average_later_on_other_rows, a_strategy_that_refuses,
    ),
    "broken",
)  # fmt: skip


class FailsOnManyWorkers(Classify):
    def loss(self, model, batch):
        total, count = super().loss(model, batch)
        return total, count if not many() else -1


def test_a_run_that_fails_only_there_is_a_mismatch(gloo):
    outcome = gloo.run(2, judge_with, knows_who_trains, FailsOnManyWorkers())[0]
    assert found(outcome) == ("the run failed", 0, None)
    assert "the count returned by loss() is -1" in outcome.mismatch.why


def test_switches_of_torch_are_as_they_were_after_a_deterministic_run(gloo):
    gloo.run(1, judge, Classify(), {"deterministic": True})
    assert not any(gloo.run(1, is_deterministic))


def is_deterministic(place):
    return torch.are_deterministic_algorithms_enabled()


APART = {
    "local_sgd": {"local_sgd.sync_every": 2},
    "warm-up": {"strategy.name": "local_sgd", "local_sgd.sync_every": 2, "local_sgd.warmup_steps": 2},
    "diloco": {"local_sgd.sync_every": 3},
    "gossip": {"gossip.graph": "ring"},
    "asynchronous": {"strategy.name": "gossip", "gossip.is_asynchronous": True},
    "async_sgd": {"gossip.meet_every": 3, "gossip.max_staleness": 1},
}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", APART)
def test_replicas_that_train_apart_keep_what_they_promise(gloo, name, world_size):
    for workload in (Classify(), Tokens()):
        outcome = gloo.run(world_size, judge, workload, {"strategy.name": name, **APART[name]})[0]
        assert outcome.verdict == "as promised", outcome
        assert outcome.comparison.largest > 1e-6  # else it would not be what it says


@contextlib.contextmanager
def forgets_to_average():
    """Local SGD that says it meets, and does nothing there."""

    def apply(model, mesh, config, workload):
        parallel = STRATEGIES["local_sgd"](model, mesh, config, workload)
        return dataclasses.replace(parallel, after_update=lambda step: None)

    with broken_strategy(apply), mock.patch.dict(verification.PROMISES, {"broken": verification.PROMISES["local_sgd"]}):
        yield


@contextlib.contextmanager
def no_warm_up():
    """Local SGD whose warm-up does not average gradients."""

    def apply(model, mesh, config, workload):
        parallel = STRATEGIES["local_sgd"](model, mesh, config, workload)
        return dataclasses.replace(parallel, model=model)

    with broken_strategy(apply), mock.patch.dict(verification.PROMISES, {"broken": verification.PROMISES["local_sgd"]}):
        yield


STRATEGY_OF |= {forgets_to_average: "broken", no_warm_up: "broken"}


def test_replicas_that_do_not_agree_after_their_averaging_are_found(gloo):
    outcome = gloo.run(2, judge_with, forgets_to_average, Classify(), {"local_sgd.sync_every": 2})[0]
    assert found(outcome)[1] == 2
    assert outcome.mismatch.quantity == "parameters"


def test_a_warm_up_that_is_not_ddp_is_found_in_its_first_step(gloo):
    flags = {"local_sgd.sync_every": 2, "local_sgd.warmup_steps": 2}
    outcome = gloo.run(2, judge_with, no_warm_up, Classify(), flags)[0]
    assert found(outcome)[1] == 1
