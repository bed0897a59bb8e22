"""Several optimizers for the parts of one loss, as people pair Muon with AdamW."""

from __future__ import annotations

import pytest
import torch
from small_runs import Classify, train_alone
from verified import judge

from scaleray.errors import WorkloadError

FLAGS = {"stop.after": "6 steps", "optimizer.name": "adamw", "optimizer.learning_rate": 0.01}


class Paired(Classify):
    def optimizer(self, model, settings):
        matrices = [p for p in model.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if p.ndim < 2]
        return {
            "matrices": torch.optim.SGD(matrices, 2 * settings.learning_rate, momentum=0.9),
            "rest": torch.optim.AdamW(rest, settings.learning_rate),
        }


class Grouped(Classify):
    def optimizer(self, model, settings):
        groups = [[p for p in model.parameters() if (p.ndim == 2) is wide] for wide in (True, False)]
        rates = (2 * settings.learning_rate, settings.learning_rate)
        return torch.optim.AdamW([{"params": ps, "lr": lr} for ps, lr in zip(groups, rates, strict=True)])


class Alike(Grouped):
    def optimizer(self, model, settings):
        groups = super().optimizer(model, settings).param_groups
        return {str(n): torch.optim.AdamW(group["params"], group["lr"]) for n, group in enumerate(groups)}


def test_two_optimizers_train_what_one_with_their_groups_does():
    assert train_alone(Alike(), FLAGS).losses == train_alone(Grouped(), FLAGS).losses


@pytest.mark.always("ddp", "fsdp")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "tensor", "pipeline", "local_sgd", "gossip", "async_sgd"])
def test_workers_with_two_optimizers_train_what_one_does(gloo, strategy):
    outcome = gloo.run(2, judge, Paired(), {"strategy.name": strategy}, 2, 4)[0]
    assert outcome.verdict in ("equal", "as promised"), outcome


def test_a_resume_has_the_state_of_both(tmp_path):
    flags = {**FLAGS, "checkpoint.every": "2 steps"}
    whole = train_alone(Paired(), flags)
    train_alone(Paired(), flags, folder=tmp_path, kill_at=5)
    resumed = train_alone(Paired(), flags, folder=tmp_path)
    assert resumed.losses[-2:] == whole.losses[-2:] and len(resumed.losses) < 6


def test_a_step_that_is_not_finite_moves_neither():
    class Poisoned(Paired):
        """Once it has taken a step, its loss is not finite."""

        def build_model(self):
            model = super().build_model()
            self.begun = {name: value.detach().clone() for name, value in model.state_dict().items()}
            return model

        def loss(self, model, batch):
            total, count = super().loss(model, batch)
            has_moved = any(not torch.equal(value, self.begun[name]) for name, value in model.state_dict().items())
            return total * (float("nan") if has_moved else 1.0), count

    ended = [
        train_alone(Poisoned(), {**FLAGS, "schedule.name": "constant", "on_nonfinite": "skip", "stop.after": after})
        for after in ("1 steps", "6 steps")
    ]
    assert len(ended[1].steps) == 6
    for name, value in ended[0].weights.items():
        assert torch.equal(ended[1].weights[name], value)


def test_a_parameter_of_two_optimizers_is_refused():
    class Shared(Classify):
        def optimizer(self, model, settings):
            return {n: torch.optim.SGD(model.parameters(), 0.1) for n in ("one", "other")}

    with pytest.raises(WorkloadError, match="some of them share a parameter"):
        train_alone(Shared(), FLAGS)
