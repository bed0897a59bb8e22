"""Diagnosis by the gradient's parts: which class of cause the weights of workers and micro-batches in it show."""

from __future__ import annotations

import math

import numpy as np

from scaleray.reproducibility.causes import SAME_RATIO, Cause, Finding, Layout, is_near, ratio_finding

LEAST_OF_A_CUT = 1e-6
"""Relative difference of a gradient above which rounding does not explain it."""


def from_shares(
    shares: np.ndarray, counts: np.ndarray, layout: Layout, *, stale: float = 0.0, difference: float = 0.0
) -> Finding | None:
    """Class of the cause, from the weights of every worker's micro-batches in the synchronised gradient;
    None if all are 1, unless the gradient is not that of the whole batch.

    difference: relative distance from the gradient of the whole batch.
    shares: (ranks that look, ranks, micro-batches), 1 where a micro-batch weighs what it counts. counts: (ranks,
    micro-batches), 0 where there was none. stale: weight of the gradient of the step before.
    """
    if is_near(stale, 1.0) and abs(shares).max() < SAME_RATIO:
        why = "it is the gradient of the step before: the sums of this step were not waited for"
        return Finding(Cause.MISSING_SYNCHRONISATION, why)
    if abs(stale) > SAME_RATIO:
        why = f"the gradient of the step before is still in it, {stale:.4g} times"
        return Finding(Cause.ACCUMULATION, why)
    there = counts > 0
    seen = shares[0]
    if any(np.abs(view - seen)[there].max() > SAME_RATIO for view in shares[1:]):
        own = all(
            np.abs(np.delete(view, rank, axis=0)).max(initial=0.0) < SAME_RATIO for rank, view in enumerate(shares)
        )
        what = (
            "each rank holds the gradient of its own rows only"
            if own
            else "the ranks hold different mixtures of gradients"
        )
        return Finding(Cause.MISSING_SYNCHRONISATION, what)
    values = seen[there]
    if np.ptp(values) <= SAME_RATIO * abs(values).max():
        if not is_near(values[0], 1.0):
            return ratio_finding(float(values[0]), layout)
        if len(values) == 1 or difference <= LEAST_OF_A_CUT:
            return None
        why = (
            f"the gradient is the sum of those of its {len(values)} micro-batches, each computed alone, and not that "
            "of the whole batch: micro-batches and workers change this training. Compute the loss of a row from that "
            "row alone, or keep one worker and one micro-batch"
        )
        return Finding(Cause.CUT, why)
    written = "; ".join(f"rank {r}: " + ", ".join(f"{v:.4g}" for v in row[there[r]]) for r, row in enumerate(seen))
    # in a mean of means each micro-batch, or each rank, weighs the same whatever it counted
    for totals in (counts, np.broadcast_to(counts.sum(axis=1, keepdims=True), counts.shape)):
        weights = (seen * totals)[there]
        if np.ptp(weights) <= SAME_RATIO * abs(weights).max():
            return Finding(
                Cause.LOSS_NORMALISATION,
                f"a mean of means: parts of the batch weigh alike, whatever they count ({written})",
            )
    lost = [(r, p) for r, p in zip(*np.nonzero(there & (np.abs(seen) < SAME_RATIO)), strict=True)]
    kept = seen[there & (np.abs(seen) >= SAME_RATIO)]
    if lost and counts.shape[1] > 1 and np.ptp(kept) <= SAME_RATIO * abs(kept).max() and not _only_last(seen, there):
        which = ", ".join(f"micro-batch {p + 1} of rank {r}" for r, p in lost[:3])
        return Finding(Cause.ACCUMULATION, f"micro-batches are not in the gradient: {which}")
    pairs = [(row[mask][:-1], row[mask][-1]) for row, mask in zip(seen, there, strict=True) if mask.sum() > 1]
    if pairs and all(last != 0 for _, last in pairs):
        early = np.concatenate([values / last for values, last in pairs])
        if abs(early).max() < SAME_RATIO:
            why = "only the last micro-batch of each rank is in the gradient; the others are lost"
            return Finding(Cause.ACCUMULATION, why)
        if layout.world_size > 1 and (early > 0).all():
            powers = np.log(early) / math.log(layout.world_size)  # summed over the workers so many times more
            if np.allclose(powers, np.round(powers), atol=SAME_RATIO) and powers.max() > 0.5:
                why = f"earlier micro-batches are synchronised more than once ({written})"
                return Finding(Cause.DOUBLE_SYNCHRONISATION, why)
    return Finding(Cause.UNKNOWN, f"the micro-batches do not weigh what they count ({written})")


def _only_last(seen: np.ndarray, there: np.ndarray) -> bool:
    """Whether the gradient has every rank's last micro-batch, and none of those before."""
    rows = [row[mask] for row, mask in zip(seen, there, strict=True) if mask.any()]
    return all(row[-1] != 0 and np.abs(row[:-1]).max(initial=0.0) < SAME_RATIO for row in rows)
