"""Steps of several ranks whose faults are known, for tests of verdicts."""

from __future__ import annotations

import dataclasses

import numpy as np

from scaleray.profiling.verdict.signals import Facts, Signals
from scaleray.records.phases import Phase
from scaleray.records.profile_record import RankMeasurements
from scaleray.training.profile.phase_times import StepRows

USUAL = {
    Phase.INPUT: 0.0002,
    Phase.COPY: 0.0001,
    Phase.FORWARD: 0.006,
    Phase.BACKWARD: 0.011,
    Phase.OPTIMIZER: 0.001,
    Phase.HOST: 0.0004,
}
LINK_S = 0.0003
STEP_S = sum(USUAL.values()) + LINK_S


def made_up(seed=0, *, ranks=2, steps=40, link_s=LINK_S, more=(), **signals):
    """Steps of ranks with noise. more: (phase, rank or None for all, seconds a step, every how manyth step)."""
    draw = np.random.default_rng(seed)
    parts = {phase: s * (1 + 0.03 * draw.standard_normal((ranks, steps))) for phase, s in USUAL.items()}
    for phase, rank, seconds, every in more:
        late = np.zeros(steps)
        late[::every] = seconds * every
        parts.setdefault(phase, np.zeros((ranks, steps)))
        parts[phase][slice(None) if rank is None else rank] += late
    own = np.sum(list(parts.values()), axis=0)
    link = link_s * (1 + 0.1 * draw.standard_normal(steps))
    return Signals(parts, own.max(axis=0) - own + link, **signals)


def facts(**changes):
    return dataclasses.replace(Facts(2, "ddp", 1, 64), **changes)


def measured(rank, *, num_steps, **changed):
    """What a rank has measured of steps that are all alike. changed: seconds of phases by name."""
    usual = {Phase.INPUT: 0.0001, Phase.FORWARD: 0.005, Phase.BACKWARD: 0.01, Phase.COMMUNICATION: 0.0002}
    parts = {**usual, **{Phase(name): seconds for name, seconds in changed.items()}}
    table = StepRows(("step", *parts))
    table.add(np.array([[sum(parts.values()), *parts.values()]] * num_steps))
    return RankMeasurements(
        rank, "here", "cpu", 2, num_steps, table.columns, 1, table.rows, table.totals, table.series, 1, 0.0, 0.0
    )
