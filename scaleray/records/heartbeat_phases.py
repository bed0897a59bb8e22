"""The phases of a training step, under the names that heartbeats, errors and profiles use."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """What a worker is doing."""

    START = "start"
    """Setting up, up to the first step."""
    INPUT = "input"
    """Waiting for its rows."""
    COMPILING = "compiling"
    """Inside torch.compile's compiler."""
    LOSS = "loss"
    """A forward pass."""
    SYNCHRONISE = "synchronise"
    """A backward pass or a collective: it may wait for others."""
    UPDATE = "update"
    """Clipping and the optimizer."""
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    END = "end"
    """After its last step."""


OWN_BUSINESS = (Phase.INPUT, Phase.COMPILING)
"""Phases in which a worker waits for no other one."""
TIMED = (Phase.LOSS, Phase.UPDATE, Phase.EVALUATION)
"""Phases that nothing else limits: input and collectives have time limits of their own."""
