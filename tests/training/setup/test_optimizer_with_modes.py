"""Optimizers that train at another point than the one to keep, as those of schedulefree do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_runs import Classify, train, train_alone
from torch import nn

from scaleray.errors import WorkloadError
from scaleray.training.setup.rank_context import RankContext


class MeanOfSteps(torch.optim.SGD):
    """SGD that refuses steps outside of its mode of training, and in the mode of evaluation has the mean of its steps."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        for group in self.param_groups:
            group["is_training"], group["count"] = False, 0

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            assert group["is_training"], "train() was not called"
            group["count"] += 1
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.detach(), 1 / group["count"])

    @torch.no_grad()
    def eval(self) -> None:
        self._exchange(False)

    @torch.no_grad()
    def train(self) -> None:
        self._exchange(True)

    def _exchange(self, is_training: bool) -> None:
        for group in self.param_groups:
            if group["is_training"] is is_training:
                continue
            group["is_training"] = is_training
            for p in group["params"]:
                if "mean" in self.state[p]:  # by arithmetic, so that rounding would be left over
                    shift = self.state[p]["mean"] - self.state[p].get("point", p)
                    self.state[p]["point"] = p.detach().clone()
                    p.add_(shift if not is_training else -shift)
                    if is_training:
                        del self.state[p]["point"]


class WithModes(Classify):
    def __init__(self) -> None:
        super().__init__(26, 9)

    def optimizer(self, model: nn.Module, settings: Any) -> torch.optim.Optimizer:
        return MeanOfSteps(model.parameters(), settings.learning_rate)


FLAGS = {"evaluation.every": "2 steps", "checkpoint.every": "1 step", "stop.after": "7 steps"}


def test_evaluations_and_final_weights_are_those_of_the_mode_of_evaluation():
    seen: list[dict[str, torch.Tensor]] = []

    class Shown(WithModes):
        def callbacks(self) -> list[Any]:
            return [self]

        def on_step(self, run: Any) -> None:
            seen.append({name: p.detach().clone() for name, p in run.model.named_parameters()})

    run = train_alone(Shown(), FLAGS)
    means = {name: torch.stack([step[name] for step in seen]).mean(dim=0) for name in seen[0]}
    assert all(torch.allclose(run.weights[name], mean, rtol=1e-12, atol=1e-14) for name, mean in means.items())
    assert run.trained == {}
    workload = WithModes()
    model = workload.build_model().double()
    model.load_state_dict(run.weights)
    rows = {name: torch.from_numpy(column) for name, column in workload.datasets()["val"].items()}
    loss, count = workload.loss(model, {"x": rows["x"].double(), "y": rows["y"]})
    assert run.evaluations[-1].metrics["val/loss"] == pytest.approx(loss.item() / count, rel=1e-12)


def test_evaluations_and_checkpoints_leave_the_training_as_it_was_to_the_bit(tmp_path):
    quiet = train_alone(WithModes(), {**FLAGS, "evaluation.every": None, "checkpoint.every": None})
    busy = train_alone(WithModes(), FLAGS, folder=tmp_path / "busy")
    train_alone(WithModes(), FLAGS, folder=tmp_path / "killed", kill_at=4)
    resumed = train_alone(WithModes(), FLAGS, folder=tmp_path / "killed")
    assert len(resumed.steps) == 3
    for run in (busy, resumed):
        assert all(torch.equal(value, run.weights[name]) for name, value in quiet.weights.items())


@pytest.mark.always("ddp")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_workers_keep_what_one_keeps(gloo, strategy):
    alone = train_alone(WithModes(), FLAGS)
    weights = gloo.run(2, weights_in_pool, strategy)[0]
    assert all(torch.allclose(weights[name], value, rtol=1e-11, atol=1e-13) for name, value in alone.weights.items())


def weights_in_pool(place: RankContext, strategy: str) -> dict[str, torch.Tensor]:
    return train(place, WithModes(), {**FLAGS, "strategy.name": strategy}).weights


@pytest.mark.parametrize(
    "flags", [{"strategy.name": "zero1"}, {"strategy.name": "local_sgd"}, {"averaging.decay": 0.9}]
)
def test_where_the_average_cannot_be_had_it_is_refused_by_name(gloo, flags):
    assert all(
        "an optimizer with an evaluation mode (MeanOfSteps)" in text for text in gloo.run(2, refusal_in_pool, flags)
    )


def refusal_in_pool(place: RankContext, flags: dict[str, Any]) -> str:
    with pytest.raises(WorkloadError) as caught:
        train(place, WithModes(), {"strategy.name": "ddp", **flags})
    return str(caught.value)
