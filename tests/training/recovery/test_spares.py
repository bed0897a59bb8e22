"""A training whose workers are lost ends as the one that lost none: equal to the bit, with each step recorded once."""

from __future__ import annotations

import signal

import pytest
from recovering_workers import (
    DECISION,
    EVALUATION,
    FORWARD,
    JOINED,
    KEPT,
    STEPS,
    UPDATED,
    Fault,
    Outcome,
    Plain,
    train_with,
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Outcome:
    found = train_with([], str(tmp_path_factory.mktemp("undisturbed")))
    assert sorted(found.losses) == list(range(1, STEPS + 1))
    assert found.lost == found.resumed == []
    return found


@pytest.mark.parametrize(
    "fault",
    [
        Fault(1, 5, FORWARD),
        Fault(0, 5, FORWARD),
        Fault(0, 6, DECISION),
        Fault(1, 4, UPDATED),
        Fault(0, 4, KEPT),
        Fault(2, 6, EVALUATION),
        Fault(0, 6, EVALUATION),
        Fault(0, STEPS, KEPT),
        Fault(1, 7, FORWARD, signal.SIGSTOP),
    ],
    ids=lambda fault: f"worker {fault.number} {fault.point} of step {fault.step} {fault.signal.name}",
)
def test_a_lost_worker_changes_nothing(fault, undisturbed, tmp_path) -> None:
    found = train_with([fault], str(tmp_path))
    assert found.weights == undisturbed.weights
    assert found.losses == undisturbed.losses
    assert found.metrics == undisturbed.metrics
    assert len(found.lost) == 1
    assert f"worker {fault.number} on 127.0.0.1" in found.lost[0]
    assert len(found.resumed) == 1
    assert "no step is lost" in found.resumed[0]


def test_losses_of_two_workers_at_once_and_in_a_recovery_change_nothing(undisturbed, tmp_path) -> None:
    faults = [Fault(0, 5, FORWARD), Fault(2, 5, FORWARD), Fault(3, 0, JOINED)]
    found = train_with(faults, str(tmp_path), num_spares=3)
    assert (found.weights, found.losses, found.metrics) == (
        undisturbed.weights,
        undisturbed.losses,
        undisturbed.metrics,
    )
    assert len(found.lost) == 3


def test_when_all_are_lost_the_spares_continue_from_the_checkpoint(undisturbed, tmp_path) -> None:
    found = train_with([Fault(number, 9, FORWARD) for number in range(3)], str(tmp_path), num_spares=3)
    assert found.weights == undisturbed.weights
    assert {step: undisturbed.losses[step] for step in found.losses} == found.losses  # the others' records are lost
    assert "were lost; other workers took over" in found.resumed[0] and "resumed after step " in found.resumed[0]


SHRINKING = {"recovery.on_loss": "shrink"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Outcome:
    return train_with([], str(tmp_path_factory.mktemp("plain")), num_spares=0, workload=Plain)


@pytest.mark.parametrize("fault", [Fault(1, 5, FORWARD), Fault(0, 5, UPDATED), Fault(2, 6, DECISION)])
def test_without_a_spare_the_others_continue_with_the_same_samples(fault, plain, tmp_path) -> None:
    found = train_with([fault], str(tmp_path), num_spares=0, flags=SHRINKING, workload=Plain)
    assert [text.partition("; ")[2].partition(" after")[0] for text in found.resumed] == ["2 workers continue"]
    assert sorted(found.losses) == sorted(plain.losses)
    for step, losses in plain.losses.items():
        assert list(found.losses[step]) == pytest.approx(list(losses), rel=1e-5)


def test_a_smaller_group_takes_in_a_worker_that_comes(plain, tmp_path) -> None:
    more = {"workload": Plain, "is_late": True, "num_spares": 1}
    found = train_with([Fault(2, 3, FORWARD)], str(tmp_path), flags=SHRINKING, **more)
    assert "was lost; 2 workers continue" in found.resumed[0]
    assert "a worker joined; 3 workers continue" in found.resumed[1]
    assert sorted(found.losses) == sorted(plain.losses)
    for step, losses in plain.losses.items():
        assert list(found.losses[step]) == pytest.approx(list(losses), rel=1e-5)
