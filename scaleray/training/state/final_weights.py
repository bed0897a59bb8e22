"""The last thing that a training does: each rank lets its set-up go and hands on what it has of the final weights."""

from __future__ import annotations

from collections.abc import Callable

from scaleray.checkpoints.model_layout import FINAL_WEIGHTS, TRAINED_WEIGHTS
from scaleray.config import RunConfig
from scaleray.strategies.contract.weight_shares import WeightShare
from scaleray.training.health.reporter import Reporter
from scaleray.training.setup.fine_tuning import merged_share
from scaleray.training.setup.model_setup import Setup

SaveWeights = Callable[[WeightShare, str], None]
"""Function that takes what this rank has of weights of a name: FINAL_WEIGHTS, or TRAINED_WEIGHTS beside an average."""


def hand_on_weights(
    setup: Setup, save: SaveWeights | None, config: RunConfig, *, reporter: Reporter, step: int
) -> None:
    """Let the set-up go, and give what this rank has of the final weights to `save`, adapters merged: where there is an
    average, that, and the trained weights beside it. Collective up to there: a disk that is slow costs the rank that
    has it, and nobody's time limit. step: number of the last one."""
    save = save if config.checkpoint.save_final else None
    shares: dict[str, WeightShare] = {}
    if setup.averaging.is_on:
        if save is not None and setup.averaging.keeps_trained:
            shares[TRAINED_WEIGHTS] = setup.parallel.weights()
        setup.averaging.swap()
        kept = "the trained ones lie next to them" if setup.averaging.keeps_trained else "the optimizer computes it"
        reporter.say(f"the final weights are the average that was evaluated; {kept}")
    if save is not None:
        shares[FINAL_WEIGHTS] = setup.parallel.weights()
    # nothing below this line communicates
    setup.let_go()
    if save is None:
        return
    if left_out := shares[FINAL_WEIGHTS].left_out:
        names = ", ".join(left_out[:5])
        text = f"the final weights are tensors alone: {names} of the model's extra state are in checkpoints only"
        reporter.say(text, is_warning=True, step=step)
    for name, share in shares.items():
        save(merged_share(share, config.fine_tuning), name)
