"""Rules for the learning rate when the batch grows by kappa = B / B_ref.

No rule can repair a badly tuned learning rate at B_ref, and every rule has a limit: linear at the critical batch size,
Adam's full rule at kappa = 1 / (1 - beta_1).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from scaleray.errors import ConfigError


def learning_rate_factor(step: int, *, name: str, warmup_steps: int, schedule_steps: int, final_ratio: float) -> float:
    """Factor for the step with index `step` (from 0): linear warm-up, then constant, cosine or linear decay.

    The first step's factor is 1 / warmup_steps, and step `warmup_steps - 1` has the full rate. The decay would reach
    `final_ratio` at step `schedule_steps`, so the last step of training still has a larger rate.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if name in ("constant", "plateau"):  # the evaluations of a plateau are unknown here
        return 1.0
    decay_steps = max(1, schedule_steps - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / decay_steps)
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if name == "cosine" else 1 - progress
    return final_ratio + (1 - final_ratio) * shape


@dataclass(frozen=True)
class Hyperparameters:
    """Values that a rule may change. `warmup_factor` multiplies the length of the warm-up."""

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    warmup_factor: float = 1.0


MOVED_BY_RULES = ("learning_rate", "betas", "epsilon")
"""Settings of the optimizer that a rule may change."""


def none_rule(reference: Hyperparameters, kappa: float) -> Hyperparameters:
    """Keep all values tuned at the reference batch."""
    return reference


def linear_rule(reference: Hyperparameters, kappa: float) -> Hyperparameters:
    """Linear rule: lr * kappa, for SGD with momentum below the critical batch size, with warm-up.

    Source: Goyal et al. 2017, arXiv:1706.02677.
    """
    return Hyperparameters(reference.learning_rate * kappa, reference.betas, reference.epsilon)


def sqrt_rule(reference: Hyperparameters, kappa: float) -> Hyperparameters:
    """Square-root rule: lr * sqrt(kappa), which keeps the noise level of Adam-like optimizers. Betas are unchanged; see
    `adam_rule`.

    Source: Malladi et al. 2022, arXiv:2205.10287.
    """
    return Hyperparameters(reference.learning_rate * math.sqrt(kappa), reference.betas, reference.epsilon)


def adam_rule(reference: Hyperparameters, kappa: float) -> Hyperparameters:
    """Adam's full rule: lr * sqrt(kappa), 1 - beta * kappa for both betas, epsilon / sqrt(kappa).

    Valid while both betas are above 0; beyond that it raises ConfigError instead of silently clamping.
    Source: Malladi et al. 2022, arXiv:2205.10287.
    """
    if kappa == 1:
        return reference
    largest = 1 / (1 - min(reference.betas))
    if kappa >= largest * (1 - 1e-9):  # 1 / (1 - 0.9) is a little more than 10
        raise ConfigError(
            "optimizer.rule",
            "adam",
            f"with betas {list(reference.betas)} it is valid for batches below {largest:.4g} x the reference, "
            f"and this is {kappa:.4g} x",
            "use a larger optimizer.reference_batch_size with its own tuned learning rate, or the rule sqrt",
        )
    beta_1, beta_2 = (1 - (1 - beta) * kappa for beta in reference.betas)
    return Hyperparameters(
        reference.learning_rate * math.sqrt(kappa), (beta_1, beta_2), reference.epsilon / math.sqrt(kappa)
    )


def legw_rule(reference: Hyperparameters, kappa: float) -> Hyperparameters:
    """LEGW rule: lr * sqrt(kappa) with a warm-up kappa times as many epochs long (linear-epoch gradual warm-up).

    Source: You et al. 2019, arXiv:1901.08256.
    """
    return Hyperparameters(
        reference.learning_rate * math.sqrt(kappa), reference.betas, reference.epsilon, warmup_factor=kappa
    )


RULES: dict[str, Callable[[Hyperparameters, float], Hyperparameters]] = {
    "none": none_rule,
    "linear": linear_rule,
    "sqrt": sqrt_rule,
    "adam": adam_rule,
    "legw": legw_rule,
}
