"""Fits the constants that no data sheet gives, to a folder of published measurements, and says how well they carry over.

Each source has the same weight, whatever its number of rows: otherwise two traces of a thousand rows would decide everything. The loss of a
source is its median absolute log error plus a third of the 90th percentile, from data sheets and from an anchor. One constant is moved at
a time, by steps that shrink: few constants, smooth loss, and the way to the result can be read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from scaleray.planner.constants import FITTED, Constants
from scaleray.planner.published.rows import Observation
from scaleray.planner.validate import Judged, judge, log_error, quantile

BOUNDS = {
    "wave_half": (0.1, 2.0), "inner_half": (20.0, 800.0), "matmul_practice": (0.6, 1.0), "conv_share": (0.3, 1.0), "traffic_share": (0.4, 0.92),
    "leak": (0.0, 0.4), "prefetch_share": (0.3, 1.0), "straggler_share": (0.001, 0.05),
    "straggler_share_input": (0.005, 0.1), "straggler_share_uneven": (0.005, 0.1), "congestion": (0.005, 0.15), "handover_s": (1e-5, 0.02),
    "two_node_tcp_share": (0.4, 1.0), "socket_jitter": (0.01, 0.3), "unfused_attention_share": (0.1, 0.7),
}  # fmt: skip

FIRST_GUESSES = Constants(
    matmul_practice=0.92, traffic_share=0.8, inner_half=160.0, wave_half=0.5, conv_share=0.75, unfused_attention_share=0.35, leak=0.06,
    prefetch_share=0.9, congestion=0.04, straggler_share=0.008, straggler_share_input=0.03, straggler_share_uneven=0.05,
    handover_s=0.0005, two_node_tcp_share=0.62, socket_jitter=0.05,
)  # fmt: skip
"""Where fits begin: what was guessed before any row was looked at by a fit, so that a source left out has had no say."""


@dataclass(frozen=True)
class Fit:
    """Constants with the loss they reach."""

    constants: Constants
    loss: float
    start_loss: float


def thinned(seen: Sequence[Observation], every: int = 9) -> list[Observation]:
    """All observations but most of those on traces, of which one-GPU rows (the anchors) and every `every`-th stay."""
    return [one for index, one in enumerate(seen) if not one.is_trace or one.num_gpus == 1 or index % every == 0]


def loss_of(seen: Sequence[Observation], constants: Constants) -> float:
    """Mean over sources, and over the two ways to predict; see the module."""
    sheets: dict[str, list[float]] = defaultdict(list)
    anchored: dict[str, list[float]] = defaultdict(list)
    for one in judge(seen, constants, with_pollux=False, with_memory=False):
        measured = one.seen.step_time_s
        if not measured:
            continue
        if one.from_sheets_s:
            sheets[one.seen.source].append(abs(log_error(one.from_sheets_s, measured)))
        if one.anchored_s:
            anchored[one.seen.source].append(abs(log_error(one.anchored_s, measured)))
    parts = [_one(errors) for group in (sheets, anchored) for errors in group.values()]
    return sum(parts) / max(1, len(parts))


def fit(
    seen: Sequence[Observation], *, start: Constants = FIRST_GUESSES, names: Sequence[str] = FITTED, rounds: int = 3,
    say: Callable[[str], None] = lambda text: None,
) -> Fit:  # fmt: skip
    """Constants with a smaller loss than `start`. Deterministic; a round moves each constant up and down once."""
    best = start
    least = start_loss = loss_of(seen, start)
    step = 1.35
    for turn in range(rounds):
        for name in names:
            low, high = BOUNDS[name]
            for factor in (step, 1 / step):
                value = min(high, max(low, getattr(best, name) * factor))
                trial = replace(best, **{name: value})
                loss = loss_of(seen, trial)
                if loss < least - 1e-5:
                    best, least = trial, loss
                    break
        say(f"round {turn + 1}: loss {least:.4f}")
        step = 1 + (step - 1) * 0.55
    return Fit(best, least, start_loss)


def leave_one_source_out(
    seen: Sequence[Observation],
    *,
    start: Constants = FIRST_GUESSES,
    rounds: int = 2,
    say: Callable[[str], None] = lambda text: None,
) -> list[Judged]:
    """Every observation judged with constants that were fitted without its source."""
    judged: list[Judged] = []
    sources = sorted({one.source for one in seen})
    for source in sources:
        others = thinned([one for one in seen if one.source != source], every=25)
        found = fit(others, start=start, rounds=rounds)
        judged += judge([one for one in seen if one.source == source], found.constants, with_pollux=False)
        say(f"{source}: fitted on the {len(sources) - 1} others, loss {found.loss:.4f}")
    return judged


def spreads(judged: Sequence[Judged]) -> dict[str, tuple[float, float, int]]:
    """5 and 95 % quantiles of log(measured / predicted) for each class of interval, each source with the same number of votes."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in judged:
        measured = one.seen.step_time_s
        if measured and one.from_sheets_s:
            found[one.sheets_kind][one.seen.source].append(log_error(one.from_sheets_s, measured))
        if measured and one.anchored_s:
            found[one.kind][one.seen.source].append(log_error(one.anchored_s, measured))
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
