"""The last thing that a training does: each rank lets its set-up go and hands on what it has of the final weights."""

from __future__ import annotations

from collections.abc import Callable

from scaleray.config import RunConfig
from scaleray.strategies.contract.weight_shares import WeightShare
from scaleray.training.health.reporter import Reporter
from scaleray.training.setup.fine_tuning import merged_share
from scaleray.training.setup.model_setup import Setup


def hand_on_weights(
    setup: Setup, save: Callable[[WeightShare], None] | None, config: RunConfig, *, reporter: Reporter, step: int
) -> None:
    """Let the set-up go, and give what this rank has of the final weights to `save`: adapters merged, and of the
    average where there is one. Collective up to there: a disk that is slow costs the rank that has it, and nobody's
    time limit. step: number of the last one."""
    if setup.averaging.is_on:
        setup.averaging.swap()
        reporter.say("the final weights are the average that was evaluated; checkpoints have the trained ones as well")
    save = save if config.checkpoint.save_final else None
    share = setup.parallel.weights() if save is not None else WeightShare()
    # nothing below this line communicates
    setup.let_go()
    if share.left_out:
        names = ", ".join(share.left_out[:5])
        text = f"the final weights are tensors alone: {names} of the model's extra state are in checkpoints only"
        reporter.say(text, is_warning=True, step=step)
    if save is not None:
        save(merged_share(share, config.fine_tuning))
