"""State carried from batch to batch: that of one loop over the lanes, on any number of workers, through resumes."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_runs import largest_difference, make_job, same_generators, train, train_alone
from torch import nn
from verified import judge

from scaleray import CarriedState, TokenSource, Workload
from scaleray.common.seeding import seed_everything, stream_seed
from scaleray.data import Split
from scaleray.errors import DataError, WorkloadError
from scaleray.verification.runs.compared_job import first_rows

LANES, LENGTH, VOCABULARY = 8, 5, 7
TRAINED, HELD_OUT = (
    np.random.default_rng(n).integers(0, VOCABULARY, size).astype(np.uint8) for n, size in ((0, 330), (1, 130))
)
FLAGS = {
    "stop.after": "20 steps", "evaluation.every": "3 steps", "evaluation.micro_size": 4, "checkpoint.every": "4 steps",
    "data.shuffle": False, "batch.global_size": LANES, "deterministic": True,
}  # fmt: skip


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lstm, self.head = (
            nn.Embedding(VOCABULARY, 4),
            nn.LSTM(4, 6, batch_first=True),
            nn.Linear(6, VOCABULARY),
        )

    def forward(self, tokens, state):
        hidden, (h, c) = self.lstm(
            self.embedding(tokens), tuple(s.transpose(0, 1).contiguous() for s in (state["h"], state["c"]))
        )
        return self.head(hidden), {"h": h.transpose(0, 1), "c": c.transpose(0, 1)}


def initial(model, rows):
    like = model.head.weight if hasattr(model, "head") else next(model.parameters())
    return {name: torch.zeros(rows, 1, 6, dtype=like.dtype, device=like.device) for name in ("h", "c")}


class Bytes(Workload):
    def __init__(self, lanes=LANES):
        self.given, self.carried = lanes, CarriedState(initial, lanes=lanes)

    def build_model(self):
        return Net()

    def datasets(self):
        return {
            name: TokenSource(tokens, sequence_length=LENGTH, lanes=self.given)
            for name, tokens in (("train", TRAINED), ("val", HELD_OUT))
        }

    def callbacks(self):
        return [self.carried]

    def loss(self, model, batch):
        tokens, state = batch["tokens"].long(), self.carried.of(model, batch)
        logits, after = model(tokens[:, :-1], state)
        self.carried.keep(model, batch, state, after)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"), tokens[:, 1:].numel()


def by_hand():
    """Losses of steps and evaluations, and weights, of a plain loop with truncated backpropagation."""
    job, _ = make_job(Bytes(), FLAGS)
    with same_generators():
        seed_everything(stream_seed(job.config.seed, "model"))
        model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def lanes_of(tokens):
        rows = (len(tokens) - 1) // LENGTH // LANES
        starts = np.arange(LANES) * rows * LENGTH
        return rows, lambda t: torch.from_numpy(
            np.stack([tokens[s + t * LENGTH :][: LENGTH + 1] for s in starts])
        ).long()

    def loss_of(rows, state):
        logits, state = model(rows[:, :-1], {name: value.detach() for name, value in state.items()})
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()), state

    (per_epoch, train_rows), (num_val, val_rows) = lanes_of(TRAINED), lanes_of(HELD_OUT)
    losses, evaluations = [], []
    for step in range(20):
        if step % per_epoch == 0:
            state = initial(model, LANES)
        loss, state = loss_of(train_rows(step % per_epoch), state)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 3 == 0 or step == 19:
            found, held = [], initial(model, LANES)
            with torch.no_grad():
                for t in range(num_val):
                    loss, held = loss_of(val_rows(t), held)
                    found.append(loss.item())
            evaluations.append(np.mean(found))
    return losses, evaluations, dict(model.named_parameters())


def assert_as_by_hand(finished):
    losses, evaluations, weights = by_hand()
    assert finished.losses == pytest.approx(losses, rel=1e-12)
    assert [e.metrics["val/loss"] for e in finished.evaluations] == pytest.approx(evaluations, rel=1e-12)
    assert largest_difference(finished.weights, weights) < 1e-12


@pytest.mark.parametrize("micro_size", [8, 2])
def test_steps_and_evaluations_are_those_of_a_loop_by_hand(micro_size):
    assert_as_by_hand(train_alone(Bytes(), {**FLAGS, "batch.micro_size": micro_size}))


def trained(place, flags, folder=None, kill_at=None):
    return train(place, Bytes(), {**FLAGS, **flags}, folder=folder, kill_at=kill_at)


@pytest.mark.always("ddp-2")
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_workers_with_lanes_of_their_own_train_as_one_does(gloo, strategy, world_size):
    flags = {"strategy.name": strategy, "evaluation.micro_size": LANES // world_size, "deterministic": False}
    assert_as_by_hand(gloo.run(world_size, trained, flags)[0])


@pytest.mark.always("6")
@pytest.mark.parametrize("kill_at", [6, 13, 18])
def test_a_resumed_run_is_bit_identical(tmp_path, kill_at):
    whole = train_alone(Bytes(), FLAGS)
    train_alone(Bytes(), FLAGS, folder=tmp_path, kill_at=kill_at)
    resumed = train_alone(Bytes(), FLAGS, folder=tmp_path)
    assert resumed.losses == whole.losses[kill_at // 4 * 4 :]
    assert all(torch.equal(resumed.weights[name], value) for name, value in whole.weights.items())


@pytest.mark.always("2-1")
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
def test_a_run_resumes_on_another_number_of_workers(gloo, tmp_path, before, after):
    whole = train_alone(Bytes(), FLAGS)
    flags = {"evaluation.micro_size": 2}
    gloo.run(before, trained, flags, str(tmp_path), 6)
    resumed = gloo.run(after, trained, flags, str(tmp_path))[0]
    assert resumed.losses == pytest.approx(whole.losses[4:], rel=1e-12)
    assert largest_difference(resumed.weights, whole.weights) < 1e-12


REFUSAL = r"not the next rows of their lanes.*\n.*data\.shuffle false"


@pytest.mark.parametrize("flags", [{"data.shuffle": True}, {"batch.global_size": 16}])
def test_rows_that_do_not_follow_in_their_lanes_are_refused(flags):
    with pytest.raises(WorkloadError, match=REFUSAL):
        train_alone(Bytes(), {**FLAGS, **flags})
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("flags", [{"batch.global_size": 6}, {"evaluation.micro_size": 3}])
def test_lanes_that_would_go_from_worker_to_worker_are_refused(gloo, flags):
    with pytest.raises(WorkloadError, match=REFUSAL):
        gloo.run(2, trained, flags)


def test_more_lanes_than_rows_are_refused():
    with pytest.raises(DataError, match=r"lanes of TokenSource is 80.*there are 65 rows"):
        TokenSource(TRAINED, sequence_length=LENGTH, lanes=80)


@pytest.mark.combination
def test_verify_finds_the_same_training(gloo):
    outcome = gloo.run(2, partial(judge, resumes=True), Bytes(), {"data.shuffle": False})[0]
    assert outcome.verdict == "equal", outcome


def test_verify_cuts_an_epoch_between_two_rows_of_all_lanes():
    split = Split.of("train", Bytes().datasets()["train"])
    assert [first_rows(split, rows).num_rows for rows in (3, 8, 29, 1000)] == [8, 8, 24, 64]
