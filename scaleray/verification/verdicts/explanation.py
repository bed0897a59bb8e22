"""Explain why a variant differs from the training of one process, by their traces, by runs with a part removed, or by
the decomposed gradient."""

import dataclasses
import math
from functools import partial

import numpy as np

from scaleray.config.recipe.values import with_micro_size
from scaleray.records.certificate import Divergence
from scaleray.training.setup.rank_context import RankContext
from scaleray.verification.bounds import LEAST_OF_A_CUT, SAME_RATIO
from scaleray.verification.causes.cause_classes import (
    Cause,
    Finding,
    Layout,
    from_repetition,
    from_traces,
    is_near,
    ratio_finding,
)
from scaleray.verification.causes.cause_experiments import (
    EVALUATION_MODE,
    NO_CLIPPING,
    from_experiment,
    needs_experiments,
    without_experiment,
)
from scaleray.verification.causes.gradient_values import from_values
from scaleray.verification.repeatable.repeatable_workload import Quieted
from scaleray.verification.runs.compared_runs import Key, Runs, Variant
from scaleray.verification.runs.rank0_decisions import on_first
from scaleray.verification.traces.compare_traces import compare
from scaleray.verification.traces.run_trace import Trace


def from_shares(
    shares: np.ndarray, counts: np.ndarray, layout: Layout, *, stale: float = 0.0, difference: float = 0.0
) -> Finding | None:
    """Class of the cause, given the weights of every worker's micro-batches in the synchronised gradient; None if all
    weights are 1 and the gradient is that of the whole batch.

    difference: relative distance from the gradient of the whole batch. shares: (observing ranks, ranks, micro-batches),
    1 if a micro-batch has the right weight. counts: (ranks, micro-batches), 0 for a missing one. stale: weight of the
    previous step's gradient."""
    if is_near(stale, 1.0) and abs(shares).max() < SAME_RATIO:
        why = "it is the previous step's gradient, as the step did not wait for its own sums"
        return Finding(Cause.MISSING_SYNCHRONISATION, why)
    if abs(stale) > SAME_RATIO:
        why = f"it still contains {stale:.4g} times the previous step's gradient"
        return Finding(Cause.ACCUMULATION, why)
    there = counts > 0
    seen = shares[0]
    if any(np.abs(view - seen)[there].max() > SAME_RATIO for view in shares[1:]):
        own = all(
            np.abs(np.delete(view, rank, axis=0)).max(initial=0.0) < SAME_RATIO for rank, view in enumerate(shares)
        )
        what = (
            "each rank holds only the gradient of its own rows"
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
            f"the gradient is the sum of those of its {len(values)} micro-batches, each computed alone, not that "
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
                f"a mean of means: all parts of the batch have the same weight, whatever their counts ({written})",
            )
    lost = [(r, p) for r, p in zip(*np.nonzero(there & (np.abs(seen) < SAME_RATIO)), strict=True)]
    kept = seen[there & (np.abs(seen) >= SAME_RATIO)]
    if lost and counts.shape[1] > 1 and np.ptp(kept) <= SAME_RATIO * abs(kept).max() and not _only_last(seen, there):
        which = ", ".join(f"micro-batch {p + 1} of rank {r}" for r, p in lost[:3])
        return Finding(Cause.ACCUMULATION, f"the gradient lacks {which}")
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
    return Finding(Cause.UNKNOWN, f"the micro-batches are not weighted by their counts ({written})")


def _only_last(seen: np.ndarray, there: np.ndarray) -> bool:
    """Whether the gradient has only every rank's last micro-batch."""
    rows = [row[mask] for row, mask in zip(seen, there, strict=True) if mask.any()]
    return all(row[-1] != 0 and np.abs(row[:-1]).max(initial=0.0) < SAME_RATIO for row in rows)


class Explanation:
    """Explains a variant's difference from its reference, by running a group of workers. bound: largest relative
    difference between numbers that count as equal."""

    def __init__(self, runs: Runs, bound: float) -> None:
        self.runs, self.bound = runs, bound

    def of(self, variant: Variant, key: Key, trace: Trace, divergence: Divergence, layout: Layout) -> Finding:
        """Finding on a variant's divergence from the reference of `key`. Collective."""
        runs, place = self.runs, self.runs.place
        finding: Finding | None = on_first(
            place,
            lambda: self.unrepeatable(key, divergence) or from_traces(runs.reference(key), trace, divergence, layout),
        )
        if finding is not None:
            return finding
        for name in on_first(place, lambda: needs_experiments(runs.reference(key), trace)):
            if self._agrees_without(name, variant, key):
                return on_first(place, partial(self._from_experiment, name, key, trace))
        if divergence.quantity != "evaluation":
            probes = runs.compared(variant, key, take_apart_at=divergence.step, only_its_part=True).probes
            parts = probes[-1].parts
            if parts is not None and parts.shares is not None:
                finding = from_shares(*parts.shares, layout, stale=parts.stale, difference=divergence.difference)
                if finding is not None and finding.cause == Cause.CUT:
                    is_so = on_first(place, lambda: self._one_process_differs_as_well(variant, key, divergence))
                    finding = finding if is_so else None
            if parts is not None and parts.shares is None:
                finding = from_values(parts.relations, len(trace.names), layout)
        return finding or on_first(place, lambda: without_experiment(runs.reference(key), trace, divergence, layout))

    def unrepeatable(self, key: Key, divergence: Divergence) -> Finding | None:
        """Run the reference again; returns a finding if the data itself is not repeatable. On rank 0."""
        if divergence.quantity != "rows":
            return None
        return from_repetition(self.runs.reference(key), self.runs.again(key))

    def _one_process_differs_as_well(self, variant: Variant, key: Key, divergence: Divergence) -> bool:
        """Whether one process with the variant's micro-batches also differs from the reference. On rank 0."""
        if divergence.quantity not in ("loss", "gradient") or key.partition is not None:
            return False
        size = variant.job.recipe.micro_batch_size
        cut = self.runs.variant.mapped(
            lambda job: job.changed(recipe=with_micro_size(job.recipe, size, why="as the variant's"))
        )
        trace = self.runs.compared(cut, key, place=RankContext(device=self.runs.place.device)).trace
        found = compare(self.runs.reference(key), trace, bound=self.bound).divergence
        return found is not None and found.step <= divergence.step and found.quantity in ("loss", "gradient")

    def _agrees_without(self, experiment: str, variant: Variant, key: Key) -> bool:
        """Whether variant and reference agree once `experiment` is removed from both. Collective."""
        if experiment == NO_CLIPPING:
            key = dataclasses.replace(key, leaves_out=NO_CLIPPING)
        elif experiment == EVALUATION_MODE:
            key = Key(Quieted.EVERYTHING, key.has_statistics)
        on_first(self.runs.place, lambda: bool(self.runs.reference(key)))
        trace = self.runs.compared(variant, key).trace
        return on_first(self.runs.place, lambda: compare(self.runs.reference(key), trace, bound=self.bound).is_equal)

    def _from_experiment(self, experiment: str, key: Key, trace: Trace) -> Finding:
        return from_experiment(experiment, self.runs.reference(key), trace)
