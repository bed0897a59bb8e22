"""Workers with a part of the state each: a spare gets the part of a lost one from its copies in memory."""

from __future__ import annotations

import pytest
from recovering_workers import ANY, EVALUATION, FORWARD, JOINED, KEPT, STEPS, UPDATED, Fault, Outcome, train_with

COPIES = {"checkpoint.memory.every": "1 step", "checkpoint.every": "40 steps"}


def flags_of(strategy: str) -> dict[str, object]:
    return {**COPIES, "strategy.name": strategy}


@pytest.fixture(scope="module", params=["fsdp", "zero1"])
def undisturbed(request, tmp_path_factory) -> tuple[str, Outcome]:
    folder = str(tmp_path_factory.mktemp("undisturbed"))
    found = train_with([], folder, flags=flags_of(request.param), num_holders=2)
    assert sorted(found.losses) == list(range(1, STEPS + 1))
    assert found.lost == found.resumed == []
    return request.param, found


@pytest.mark.parametrize(
    "faults",
    [
        [Fault(1, 5, FORWARD)],
        [Fault(0, 5, FORWARD)],
        [Fault(0, 4, UPDATED)],
        [Fault(2, 6, EVALUATION)],
        [Fault(0, STEPS, KEPT)],
        [Fault(0, 5, FORWARD), Fault(2, 5, FORWARD), Fault(3, ANY, JOINED)],
    ],
    ids=lambda faults: ", ".join(f"worker {f.number} {f.point} of step {f.step}" for f in faults),
)
def test_a_lost_part_comes_from_its_copies(faults, undisturbed, tmp_path) -> None:
    strategy, expected = undisturbed
    found = train_with(faults, str(tmp_path), flags=flags_of(strategy), num_spares=len(faults), num_holders=2)
    assert found.weights == expected.weights
    assert found.losses == expected.losses
    assert found.metrics == expected.metrics
    assert len(found.lost) == len(faults)
    assert all("other workers took over" in text for text in found.resumed)


def test_a_loss_before_the_first_copies_begins_the_training_again(undisturbed, tmp_path) -> None:
    strategy, expected = undisturbed
    found = train_with([Fault(1, 1, FORWARD)], str(tmp_path), flags=flags_of(strategy), num_holders=2)
    assert (found.weights, found.losses) == (expected.weights, expected.losses)
    assert any(
        "no state was complete yet, so the training starts from the beginning" in text for text in found.warnings
    )
