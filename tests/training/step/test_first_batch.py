"""The look at the first batch: as training runs, without a trace, and a mean is told from a sum in whatever mode there is."""

import own_methods as own
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from small_runs import Classify, make_job, same_generators, train, train_alone
from torch import nn

from scaleray.data import RankBatch
from scaleray.errors import WorkloadError
from scaleray.training.setup.model_setup import prepare
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.step.first_batch import check_first_batch

STEP = {"stop.after": "1 steps"}


class Trained(Classify):
    """Dropout, batch statistics, counters, a loss with a state and a teacher that follows the student within the loss."""

    num_losses = num_of_class = 0

    def build_model(self):
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
        model.teacher = nn.Linear(6, 3).requires_grad_(False)
        model.num_passes = 0
        return model

    def loss(self, model, batch):
        self.num_losses += 1
        self.num_of_class += 1
        model.num_passes += 1
        with torch.no_grad():
            model.teacher.weight.mul_(0.9)
        out = model[3](model[2](model[1](model[0](batch["x"]))))
        return F.cross_entropy(out, batch["y"], reduction="sum"), len(batch["y"])

    def state_dict(self):
        return {"num_losses": self.num_losses}

    def load_state_dict(self, state):
        self.num_losses = state["num_losses"]


def test_it_leaves_no_trace_in_parameters_buffers_counters_generators_or_the_workload():
    with same_generators():
        workload = Trained()
        job, sources = make_job(workload)
        setup = prepare(workload, job.config, job.recipe, RankContext())
        module = setup.parallel.module
        before = {name: value.clone() for name, value in module.state_dict().items()}
        generator = torch.get_rng_state()
        batch = RankBatch(0, sources["train"].read(list(range(8))), 8)
        check_first_batch(workload, job.config, batch, setup, RankContext(), gives_tuples=False, micro_batch_size=8)
        assert torch.equal(torch.get_rng_state(), generator)
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        assert all(p.grad is None for p in module.parameters())
        assert module.training and module.num_passes == 0 and workload.num_losses == 0
        assert workload.num_of_class == 0 and "num_of_class" not in vars(workload)


def test_a_loss_in_training_mode_alone_trains_and_is_evaluated_by_metrics():
    finished = train_alone(own.OnlyInTraining(num_val=9), STEP)
    assert finished.evaluations[-1].metrics.keys() == {"val/loss"}


def test_a_loss_in_training_mode_alone_that_evaluations_need_is_refused_before_the_first_step():
    class WithoutMetrics(own.OnlyInTraining):
        metrics = None

    with pytest.raises(WorkloadError, match=r"the loss of val is needed there.*\n.*return `loss` from metrics"):
        train_alone(WithoutMetrics(num_val=9), STEP)
    assert train_alone(WithoutMetrics(), STEP).summary.steps == 1


def test_a_penalty_on_gradients_is_evaluated_with_gradients():
    finished = train_alone(own.GradientPenalty(num_val=9), STEP)
    plain = train_alone(own.ByCall(num_val=9), STEP)
    assert finished.evaluations[-1].metrics["val/loss"] > plain.evaluations[-1].metrics["val/loss"]
    assert finished.evaluations[-1].metrics["val/accuracy"] >= 0


# sum or mean


class Losses(Classify):
    """Losses of a model with dropout and batch statistics. how: of the row losses; mode: in which it can be had."""

    def __init__(self, how, *, only_in_training, noise=False, penalty=0.0):
        super().__init__(num_rows=16)
        self.how, self.only_in_training, self.noise, self.penalty = how, only_in_training, noise, penalty

    def build_model(self):
        return nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Dropout(0.3), nn.Linear(64, 3))

    def loss(self, model, batch):
        if self.only_in_training:
            assert model.training
        losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        if self.noise:  # a row's loss depends on what is drawn for it, as in diffusion: by up to a factor of 1000
            losses = losses * 1000 ** torch.rand(len(losses))
        return self.how(losses) + self.penalty, len(losses)


@pytest.mark.parametrize("only_in_training", [False, True])
def test_a_mean_is_found_under_dropout_and_batch_norm(only_in_training):
    with pytest.raises(WorkloadError, match="a mean"):
        train_alone(Losses(torch.mean, only_in_training=only_in_training), STEP)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("more", [{}, {"noise": True}, {"penalty": 50.0}])
def test_a_sum_is_never_refused_however_noisy_it_is(seed, more):
    workload = Losses(torch.sum, only_in_training=True, **more)
    assert train_alone(workload, {**STEP, "seed": seed}).summary.steps == 1


def test_a_negative_mean_is_found_too():
    with pytest.raises(WorkloadError, match="a mean"):
        train_alone(Losses(lambda losses: -losses.mean(), only_in_training=True), STEP)


# metrics whose names depend on the data


class PerClass(Classify):
    """The number of rows of each class that a batch has, and of rows that are of it: 1 wherever the class is seen."""

    def metrics(self, model, batch):
        found = {}
        for label in batch["y"].tolist():
            total, count = found.get(f"class_{label}", (0, 0))
            found[f"class_{label}"] = (total + 1 + label, count + 1)
        return {name: (torch.tensor(float(total)), count) for name, (total, count) in found.items()}

    def datasets(self):
        data = super().datasets()
        # one row a batch: rank 0 sees classes 0 and 1, rank 1 sees 1 and 2, and in equal numbers
        data["val"] = {"x": data["val"]["x"][:4], "y": torch.tensor([0, 1, 1, 2]).numpy()}
        return data


def metrics_of(place):
    flags = {"evaluation.micro_size": 1, "evaluation.every": "2 steps", "stop.after": "4 steps"}
    return [e.metrics for e in train(place, PerClass(num_val=4), flags).evaluations]


def test_metrics_are_summed_by_name_where_workers_see_other_classes(gloo):
    first, last = gloo.run(2, metrics_of)[0]
    for metrics in (first, last):
        by_class = {name: value for name, value in metrics.items() if "class" in name}
        assert by_class == {"val/class_0": 1.0, "val/class_1": 2.0, "val/class_2": 3.0}


class CountsAQuarter(Classify):
    """A loss that counts a quarter for each row, for as long as there is memory."""

    has_memory = True

    def loss(self, model, batch):
        if not self.has_memory:
            raise MemoryError
        total, count = super().loss(model, batch)
        return total, count / 4


def counted_by(workload, place):
    with same_generators():
        job, sources = make_job(workload)
        setup = prepare(workload, job.config, job.recipe, RankContext())
        batch = RankBatch(0, sources["train"].read(list(range(2))), 2)
        return check_first_batch(workload, job.config, batch, setup, place, gives_tuples=False, micro_batch_size=2)


def test_what_a_row_counts_may_be_less_than_one():
    assert counted_by(CountsAQuarter(), RankContext()) == 0.25


def test_a_rank_that_ran_out_of_memory_does_not_take_part_in_what_a_row_counts():
    class BesideAnother(RankContext):
        """The sums of this rank and of one whose two rows counted four."""

        def all_reduce(self, values):
            return [mine + other for mine, other in zip(values, (4.0, 2.0), strict=True)]

    workload = CountsAQuarter()
    workload.has_memory = False
    assert counted_by(workload, BesideAnother()) == 2.0


def test_a_table_that_the_first_pass_makes_stays_where_it_is():
    class MakesATable(Classify):
        def loss(self, model, batch):
            if not hasattr(model, "table"):
                model.table = torch.ones(3)
            return super().loss(model, batch)

    with same_generators():
        job, sources = make_job(MakesATable())
        setup = prepare(job.workload, job.config, job.recipe, RankContext())
        batch = RankBatch(0, sources["train"].read(list(range(8))), 8)
        check_first_batch(job.workload, job.config, batch, setup, RankContext(), gives_tuples=False, micro_batch_size=8)
    assert setup.parallel.module.table.tolist() == [1, 1, 1]


def test_a_column_that_the_loss_wants_and_the_rows_lack_is_named_beside_those_that_there_are():
    class Asking(Classify):
        def loss(self, model, batch):
            return super().loss(model, {**batch, "x": batch["features"]})

    with pytest.raises(WorkloadError, match="reads column 'features': the batch has 'x', 'y'") as caught:
        train_alone(Asking(), STEP)
    assert 'batch["features"]' in str(caught.value), "the user's line"


def test_a_key_that_a_mapping_of_the_users_own_lacks_is_not_taken_for_a_column():
    class Looking(Classify):
        def loss(self, model, batch):
            names = {}
            names["one"]
            return super().loss(model, batch)

    with pytest.raises(WorkloadError, match="KeyError: 'one'") as caught:
        train_alone(Looking(), STEP)
    assert 'names["one"]' in str(caught.value) and "reading column" not in str(caught.value)


class FailsOnRank1(Classify):
    """A loss that one rank alone cannot compute."""

    def loss(self, model, batch):
        assert not dist.is_initialized() or dist.get_rank() == 0, "only rank 0 can"
        return super().loss(model, batch)


def refused(place):
    with pytest.raises(WorkloadError, match=r"(?s)loss\(\).*test_first_batch\.py.*only rank 0 can"):
        train(place, FailsOnRank1(), STEP)
    return True


def test_an_error_of_one_rank_is_raised_by_all_and_leaves_nobody_in_a_collective(gloo):
    assert gloo.run(2, refused) == [True, True]
