"""End of a training: each rank releases its set-up and saves its part of the final weights."""

from collections.abc import Callable

from scaleray.checkpoints.model_layout import FINAL_WEIGHTS, TRAINED_WEIGHTS
from scaleray.config import RunConfig
from scaleray.strategies.contract.weight_shares import WeightShare
from scaleray.training.health.reporter import Reporter
from scaleray.training.setup.fine_tuning import merged_share
from scaleray.training.setup.model_setup import Setup

SaveWeights = Callable[[WeightShare, str], None]
"""Function that takes this rank's share of the weights and their name: FINAL_WEIGHTS, or TRAINED_WEIGHTS if there is an
average as well."""


def hand_on_weights(
    setup: Setup, save: SaveWeights | None, config: RunConfig, *, reporter: Reporter, step: int
) -> None:
    """Release the set-up and pass this rank's share of the final weights to `save`, with adapters merged. If there is
    an average, it is the final weights, and the trained weights are saved as well. Collective until then; afterwards a
    slow disk delays only its own rank, within the time limits of the others. step: number of the last step."""
    save = save if config.checkpoint.save_final else None
    shares: dict[str, WeightShare] = {}
    if setup.averaging.is_on:
        if save is not None and setup.averaging.keeps_trained:
            shares[TRAINED_WEIGHTS] = setup.parallel.weights()
        setup.averaging.swap()
        kept = "the trained weights are stored too" if setup.averaging.keeps_trained else "the optimizer computes it"
        reporter.say(f"the final weights are the average that was evaluated; {kept}")
    if save is not None:
        shares[FINAL_WEIGHTS] = setup.parallel.weights()
    # nothing below this line communicates
    setup.let_go()
    if save is None:
        return
    if left_out := shares[FINAL_WEIGHTS].left_out:
        names = ", ".join(left_out[:5])
        text = f"the final weights contain only tensors: {names} of the model's extra state are only in checkpoints"
        reporter.say(text, is_warning=True, step=step)
    for name, share in shares.items():
        save(merged_share(share, config.fine_tuning), name)
