"""Transforms of the step combine: accumulation x precision x activation checkpointing x compilation x clipping.

Every pair of values occurs in some row, for one worker and for two under DDP. The oracle is plain torch in one process.
"""

import pytest
import torch
from block_runs import TinyTransformer
from small_runs import make_job, plain_optimizer, relative_differences, same_generators, train, train_alone
from torch import nn

from scaleray.common.seeding import seed_everything, stream_seed
from scaleray.training.setup.precision import AUTOCAST_DTYPES

# (micro-batch, precision, checkpointing, compiled, clip_norm)
ROWS = [
    (8, "fp64", "none", "blocks", None),
    (2, "fp64", "full", "model", 0.3),
    (2, "fp64", "selective", "nothing", None),
    (2, "fp32", "none", "model", None),
    (8, "fp32", "full", "nothing", 0.3),
    (8, "fp32", "selective", "blocks", 0.3),
    (2, "bf16", "none", "nothing", 0.3),
    (8, "bf16", "full", "blocks", None),
    (8, "bf16", "selective", "model", None),
    (2, "fp16", "full", "blocks", None),
    (8, "fp16", "none", "nothing", None),
    (2, "fp16", "selective", "model", 0.3),
]
ALWAYS = (ROWS[0], ROWS[4], ROWS[6], ROWS[11])  # show each value once
# what the order of sums may change after three steps; in half precision each micro-batch rounds by itself
BOUND = {"fp64": 1e-9, "fp32": 1e-5, "bf16": 1e-2, "fp16": 2e-3}


def recipe(row):
    micro, precision, checkpointing, compiled, clip = row
    return {
        "batch.global_size": 16,
        "batch.micro_size": micro,
        "batch.drop_last": True,
        "stop.after": "3 steps",
        "optimizer.name": "adamw",
        "optimizer.learning_rate": 0.01,
        "optimizer.clip_norm": clip,
        "precision.dtype": precision,
        "precision.initial_loss_scale": 256,  # both sides keep every step: they scale by other counts before the first sum
        "activations.checkpointing": checkpointing,
        "compilation.what": compiled,
        "compilation.backend": "eager",
    }


def plain(flags):
    """Losses and weights of a loop that knows nothing but torch: one whole batch a step."""
    job, sources = make_job(TinyTransformer(num_rows=32), flags)
    config, dtype = job.config, job.config.precision.dtype
    losses = []
    with same_generators():
        seed_everything(stream_seed(config.seed, "model"))
        model = job.workload.build_model()
        model = model.double() if dtype == "fp64" else model
        optimizer = plain_optimizer(config, list(model.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=config.precision.initial_loss_scale, enabled=dtype == "fp16")
        for step in range(3):
            rows = sources["train"].read(job.train_plan().global_indices(step))
            batch = {name: torch.from_numpy(values) for name, values in rows.items()}
            optimizer.zero_grad()
            with torch.autocast("cpu", AUTOCAST_DTYPES.get(dtype), enabled=dtype in AUTOCAST_DTYPES):
                total, count = job.workload.loss(model, batch)
            loss = total / count
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm or float("inf"))
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    return losses, model.state_dict()


def differences(finished, losses, weights):
    """Largest relative difference of a loss, and of the weights' distance to their own norm."""
    assert finished.weights.keys() == weights.keys()
    apart = sum((finished.weights[n].double() - weights[n].double()).square().sum() for n in weights)
    size = sum(weights[n].double().square().sum() for n in weights)
    return max(relative_differences(losses, finished.losses)), (apart / size).sqrt().item()


def check(row, finished, oracle):
    loss, weights = differences(finished, *oracle)
    assert loss <= BOUND[row[1]]
    # AdamW's first steps are signs, which rounding turns where a gradient is nearly zero
    assert weights <= (BOUND[row[1]] if row[1] == "fp64" else 0.05)
    assert finished.summary.compilation.get("is_compiled", False) == (row[3] != "nothing")
    assert finished.summary.compilation.get("graph_breaks", []) == []


@pytest.mark.combination
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[] if row in ALWAYS else pytest.mark.combination) for row in ROWS],
    ids=lambda row: " ".join(map(str, row)),
)
def test_transforms_combine_on_one_worker_and_on_two(gloo, row):
    flags = recipe(row)
    oracle = plain(flags)
    check(row, train_alone(TinyTransformer(num_rows=32), flags), oracle)
    for finished in gloo.run(2, train, TinyTransformer(num_rows=32), flags)[:1]:
        check(row, finished, oracle)


def test_every_pair_of_values_occurs():
    columns = list(zip(*ROWS, strict=True))
    assert [set(column) for column in zip(*ALWAYS, strict=True)] == [set(column) for column in columns]
    for i, first in enumerate(columns):
        for second in columns[i + 1 :]:
            pairs = set(zip(first, second, strict=True))
            assert pairs == {(a, b) for a in set(first) for b in set(second)}
