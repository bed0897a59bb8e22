"""Callbacks that change the learning rate, and hooks of epochs and evaluations: alike on all workers, through resumes."""

import pytest
import torch
from small_runs import Classify, largest_difference, train, train_alone

from scaleray import Callback
from scaleray.errors import StepFailedError, WorkloadError

FLAGS = {
    "stop.after": "14 steps", "evaluation.every": "5 steps", "checkpoint.every": "3 steps", "precision.dtype": "fp64",
    "deterministic": True, "schedule.name": "cosine", "schedule.warmup": "2 steps", "optimizer.name": "adamw",
}  # fmt: skip


class Watched(Classify):
    def __init__(self, *callbacks, **args):
        super().__init__(**{"num_val": 10, **args})
        self.given = list(callbacks)

    def callbacks(self):
        return self.given


class Scales(Callback):
    """Asks for other rates at steps, evaluations and epochs."""

    def on_step(self, run):
        if run.step in (2, 3):
            run.scale_learning_rate(0.5)

    def on_evaluation(self, run):
        if run.metrics["val/loss"] > 0:
            run.scale_learning_rate(0.9)

    def on_epoch_start(self, run):
        if run.epoch:
            run.scale_learning_rate(3)


def rates(run):
    return [step.learning_rate for step in run.steps]


def due_factors():
    """Factor in each step: an epoch has 4 of them."""
    after = {2: [0.5], 3: [0.5], 4: [3.0], 5: [0.9], 8: [3.0], 10: [0.9], 12: [3.0]}
    found, factor = [], 1.0
    for step in range(14):
        for one in after.get(step, ()):
            factor *= one
        found.append(factor)
    return found


def test_a_factor_lies_over_the_schedule_from_the_next_step_on():
    plain = train_alone(Watched(), FLAGS)
    scaled = train_alone(Watched(Scales()), FLAGS)
    assert rates(scaled) == [rate * factor for rate, factor in zip(rates(plain), due_factors(), strict=True)]
    assert largest_difference(plain.weights, scaled.weights) > 1e-3


class Scheduled(Watched):
    """The same rates as a schedule of its own."""

    def schedule(self, optimizer, recipe):
        from scaleray.config.recipe.lr_rules import learning_rate_factor

        shape = {"name": "cosine", "warmup_steps": 2, "schedule_steps": 14, "final_ratio": 0.0}
        due = [*due_factors(), 0.0]
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: learning_rate_factor(s, **shape) * due[s])


def test_steps_are_taken_with_the_rates_that_are_recorded():
    scaled, scheduled = train_alone(Watched(Scales()), FLAGS), train_alone(Scheduled(), FLAGS)
    assert rates(scaled) == pytest.approx(rates(scheduled), rel=1e-14)
    assert largest_difference(scaled.weights, scheduled.weights) < 1e-13


@pytest.mark.always("11")
@pytest.mark.parametrize("kill_at", [4, 11, 13])
def test_a_resumed_run_is_bit_identical(tmp_path, kill_at):
    whole = train_alone(Watched(Scales()), FLAGS)
    train_alone(Watched(Scales()), FLAGS, folder=tmp_path, kill_at=kill_at)
    resumed = train_alone(Watched(Scales()), FLAGS, folder=tmp_path)
    assert rates(resumed) == rates(whole)[kill_at // 3 * 3 :]
    assert all(torch.equal(resumed.weights[name], value) for name, value in whole.weights.items())


def scaled(place, flags):
    return train(place, Watched(Scales()), flags)


@pytest.mark.always("ddp")
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_two_workers_train_as_one_does(gloo, strategy):
    flags = {**FLAGS, "deterministic": False, "strategy.name": strategy, "batch.micro_size": 2}
    both = gloo.run(2, scaled, flags)[0]
    alone = train_alone(Watched(Scales()), {**FLAGS, "deterministic": False})
    assert rates(both) == rates(alone)
    assert largest_difference(alone.weights, both.weights) < 1e-11


class OnOne(Callback):
    """Asks on rank 1 alone."""

    def __init__(self, hook):
        setattr(self, hook, lambda run: run.scale_learning_rate(0.5) if run.rank == 1 else None)


def on_one(place, hook):
    return train(place, Watched(OnOne(hook)), FLAGS)


@pytest.mark.parametrize("hook", ["on_step", "on_evaluation"])
def test_a_request_of_some_workers_alone_is_refused(gloo, hook):
    with pytest.raises(WorkloadError, match="was called differently on different workers"):
        gloo.run(2, on_one, hook)


class Asks(Callback):
    def __init__(self, hook, factor):
        setattr(self, hook, lambda run: run.scale_learning_rate(factor))


class Writes(Callback):
    def on_evaluation(self, run):
        run._setup.optimizer.param_groups[0]["lr"] = 0.5


@pytest.mark.parametrize(
    ("callback", "text"),
    [
        (Asks("on_begin", 0.5), r"scale_learning_rate\(\) was called in .*on_begin\(\).*on_evaluation"),
        (Asks("on_step", 0), "factor of scale_learning_rate.*above 0"),
        (Asks("on_step", "half"), "factor of scale_learning_rate.*above 0"),
        (Writes(), r"run\.scale_learning_rate\(factor\)"),
    ],
)
def test_what_cannot_be_is_refused(callback, text):
    with pytest.raises((WorkloadError, StepFailedError), match=f"(?s){text}"):
        train_alone(Watched(callback), FLAGS)
    torch.use_deterministic_algorithms(False)


class Diary(Callback):
    def __init__(self):
        self.calls = []

    def note(self, hook, run):
        self.calls.append((hook, run.step, run.epoch, "val/loss" in run.metrics))


for hook in ("on_epoch_start", "on_epoch_end", "on_evaluation_start", "on_evaluation"):
    setattr(Diary, hook, lambda self, run, hook=hook: self.note(hook.removeprefix("on_"), run))
CALLS = [
    ("epoch_start", 0, 0.0, False), ("evaluation_start", 4, 1.0, False), ("evaluation", 4, 1.0, True),
    ("epoch_end", 4, 1.0, True), ("epoch_start", 4, 1.0, True), ("evaluation_start", 8, 2.0, True),
    ("evaluation", 8, 2.0, True), ("epoch_end", 8, 2.0, True), ("epoch_start", 8, 2.0, True),
    ("evaluation_start", 10, 2.5, True), ("evaluation", 10, 2.5, True),
]  # fmt: skip
EPOCHS = {**FLAGS, "stop.after": "10 steps", "evaluation.every": "1 epoch", "checkpoint.every": "2 steps"}


@pytest.mark.parametrize("micro_size", [8, 2])
def test_hooks_of_epochs_and_evaluations_come_in_order(micro_size):
    diary = Diary()
    train_alone(Watched(diary), {**EPOCHS, "batch.micro_size": micro_size})
    assert diary.calls == CALLS


@pytest.mark.always("4-")
@pytest.mark.parametrize(("kill_at", "first"), [(3, 1), (4, 4), (5, 4), (7, 5)])
def test_after_an_interruption_none_is_called_twice_for_what_a_checkpoint_holds(tmp_path, kill_at, first):
    before, after = Diary(), Diary()
    train_alone(Watched(before), EPOCHS, folder=tmp_path, kill_at=kill_at)
    train_alone(Watched(after), EPOCHS, folder=tmp_path)
    assert after.calls == CALLS[first:]


def test_an_epoch_whose_last_step_ends_the_training_has_an_end():
    diary = Diary()
    train_alone(Watched(diary), {**EPOCHS, "stop.at": "val/loss <= 100"})
    assert diary.calls == CALLS[:4]


class Endless(Watched):
    """Rows without an end."""

    def datasets(self):
        return {"train": Rows()}


class Rows(torch.utils.data.IterableDataset):
    def __iter__(self):
        draw = torch.Generator().manual_seed(0)
        while True:
            x = torch.randn(6, generator=draw)
            yield {"x": x, "y": (x[0] > 0).long()}


def test_rows_without_an_end_are_one_epoch():
    diary = Diary()
    train_alone(Endless(diary), {"stop.after": "5 steps"})
    assert diary.calls == [("epoch_start", 0, 0.0, False)]
