"""The phases of a training step, under the names that heartbeats, errors and profiles use."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """What a worker is doing."""

    START = "start"
    """Setting up, up to the first step."""
    MODEL = "model"
    """Building the model and spreading it over the workers."""
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

EVALUATING = "evaluating"
IN_WORDS = {
    Phase.START: "preparing the first step",
    Phase.MODEL: "building the model",
    Phase.INPUT: "waiting for input",
    Phase.COMPILING: "compiling the model",
    Phase.EVALUATION: EVALUATING,
    Phase.CHECKPOINT: "saving a checkpoint",
    Phase.END: "saving the final weights",
}
"""What a worker does in a phase that may take long, as a user reads it; in any other it takes a step."""


def in_words(phase: str, step: int) -> str:
    """What a worker that has completed `step` steps is doing."""
    if phase == Phase.INPUT and step == 0:
        return "reading the first batch"
    return IN_WORDS.get(Phase(phase), f"step {step + 1}") if phase in set(Phase) else phase
