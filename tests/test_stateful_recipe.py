"""The stateful LSTM of jobs/recipes: as good as a plain loop over its lanes, on one worker and on two."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_runs import same_generators, train, train_alone

from scaleray.common.seeding import seed_everything, stream_seed
from scaleray.config import load_config
from scaleray.workload import load_workload

RECIPES = Path(__file__).parent.parent / "jobs" / "recipes"


def by_hand(seed, steps):
    """Bits a byte of jobs/recipes/lstm.py after so many steps of a plain loop."""
    workload, flags = lstm(seed, steps)
    with same_generators():
        seed_everything(stream_seed(seed, "model"))
        model = workload.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=flags["optimizer.learning_rate"], weight_decay=0.0)
    lanes = {name: lanes_of(source._tokens(), workload.lanes, 64) for name, source in workload.datasets().items()}

    def loss_of(rows, state):
        logits, *state = model(rows[:, :-1], *(part.detach() for part in state))
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()), state

    for step in range(steps):
        if step % len(lanes["train"]) == 0:
            state = torch.zeros(2, 1, workload.lanes, workload.width).unbind()
        loss, state = loss_of(lanes["train"][step % len(lanes["train"])], state)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    state, losses = torch.zeros(2, 1, workload.lanes, workload.width).unbind(), []
    with torch.no_grad():
        for rows in lanes["val"]:
            loss, state = loss_of(rows, state)
            losses.append(loss.item())
    return sum(losses) / len(losses) / math.log(2)


def lanes_of(tokens, lanes, length):
    """Batches of contiguous parts of a text, each part a row."""
    count = (len(tokens) - 1) // length // lanes
    starts = [lane * count * length for lane in range(lanes)]
    return [
        torch.from_numpy(np.stack([tokens[at + t * length :][: length + 1] for at in starts])).long()
        for t in range(count)
    ]


def lstm(seed, steps):
    config = load_config(RECIPES / "lstm.yaml", environ={})
    flags = {
        "batch.global_size": config.batch.global_size, "data.shuffle": config.data.shuffle, "optimizer.name": "adamw",
        "optimizer.learning_rate": config.optimizer.learning_rate, "optimizer.clip_norm": config.optimizer.clip_norm,
        "evaluation.micro_size": config.evaluation.micro_size, "stop.after": f"{steps} steps",
        "precision.dtype": "fp32", "seed": seed,
    }  # fmt: skip
    return load_workload(f"{RECIPES / 'lstm.py'}:Bytes", {}), flags


def two_workers(place, seed, steps):
    return train(place, *lstm(seed, steps))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_stateful_lstm_is_as_good_as_a_loop_by_hand(gloo, seed):
    due = by_hand(seed, 239)
    both = train_alone(*lstm(seed, 239)), gloo.run(2, two_workers, seed, 239)[0]
    ours = [finished.evaluations[-1].metrics["val/bits_per_byte"] for finished in both]
    print(seed, ours, due, flush=True)
    assert ours == pytest.approx([due, due], abs=0.02)
    assert due < 4
