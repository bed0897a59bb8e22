"""What a training must not change while it runs, and buffers that it may: on one worker and on several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_runs import NUM_CLASSES, NUM_FEATURES, Classify, train, train_alone
from torch import nn

from scaleray.checkpoints.catalog import Catalog
from scaleray.common.callbacks import Callback
from scaleray.errors import WorkloadError
from scaleray.training.setup.rank_context import RankContext

STRATEGIES = ("ddp", "zero1", "fsdp", "local_sgd")


class Change(Callback):
    """Calls `change(model)` after a step."""

    def __init__(self, change: Any, step: int) -> None:
        self.change, self.step = change, step

    def on_step(self, run: Any) -> None:
        if run.step == self.step:
            self.change(run.model)


class Frozen(Classify):
    """A network whose first layer is frozen at the start; `change` is applied to the model after step 2."""

    def __init__(self, change: str) -> None:
        super().__init__(26)
        self.change = change

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model[0].requires_grad_(False)
        return model

    def optimizer(self, model: nn.Module, settings: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=settings.learning_rate)

    def callbacks(self) -> list[Callback]:
        return [Change(CHANGES[self.change], step=2)]


class ThawedByLoss(Frozen):
    """The first layer is thawed in the loss, in the fourth pass of training."""

    def __init__(self) -> None:
        super().__init__("thaw")
        self.passes = 0

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.passes += 1
        model[0].requires_grad_(self.passes >= 4)
        found = super().loss(model, batch)
        return found

    def callbacks(self) -> list[Callback]:
        return []


def _thaw(model: nn.Module) -> None:
    model[0].requires_grad_(True)


def _freeze(model: nn.Module) -> None:
    model[2].bias.requires_grad_(False)


def _exchange(model: nn.Module) -> None:
    model[2] = nn.Linear(8, NUM_CLASSES).double()


def _tie(model: nn.Module) -> None:
    model[2].bias = nn.Parameter(torch.zeros(NUM_CLASSES, dtype=torch.float64))


def _add(model: nn.Module) -> None:
    model.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))


def _register(model: nn.Module) -> None:
    model.register_buffer("late", torch.ones(1))


def _swap(model: nn.Module) -> None:
    model[1] = nn.Tanh()


def _forward(model: nn.Module) -> None:
    model[1].forward = torch.sin


CHANGES = {
    "swap": _swap, "forward": _forward,
    "thaw": _thaw, "freeze": _freeze, "exchange": _exchange, "tie": _tie, "add": _add, "register": _register,
}  # fmt: skip
SENTENCES = {
    "swap": "the module 1 was replaced at step 3",
    "forward": r"forward\(\) of the module 1 was replaced after on_step\(\) of callback Change",
    "thaw": "the parameter 0.weight was frozen and is trained from step 3 on",
    "freeze": "the parameter 2.bias is frozen from step 3 on",
    "exchange": "the parameter 2.weight was replaced at step 3",
    "tie": "the parameter 2.bias was replaced at step 3",
    "add": "the parameter scale was added at step 3",
    "register": "the buffer late was added at step 3",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_callback_that_changes_which_parameters_there_are_is_refused_at_that_step(change):
    with pytest.raises(WorkloadError, match=SENTENCES[change]):
        train_alone(Frozen(change))


class Hooks(Callback):
    def __init__(self, stays: bool) -> None:
        self.stays = stays

    def on_step(self, run: Any) -> None:
        handle = run.model[1].register_forward_hook(lambda module, args, output: output * 2)
        if not self.stays:
            handle.remove()


@pytest.mark.parametrize("stays", [True, False])
def test_a_hook_that_a_callback_leaves_on_the_model_is_named_once(stays):
    workload = Classify(26)
    workload.callbacks = lambda: [Hooks(stays)]
    texts = [text for text in train_alone(workload).events if "has a new hook" in text]
    assert len(texts) == stays and all("the module 1 has a new hook after on_step() of callback" in t for t in texts)


class SetsRate(Callback):
    def on_step(self, run: Any) -> None:
        for group in run._setup.optimizer.param_groups:
            group["lr"] /= 2


class WithSetRate(Classify):
    def callbacks(self) -> list[Callback]:
        return [SetsRate()]


def test_a_learning_rate_that_a_callback_sets_is_refused():
    with pytest.raises(WorkloadError, match=r"learning rate after on_step\(\) of callback SetsRate is 0\.05"):
        train_alone(WithSetRate())


def test_a_change_right_before_a_checkpoint_is_refused_and_not_lost_in_it(tmp_path):
    with pytest.raises(WorkloadError, match=SENTENCES["thaw"]):
        train_alone(Frozen("thaw"), {"checkpoint.every": "2 steps"}, folder=tmp_path)
    assert Catalog.of_run(str(tmp_path)).newest() is None
    with pytest.raises(WorkloadError, match=SENTENCES["thaw"]):
        train_alone(Frozen("thaw"), {"stop.after": "2 steps", "checkpoint.every": "2 steps"}, folder=tmp_path)


def test_a_layer_that_the_loss_thaws_is_refused_at_that_step():
    with pytest.raises(WorkloadError, match=r"the parameter 0\.weight was frozen and is trained from step \d on"):
        train_alone(ThawedByLoss())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_thawed_layer_is_refused_on_every_worker(gloo, strategy):
    found = gloo.run(2, refusal_in_pool, "thaw", strategy)
    assert all("0.weight was frozen and is trained from step 3 on" in text for text in found), found


def refusal_in_pool(place: RankContext, change: str, strategy: str) -> str:
    with pytest.raises(WorkloadError) as caught:
        train(place, Frozen(change), {"strategy.name": strategy})
    return str(caught.value)


class Bank(nn.Module):
    """Features of the last rows; it begins without any, as does the code book, which has no shape before step 1."""

    def __init__(self, rows_of_rank: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(NUM_FEATURES, 8), nn.Linear(8, NUM_CLASSES)
        self.register_buffer("bank", torch.zeros(0, 8, dtype=torch.float64))
        self.register_buffer("codes", None)
        self.rows_of_rank, self.count = rows_of_rank, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.body(x))
        if self.training:
            self.count += 1
            rank = torch.distributed.get_rank() if self.rows_of_rank and torch.distributed.is_initialized() else 0
            self.bank = torch.cat([self.bank, hidden.detach()[: 2 + rank]])[-40:]
            if self.codes is None:
                self.codes = hidden.detach()[:2].clone()
            if not hasattr(self, "seen"):
                self.register_buffer("seen", torch.zeros(3), persistent=False)
            self.seen = self.seen + 1
        near = self.bank.mean(dim=0) if len(self.bank) else 0.0
        code = self.codes.mean(dim=0) if self.codes is not None else 0.0
        return self.head(hidden - 0.1 * near - 0.01 * self.count * code)


class WithBank(Classify):
    def __init__(self, rows_of_rank: bool = False) -> None:
        super().__init__(24, 8)
        self.rows_of_rank = rows_of_rank

    def build_model(self) -> nn.Module:
        return Bank(self.rows_of_rank)


class Remembers(nn.Linear):
    """Features of the last rows as a plain attribute; `angles` is made in the first pass and stays."""

    def __init__(self, kind: str) -> None:
        super().__init__(NUM_FEATURES, NUM_CLASSES, dtype=torch.float64)
        self.kind, self.angles = kind, None
        empty = {"dict": {}, "list": [], "generator": torch.Generator()}
        self.bank = empty.get(kind, torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.angles = x.detach().mean(0) if self.angles is None else self.angles
        if self.training and self.kind == "tensor":
            self.bank = 0.9 * self.bank + x.detach().mean()
        elif self.training and self.kind == "list":
            self.bank = [*self.bank, x.detach()[0]][-3:]
        elif self.training and self.kind == "dict":
            self.bank["last"] = x.detach()[0]
        elif self.kind == "generator":
            torch.rand(1, generator=self.bank)
        return super().forward(x)


@pytest.mark.parametrize("kind", ["tensor", "list", "dict", "generator", "none"])
def test_an_attribute_that_no_checkpoint_holds_is_named_once(kind, tmp_path):
    workload = Classify(24)
    workload.build_model = lambda: Remembers(kind)
    finished = train_alone(workload, {"checkpoint.every": "1 step"}, folder=tmp_path)
    texts = [text for text in finished.events if text.startswith("the attribute bank of the model changes")]
    assert len(texts) == (kind != "none") and len([text for text in finished.events if "the attribute" in text]) <= 1
    workload.state_dict, workload.load_state_dict = dict, lambda state: None
    finished = train_alone(workload, {"checkpoint.every": "1 step"}, folder=tmp_path / "own")
    assert not [text for text in finished.events if "the attribute" in text]


FLAGS = {"checkpoint.every": "1 step", "evaluation.every": "1 epoch"}


def test_a_run_with_growing_buffers_and_counters_resumes_to_the_bit(tmp_path):
    whole = train_alone(WithBank(), FLAGS)
    train_alone(WithBank(), FLAGS, folder=tmp_path, kill_at=4)
    resumed = train_alone(WithBank(), FLAGS, folder=tmp_path)
    assert whole.weights.keys() == resumed.weights.keys() and whole.weights["bank"].shape == (12, 8)
    assert all(torch.equal(value, resumed.weights[name]) for name, value in whole.weights.items())


def test_growing_buffers_of_one_shape_resume_on_two_workers(gloo, tmp_path):
    for kill_at, found in ((4, None), (None, (12, 8))):
        shapes = gloo.run(2, bank_in_pool, str(tmp_path), kill_at)
        assert shapes[0] == found


def bank_in_pool(place: RankContext, folder: str, kill_at: int | None) -> tuple[int, ...] | None:
    finished = train(place, WithBank(), FLAGS, folder=folder, kill_at=kill_at)
    return tuple(finished.weights["bank"].shape) if finished.weights else None


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_buffers_of_unlike_shapes_are_refused_on_every_worker(gloo, strategy):
    found = gloo.run(2, unlike_in_pool, strategy)
    how = "changed" if strategy == "local_sgd" else "differs between workers"
    assert all(
        f"the shape [{n}, 8] of the buffer bank {how}: " in text for n, text in zip((2, 3), found, strict=True)
    ), found


def unlike_in_pool(place: RankContext, strategy: str) -> str:
    with pytest.raises(WorkloadError) as caught:
        train(place, WithBank(rows_of_rank=True), {"strategy.name": strategy})
    return str(caught.value)
