"""What the memory report counts, on one worker and on several."""

import pytest
import torch
from block_runs import Blocks, BlocksWithBatchNorm
from small_runs import train, train_alone

from scaleray.training.health.live_memory import LiveTensors, is_out_of_memory, storage_bytes

ADAMW = {"optimizer.name": "adamw", "optimizer.learning_rate": 0.01, "batch.drop_last": True}
NUM_PARAMETERS = 4 * (6 * 32 + 32 + 32 * 6 + 6) + 6 * 3 + 3
FLOAT64 = 8


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_worker_reports_its_memory_by_category(gloo, world_size):
    for finished in gloo.run(world_size, train, BlocksWithBatchNorm(), ADAMW):
        memory = finished.summary.memory
        norms = 4 * 2 * 6  # weights and biases of four BatchNorms, whose statistics are buffers with a counter each
        assert memory["parameters_bytes"] == (NUM_PARAMETERS + norms) * FLOAT64
        assert memory["gradients_bytes"] == memory["parameters_bytes"]
        assert (
            2 * memory["parameters_bytes"] <= memory["optimizer_bytes"] <= 2.1 * memory["parameters_bytes"]
        )  # and steps
        assert memory["buffers_bytes"] == 4 * (2 * 6 * FLOAT64 + 8)
        kept = sum(memory[f"{name}_bytes"] for name in ("parameters", "gradients", "optimizer", "buffers"))
        assert memory["allocated_bytes"] == kept
        assert memory["peak_bytes"] == kept + memory["activations_bytes"]
        assert 2**20 < memory["reserved_bytes"] <= memory["peak_resident_bytes"] < 2**40
        assert memory["is_counted"] and memory["fragmentation_share"] is None


def activations(flags=None, *, num_rows=64):
    recipe = {**ADAMW, "batch.global_size": num_rows, "stop.after": "2 steps"}
    return train_alone(Blocks(num_rows=num_rows), {**recipe, **(flags or {})}).summary.memory["activations_bytes"]


def test_activations_grow_with_the_micro_batch_and_shrink_with_checkpointing():
    whole, accumulated = activations(), activations({"batch.micro_size": 16})
    checkpointed = activations({"activations.checkpointing": "full"})
    twice = activations(num_rows=128)
    kept = 64 * 4 * (2 * 32 + 2 * 6) * FLOAT64  # rows, blocks, values: what the backward pass needs at least, and more
    assert 0.5 * kept < whole < 2 * kept
    assert accumulated < 0.5 * whole and checkpointed < 0.7 * whole
    # what is left of the peak without all gradients, of which at the peak not all are there: a constant is missing
    assert 1.8 * whole < twice < 2.2 * whole


@pytest.mark.combination
def test_the_memory_of_compiled_code_is_not_guessed():
    memory = train_alone(Blocks(), {"compilation.what": "blocks", "compilation.backend": "eager"}).summary.memory
    assert memory["activations_bytes"] is None and memory["peak_bytes"] is None
    assert memory["parameters_bytes"] == NUM_PARAMETERS * FLOAT64


def test_a_run_of_one_step_has_no_report():
    assert train_alone(Blocks(), {"stop.after": "1 steps"}).summary.memory == {}


def test_live_tensors_are_counted_once_and_until_they_die():
    before = torch.zeros(100)
    with LiveTensors() as live:
        before.add_(1)
        view = before.view(10, 10)
        assert live.bytes == 0
        made = torch.ones(10, dtype=torch.float64)
        again = made[2:]
        assert live.bytes == live.peak == 80 and live.knows(again) and not live.knows(view)
        more = made + 1
        del made
        assert live.bytes == 160  # `again` still needs it
        del again
        assert live.bytes == 80 and live.peak == 160
        del more
    assert live.bytes == 0


def test_shared_memory_counts_once():
    table = torch.zeros(10, 10)
    assert storage_bytes([table, table.T, table[0]]) == 400
    assert storage_bytes([table, torch.zeros(5)]) == 420


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            True,
        ),
        (RuntimeError("shape '[2]' is invalid"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_memory_errors_are_told_from_others(error, is_one):
    assert is_out_of_memory(error) is is_one


def test_torch_says_that_memory_ran_out_as_we_expect():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.int8)
    assert is_out_of_memory(caught.value)
