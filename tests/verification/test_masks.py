"""Which dropout masks workers may draw."""

import dataclasses

import pytest
from test_compare_traces import step, trace

from scaleray.config.parallel import Degrees
from scaleray.verification.repeatable.dropout_masks import masks_broken


def drawing(*by_step, num_pieces=1):
    """A trace of steps with these draws: by step, by rank, states of one layer, as text."""
    steps = []
    for number, ranks in enumerate(by_step, start=1):
        draws = tuple(tuple(("drop", state.encode()) for state in states) for states in ranks)
        steps.append(dataclasses.replace(step(number), draws=draws, num_pieces=(num_pieces,) * len(draws)))
    return trace(steps=tuple(steps))


def degrees(replica_size):
    """Of two replicas, of so many neighbouring workers each."""
    return Degrees(replicate=2, tensor=replica_size)


@pytest.mark.parametrize(
    ("run", "replica_size"),
    [
        (drawing((["a"], ["b"]), (["c"], ["d"])), 1),
        (drawing((["a"], ["a"], ["b"], ["b"])), 2),
        (drawing((["a", "b"], ["c", "d"]), num_pieces=2), 1),
        (drawing((["a", "a"], ["b", "b"])), 1),  # computed again in the backward pass
        (drawing((["a"], [])), 2),  # a stage without that layer
        (trace(), 1),
    ],
)
def test_masks_that_are_as_they_should_be_are_no_mismatch(run, replica_size):
    assert masks_broken(run, degrees(replica_size)) is None


@pytest.mark.parametrize(
    ("run", "replica_size", "at", "words"),
    [
        (drawing((["a"], ["b"]), (["c"], ["c"])), 1, 2, "the same units on each"),
        (drawing((["a"], ["b"])), 2, 1, "share a replica"),
        (drawing((["a"], ["a"], ["a"], ["a"])), 2, 1, "replicas of ranks 0 and 2"),
        (drawing((["a"], ["b"]), (["c"], ["b"])), 1, 2, "rank 1 draws the dropout masks of step 1 again"),
        (drawing((["a", "a"], ["b", "c"]), num_pieces=2), 1, 1, "2 micro-batches of rank 0 have 1"),
    ],
)
def test_masks_that_are_equal_or_differ_by_mistake_are_found(run, replica_size, at, words):
    divergence, finding = masks_broken(run, degrees(replica_size))
    assert (divergence.step, finding.cause) == (at, "dropout or random numbers")
    assert words in finding.why


def test_generators_of_another_run_may_draw_again_what_was_drawn_before_them_and_nothing_else():
    again = drawing((["a"],), (["b"],), (["a"],), (["b"],))
    assert masks_broken(again, Degrees(), generators_of_others_after=2) is None
    divergence, _ = masks_broken(again, Degrees(), generators_of_others_after=1)
    assert divergence.step == 4
