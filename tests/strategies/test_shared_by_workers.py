"""What all workers share besides gradients: learning rates at meetings, the statistics of rank 0, and exact evaluations."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from small_runs import Classify, Stepper, WithBatchNorm, make_job, train

from scaleray.config.recipe.lr_rules import learning_rate_factor

SCHEDULE = {"schedule.name": "cosine", "schedule.warmup": "3 steps", "stop.after": "12 steps"}
MEETINGS = {
    "ddp": {},
    "local_sgd": {"local_sgd.sync_every": 3, "local_sgd.warmup_steps": 2},
    "diloco": {"local_sgd.sync_every": 3},
    "gossip": {"gossip.meet_every": 3},
    "async_sgd": {"gossip.meet_every": 3, "gossip.max_staleness": 2},
}


class NotesRates(Classify):
    """Keeps the learning rate of every step that this rank's optimizer takes."""

    def optimizer(self, model, settings):
        optimizer = torch.optim.SGD(model.parameters(), settings.learning_rate)
        self.rates = []
        optimizer.register_step_post_hook(lambda own, *_: self.rates.append(own.param_groups[0]["lr"]))
        return optimizer


def rates_of(place, flags):
    workload = NotesRates()
    job, _ = make_job(workload, flags, world_size=place.world_size)
    train(place, workload, flags)
    recipe = job.recipe
    due = [
        recipe.learning_rate
        * learning_rate_factor(
            step,
            name="cosine",
            warmup_steps=recipe.warmup_steps,
            schedule_steps=recipe.schedule_steps,
            final_ratio=job.config.schedule.final_ratio,
        )
        for step in range(12)
    ]
    return list(place.gathered(workload.rates)), due


@pytest.mark.parametrize("strategy", MEETINGS)
def test_every_worker_takes_each_step_at_the_rate_of_the_schedule_meetings_or_not(gloo, strategy):
    flags = {**SCHEDULE, **MEETINGS[strategy], "strategy.name": strategy}
    everyone, due = gloo.run(2, rates_of, flags)[0]
    assert [rates == pytest.approx(due, rel=1e-12) for rates in everyone] == [True, True], (everyone, due)


def statistics_of(place, flags):
    """Running statistics of every rank after two steps, and once they are shared for an evaluation."""
    stepper = Stepper(place, WithBatchNorm(num_rows=32), flags)
    for number in (1, 2):
        stepper(number)

    def buffers():
        return {n: b.clone() for n, b in stepper.parallel.module.named_buffers() if b.is_floating_point()}

    before = buffers()
    stepper.parallel.before_evaluation()
    found = place.gathered((before, buffers()))
    stepper.setup.close()
    return found


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_evaluations_have_the_statistics_of_the_first_worker(gloo, strategy):
    everyone = gloo.run(2, statistics_of, {"strategy.name": strategy})[0]
    first, other = (before for before, _ in everyone)
    assert any(not torch.equal(first[name], other[name]) for name in first)  # each has its own rows'
    for _, shared in everyone:
        assert all(torch.equal(shared[name], first[name]) for name in first)


def evaluated(place, flags):
    workload = Classify(num_val=21)
    run = train(place, workload, {**flags, "precision.dtype": "fp64", "stop.after": "3 steps"})
    if dist.get_rank():
        return None
    model = workload.build_model().double()
    model.load_state_dict(run.weights)
    val = workload.datasets()["val"]
    with torch.no_grad():
        loss = F.cross_entropy(model(torch.as_tensor(val["x"]).double()), torch.as_tensor(val["y"]))
    return float(loss), run.evaluations[-1].metrics["val/loss"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "local_sgd"])
def test_an_evaluation_of_float64_weights_is_exact(gloo, strategy):
    due, found = gloo.run(2, evaluated, {"strategy.name": strategy})[0]
    assert found == pytest.approx(due, rel=1e-12)
