"""Fits the constants that no data sheet gives to published measurements, and says how well they carry over.

Each source has the same weight, whatever its number of rows: otherwise two traces of a thousand rows would decide
everything. The loss of a source is its median absolute log error plus a third of the 90th percentile, from data sheets
and from an anchor. One constant is moved at a time, by steps that shrink: few constants, smooth loss, and the way to
the result can be read.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jobs.planner_evidence.published.rows import Observation
from jobs.planner_evidence.validate import Judged, judge, log_error, quantile
from scaleray.planner.cost.constants import FITTED, Constants

BOUNDS = {
    "wave_half": (0.1, 2.0), "inner_half": (20.0, 800.0), "matmul_practice": (0.6, 1.0),
    "conv_share": (0.3, 1.0), "traffic_share": (0.4, 0.92),
    "leak": (0.0, 0.4), "prefetch_share": (0.3, 1.0), "straggler_share": (0.001, 0.05),
    "straggler_share_input": (0.005, 0.1), "straggler_share_uneven": (0.005, 0.1),
    "congestion": (0.005, 0.15), "handover_s": (1e-5, 0.02),
    "two_node_tcp_share": (0.4, 1.0), "socket_jitter": (0.01, 0.3), "unfused_attention_share": (0.1, 0.7),
}  # fmt: skip

FIRST_GUESSES = Constants(
    matmul_practice=0.92, traffic_share=0.8, inner_half=160.0, wave_half=0.5, conv_share=0.75,
    unfused_attention_share=0.35, leak=0.06, prefetch_share=0.9, congestion=0.04,
    straggler_share=0.008, straggler_share_input=0.03, straggler_share_uneven=0.05,
    handover_s=0.0005, two_node_tcp_share=0.62, socket_jitter=0.05,
)  # fmt: skip
"""Where fits begin: guesses made before any fit looked at a row, so that a source left out has had no say."""


@dataclass(frozen=True)
class Fit:
    """Constants with the loss they reach."""

    constants: Constants
    loss: float
    start_loss: float


def thinned(seen: Sequence[Observation], every: int = 9) -> list[Observation]:
    """All observations but most of those on traces, of which one-GPU rows (the anchors) and every `every`-th of a
    source stay."""
    kept = []
    for rows in _by_source(seen).values():
        kept += [one for index, one in enumerate(rows) if not one.is_trace or one.num_gpus == 1 or index % every == 0]
    return kept


class Losses:
    """Loss of constants: the mean, over sources and over the two ways to predict, of what they miss by; see the module.

    Remembers what each source said of which constants: fits without one source or the other mostly ask the same.
    """

    def __init__(self, seen: Sequence[Observation]) -> None:
        self._rows = _by_source([one for one in seen if one.step_time_s])
        self._known: dict[tuple[str, Constants], list[float]] = {}

    def __call__(self, constants: Constants, *, without: str | None = None) -> float:
        """Loss of the constants. without: a source that has no say."""
        parts = [part for source in self._rows if source != without for part in self._parts(source, constants)]
        return sum(parts) / max(1, len(parts))

    def _parts(self, source: str, constants: Constants) -> list[float]:
        if (source, constants) not in self._known:
            judged = judge(self._rows[source], constants, with_pollux=False, with_memory=False)
            self._known[source, constants] = [
                _one([abs(log_error(found, measured)) for found, measured in pairs])
                for pairs in (
                    [
                        (one.from_sheets_s, one.seen.step_time_s)
                        for one in judged
                        if one.from_sheets_s and one.seen.step_time_s
                    ],
                    [
                        (one.anchored_s, one.seen.step_time_s)
                        for one in judged
                        if one.anchored_s and one.seen.step_time_s
                    ],
                )
                if pairs
            ]
        return self._known[source, constants]


def loss_of(seen: Sequence[Observation], constants: Constants) -> float:
    """Loss of the constants over all sources."""
    return Losses(seen)(constants)


def fit(
    seen: Sequence[Observation],
    *,
    start: Constants = FIRST_GUESSES,
    names: Sequence[str] = FITTED,
    rounds: int = 3,
    say: Callable[[str], None] = lambda text: None,
) -> Fit:
    """Constants with a smaller loss than `start`. Deterministic; a round moves each constant up and down once."""
    return _descend(Losses(seen), start=start, names=names, rounds=rounds, say=say)


def leave_one_source_out(
    seen: Sequence[Observation],
    *,
    start: Constants = FIRST_GUESSES,
    rounds: int = 2,
    say: Callable[[str], None] = lambda text: None,
) -> list[Judged]:
    """Every observation judged with constants that were fitted without its source."""
    judged: list[Judged] = []
    losses = Losses(thinned(seen, every=25))
    by_source = _by_source(seen)
    for source in sorted(by_source):
        found = _descend(functools.partial(losses, without=source), start=start, names=FITTED, rounds=rounds)
        judged += judge(by_source[source], found.constants, with_pollux=False)
        say(f"{source}: fitted on the {len(by_source) - 1} others, loss {found.loss:.4f}")
    return judged


def _descend(
    loss_of: Callable[[Constants], float],
    *,
    start: Constants,
    names: Sequence[str],
    rounds: int,
    say: Callable[[str], None] = lambda text: None,
) -> Fit:
    best = start
    least = start_loss = loss_of(start)
    step = 1.35
    for turn in range(rounds):
        for name in names:
            low, high = BOUNDS[name]
            for factor in (step, 1 / step):
                trial = replace(best, **{name: min(high, max(low, getattr(best, name) * factor))})
                loss = loss_of(trial)
                if loss < least - 1e-5:
                    best, least = trial, loss
                    break
        say(f"round {turn + 1}: loss {least:.4f}")
        step = 1 + (step - 1) * 0.55
    return Fit(best, least, start_loss)


def _by_source(seen: Sequence[Observation]) -> dict[str, list[Observation]]:
    found: dict[str, list[Observation]] = defaultdict(list)
    for one in seen:
        found[one.source].append(one)
    return dict(found)


def spreads(judged: Sequence[Judged]) -> dict[str, tuple[float, float, int]]:
    """5 and 95 % quantiles of log(measured / predicted) for each class of interval, each source with the same number of
    votes."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in judged:
        measured = one.seen.step_time_s
        if measured and one.from_sheets_s:
            found["unmeasured"][one.seen.source].append(log_error(one.from_sheets_s, measured))
        if measured and one.anchored_s and not one.reasons:
            found["anchored"][one.seen.source].append(log_error(one.anchored_s, measured))
        if one.memory_bytes and one.seen.memory_bytes:
            found["memory"][one.seen.source].append(log_error(one.memory_bytes, one.seen.memory_bytes))
    result = {}
    for kind, sources in found.items():
        votes = [value for values in sources.values() for value in _evenly(values, 40)]
        low, high = quantile(votes, 0.05), quantile(votes, 0.95)
        assert low is not None and high is not None
        result[kind] = (low, high, sum(map(len, sources.values())))
    return result


def _one(errors: Sequence[float]) -> float:
    middle, far = quantile(errors, 0.5), quantile(errors, 0.9)
    assert middle is not None and far is not None
    return middle + far / 3


def _evenly(values: Sequence[float], count: int) -> list[float]:
    ordered = sorted(values)
    if len(ordered) <= count:
        return ordered
    return [ordered[round(index * (len(ordered) - 1) / (count - 1))] for index in range(count)]
