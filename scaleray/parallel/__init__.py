"""Parts of a model or a loss that depend on the degrees in `parallel`: experts, and a worker's tokens of a sequence."""

from scaleray.parallel.context import part, positions
from scaleray.parallel.experts import MixtureOfExperts, balance_loss, expert_metrics
from scaleray.parallel.tensor_styles import MixtureParallel, Replicated

__all__ = ["MixtureOfExperts", "MixtureParallel", "Replicated", "balance_loss", "expert_metrics", "part", "positions"]
