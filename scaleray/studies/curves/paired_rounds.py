"""Measurements ("turns") in the same rounds: separates the effect of a round, common to all, from that of each turn.

A study measures every size once in a round, so a machine that is slow for a while slows all of them. As in a block
design, the mean over the points of each round's deviation is subtracted. The ratio of the remainders of two points is
the median over the rounds of the ratio within a round."""

from collections.abc import Sequence

import numpy as np

from scaleray.records.study_record import Point

LEAST_ROUNDS = 2


def launch_of(round_name: str) -> str:
    """Study that took a measurement, by the name of its round; "" for one of separately launched workers."""
    return round_name.rpartition("/")[0]


def repeats_by_round(points: Sequence[Point]) -> list[list[list[float]]] | None:
    """Each point's measurements in the same order of rounds; None if one has no counterpart at another point."""
    wanted = sorted(points[0].rounds)
    if len(points) < 2 or len(wanted) < LEAST_ROUNDS or len(set(wanted)) < len(wanted) or "" in wanted:
        return None
    found = []
    for point in points:
        if sorted(point.rounds) != wanted or len(point.turns) != len(wanted) or not all(point.turns):
            return None
        found.append(
            [turn for _, turn in sorted(zip(point.rounds, point.turns, strict=True), key=lambda pair: pair[0])]
        )
    return found


def without_drift(turns: Sequence[Sequence[Sequence[float]]]) -> list[list[list[float]]]:
    """Step times divided by their round's effect on the step times of all points. turns: points x rounds x steps, in
    s."""
    medians = np.array([[np.log(np.median(turn)) for turn in of_point] for of_point in turns])
    drift = np.exp((medians - medians.mean(axis=1, keepdims=True)).mean(axis=0))
    return [
        [[step / float(factor) for step in turn] for turn, factor in zip(of_point, drift, strict=True)]
        for of_point in turns
    ]
