"""Reason why a variant is not the training of one process: from their traces, from runs with a part removed from both,
or from the gradient, taken apart.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from scaleray.reproducibility.causes import Cause, Finding, Layout, from_repetition, from_traces
from scaleray.reproducibility.compare_traces import Divergence, compare
from scaleray.reproducibility.experiments import (
    EVALUATION_MODE,
    NO_CLIPPING,
    from_experiment,
    needs_experiments,
    without_experiment,
)
from scaleray.reproducibility.gradient_shares import from_shares
from scaleray.reproducibility.gradient_values import from_values
from scaleray.reproducibility.traces import Trace
from scaleray.scaling.recipe.values import with_micro_size
from scaleray.training.setup.place import Place
from scaleray.training.verify.compared_runs import Key, Runs, Variant
from scaleray.training.verify.decided import on_first
from scaleray.training.verify.quieted import Quieted


class Explanation:
    """Explains where a variant leaves its reference, with runs of a group of workers. bound: largest relative
    difference between numbers that count as equal."""

    def __init__(self, runs: Runs, bound: float) -> None:
        self.runs, self.bound = runs, bound

    def of(self, variant: Variant, key: Key, trace: Trace, divergence: Divergence, layout: Layout) -> Finding:
        """The finding on a variant's divergence from the reference of `key`. Collective."""
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
        """Finding that other rows are the data's own doing, if they are: the reference is run once more. On rank 0."""
        if divergence.quantity != "rows":
            return None
        return from_repetition(self.runs.reference(key), self.runs.again(key))

    def _one_process_differs_as_well(self, variant: Variant, key: Key, divergence: Divergence) -> bool:
        """Whether one process that cuts its batches into the variant's micro-batches leaves the reference, too. On rank
        0."""
        if divergence.quantity not in ("loss", "gradient") or key.partition is not None:
            return False
        size = variant.job.recipe.micro_batch_size
        cut = self.runs.variant.mapped(
            lambda job: dataclasses.replace(job, recipe=with_micro_size(job.recipe, size, why="as the variant's"))
        )
        trace = self.runs.compared(cut, key, place=Place(device=self.runs.place.device)).trace
        found = compare(self.runs.reference(key), trace, bound=self.bound).divergence
        return found is not None and found.step <= divergence.step and found.quantity in ("loss", "gradient")

    def _agrees_without(self, experiment: str, variant: Variant, key: Key) -> bool:
        """Whether variant and reference agree once `experiment` is taken out of both. Collective."""
        if experiment == NO_CLIPPING:
            key = dataclasses.replace(key, leaves_out=NO_CLIPPING)
        elif experiment == EVALUATION_MODE:
            key = Key(Quieted.EVERYTHING, key.has_statistics)
        on_first(self.runs.place, lambda: bool(self.runs.reference(key)))
        trace = self.runs.compared(variant, key).trace
        return on_first(self.runs.place, lambda: compare(self.runs.reference(key), trace, bound=self.bound).is_equal)

    def _from_experiment(self, experiment: str, key: Key, trace: Trace) -> Finding:
        return from_experiment(experiment, self.runs.reference(key), trace)
