"""AdaScale's gain: how many steps of the reference batch a step of a larger one is worth.

Source: Johnson et al. 2020, arXiv:2007.05105.
"""

from __future__ import annotations


def adascale_gain(kappa: float, *, square: float, trace: float) -> float:
    """Number of reference steps that a step of `kappa` times as many samples is worth, in [1, kappa] from kappa 1 on.

    square: |G|^2; trace: trace of the covariance of the reference batch's mean gradient. AdaScale multiplies the
    learning rate by the gain (Adam: by its square root).
    """
    square, trace = max(0.0, square), max(0.0, trace)
    if square == 0 and trace == 0:
        return 1.0  # no gradient: nothing is gained by more samples
    return (trace + square) / (trace / kappa + square)
