"""Verdict on a training: its limits, ranked by cost, each with a bound on the gain of removing it.

Pure arithmetic on `Signals`. A limit is reported if it costs at least LEAST_SHARE of the time, beyond the noise of the
steps; a training without one is limited by computing.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scaleray.profiling.verdict.advice import advice_on
from scaleray.profiling.verdict.findings import Finding, Limit, Verdict
from scaleray.profiling.verdict.predicted_step import Replay, moved_to_host, replay_of, taken_out
from scaleray.profiling.verdict.signals import Facts, Signals
from scaleray.profiling.verdict.stragglers import Stragglers, stragglers_of
from scaleray.profiling.verdict.verdict_text import evidence_of, sentence_of, straggler_place, unanswered, waiting_ranks
from scaleray.records.phases import Phase

# Uncertainty of a share of the time, as steps vary: blocks of consecutive steps are resampled.
#
# Source: Künsch 1989, doi:10.1214/aos/1176347265 (block bootstrap for dependent series).

RESAMPLES = 400
BLOCKS = 5
"""Number of blocks into which the steps are divided: long enough to contain events that occur every few steps."""
LOW, HIGH = 0.05, 0.95


def drawn_columns(count: int) -> npt.NDArray[np.int64]:
    """Column indices (RESAMPLES, count), in blocks that begin anywhere; deterministic for a given count."""
    length = max(1, count // BLOCKS)
    draw = np.random.default_rng(0)
    starts = draw.integers(0, count, size=(RESAMPLES, -(-count // length)))
    columns = (starts[:, :, None] + np.arange(length)) % count
    return np.asarray(columns.reshape(RESAMPLES, -1)[:, :count])


def resampled_shares(
    saved: Mapping[str, npt.NDArray[np.float64]], times: npt.NDArray[np.float64]
) -> dict[str, npt.NDArray[np.float64]]:
    """Share of the time saved by removing each limit, in every resample. saved, times: seconds of each step."""
    columns = drawn_columns(len(times))
    whole = times[columns].sum(axis=1)
    return {name: values[columns].sum(axis=1) / whole for name, values in saved.items()}


LEAST_STEPS = 10
"""Minimum number of steps in steady state for a verdict."""
LEAST_SHARE = 0.06
"""Share of the time above which a limit is reported."""
SURE_SHARE = 0.03
"""Share that a limit must exceed in all but LOW of the resamples, so that a hiccup of the machine is not reported."""
MOST_UNEXPLAINED = 0.1
"""Share of unexplained time above which there is no verdict."""
CONFIDENT = {"sure": 0.95, "likely": 0.75, "unsure": 0.0}
"""Share of the resamples in which the primary finding is primary and large enough, by confidence; `sure` also needs
SURE_STEPS."""
SURE_STEPS = 20
PARTS_OF = {
    Limit.INPUT: (Phase.INPUT,),
    Limit.COPY: (Phase.COPY,),
    Limit.HOST: (Phase.HOST, Phase.OTHER),
    Limit.EVALUATION: (Phase.EVALUATION,),
    Limit.CHECKPOINT: (Phase.CHECKPOINT,),
}
Times = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Costs:
    """Seconds of each step saved by removing each limit, in addition to the stragglers (`saved`) or alone (`alone`)."""

    times: Times
    saved: dict[Limit, Times]
    alone: dict[Limit, Times]
    stragglers: Stragglers | None


def evaluate(signals: Signals, facts: Facts) -> Verdict:
    """Return the verdict on the steps of these signals."""
    reason = _why_not(signals)
    if reason:
        return _incomplete(signals, reason)
    costs = _costs(signals)
    if not _is_told(costs, Limit.STRAGGLER):  # differences within noise do not justify replacing ranks' values
        costs = _costs(signals, may_straggle=False)
    found = [_finding(limit, costs, signals, facts) for limit in costs.saved if _is_told(costs, limit)]
    found += _pressure_of_unknown_cost(signals, facts) if Limit.MEMORY not in costs.saved else []
    found.sort(key=lambda one: -(one.share or 0.0))
    shares = {str(limit): float(saved.sum() / costs.times.sum()) for limit, saved in costs.saved.items()}
    shares = {limit: share for limit, share in shares.items() if share > 0}
    shares[str(Limit.COMPUTE)] = max(0.0, 1 - sum(shares.values()))
    primary = found[0] if found and found[0].share is not None else _computing(shares, found)
    verdict = Verdict(
        primary,
        tuple(one for one in found if one is not primary),
        "",
        _confidence(primary, costs, signals.num_steps),
        signals.num_steps,
        float(costs.times.mean()),
        shares,
        tuple(unanswered(signals, facts)),
    )
    return dataclasses.replace(verdict, sentence=sentence_of(verdict, facts))


def _why_not(signals: Signals) -> str:
    if signals.num_steps < LEAST_STEPS:
        return f"{signals.num_steps} steady steps are too few to attribute the time; {LEAST_STEPS} are needed"
    if signals.unexplained > MOST_UNEXPLAINED:
        return f"{signals.unexplained:.0%} of the time is unexplained: the parts do not add up to the steps"
    if Phase.FORWARD not in signals.parts:
        return "the phases of the steps were not measured"
    return ""


def _incomplete(signals: Signals, reason: str) -> Verdict:
    primary = Finding(Limit.INCOMPLETE, None, evidence="", advice=advice_on(Limit.INCOMPLETE, Facts(1, "")))
    return Verdict(primary, (), f"incomplete: {reason}.", "unsure", signals.num_steps, 0.0)


def _costs(signals: Signals, *, may_straggle: bool = True) -> _Costs:
    """Seconds saved by removing each limit, step by step. Pauses and retries are hidden in the passes, and stragglers
    in any part; they are removed first, so that nothing is counted twice. From the rest, each limit's parts are omitted
    in turn.
    """
    whole = replay_of(signals)
    times, saved, alone = whole.times(), {}, {}
    replay = whole
    if signals.pauses is not None:
        replay = Replay(moved_to_host(replay.parts, signals.pauses), replay.link)
    retried = _seconds_of_retries(replay, signals)
    if retried is not None:
        left = Replay(taken_out(replay.parts, retried), replay.link)
        saved[Limit.MEMORY] = alone[Limit.MEMORY] = replay.times() - left.times()
        replay = left
    stragglers = stragglers_of(replay) if may_straggle and signals.waits is not None else None
    before = replay
    if stragglers is not None:
        replay = stragglers.evened
        saved[Limit.STRAGGLER] = alone[Limit.STRAGGLER] = before.times() - replay.times()
    for limit, parts in PARTS_OF.items():
        if any(part in replay.parts for part in parts):
            saved[limit] = replay.times() - replay.times(without=parts)
            alone[limit] = before.times() - before.times(without=parts)
    if signals.waits is not None and signals.num_ranks > 1:
        saved[Limit.COMMUNICATION] = alone[Limit.COMMUNICATION] = replay.link
    return _Costs(times, saved, alone, stragglers)


def _seconds_of_retries(replay: Replay, signals: Signals) -> npt.NDArray[np.float64] | None:
    """Excess time of steps with allocator retries over a rank's other steps; None if there is nothing to compare
    with."""
    if signals.retries is None:
        return None
    retried = signals.retries > 0
    if not retried.any() or retried.mean(axis=1).max() > 0.8:
        return None
    own = replay.own
    usual = np.array([np.median(row[~mask]) for row, mask in zip(own, retried, strict=True)])
    return np.where(retried, np.maximum(0.0, own - usual[:, None]), 0.0)


def _pressure_of_unknown_cost(signals: Signals, facts: Facts) -> list[Finding]:
    """Finding on memory pressure of unknown cost, if no steps are free of it."""
    if signals.retries is None or not (signals.retries > 0).any():
        return []
    return [
        Finding(
            Limit.MEMORY,
            None,
            evidence=evidence_of(Limit.MEMORY, signals, None, ""),
            advice=advice_on(Limit.MEMORY, facts),
        )
    ]


def _is_told(costs: _Costs, limit: Limit) -> bool:
    if limit not in costs.saved:
        return False
    share = costs.saved[limit].sum() / costs.times.sum()
    drawn = resampled_shares({limit: costs.saved[limit]}, costs.times)[limit]
    return bool(share >= LEAST_SHARE and np.quantile(drawn, LOW) >= SURE_SHARE)


def _finding(limit: Limit, costs: _Costs, signals: Signals, facts: Facts) -> Finding:
    drawn = resampled_shares({limit: costs.saved[limit]}, costs.times)[limit]
    alone = costs.alone[limit].sum() / costs.times.sum()
    finding = Finding(
        limit,
        float(costs.saved[limit].sum() / costs.times.sum()),
        float(np.quantile(drawn, LOW)),
        float(np.quantile(drawn, HIGH)),
        float(1 / max(1e-9, 1 - alone)),
        float((drawn >= LEAST_SHARE / 2).mean()),
    )
    if limit is Limit.STRAGGLER and costs.stragglers is not None:
        finding = straggler_place(finding, costs.stragglers, signals)
    if limit is Limit.INPUT:
        finding = dataclasses.replace(finding, ranks=waiting_ranks(signals))
    if limit is Limit.HOST and signals.pauses is not None:
        paused = _pause_share(signals, costs)
        finding = dataclasses.replace(
            finding, cause="garbage collection" if paused > 0.5 * (finding.share or 1) else ""
        )
    evidence = evidence_of(limit, signals, costs.stragglers, finding.cause)
    advice = advice_on(limit, facts, phase=finding.phase, cause=finding.cause)
    return dataclasses.replace(finding, evidence=evidence, advice=advice)


def _pause_share(signals: Signals, costs: _Costs) -> float:
    assert signals.pauses is not None
    return float(signals.pauses.max(axis=0).sum() / costs.times.sum())


def _computing(shares: Mapping[str, float], found: list[Finding]) -> Finding:
    others = {limit: share for limit, share in shares.items() if limit != Limit.COMPUTE}
    largest = max(others, key=lambda limit: others[limit], default="")
    evidence = f"the largest other part is {largest}, {others[largest]:.1%}" if largest else ""
    return Finding(Limit.COMPUTE, shares[Limit.COMPUTE], evidence=evidence)


def _confidence(primary: Finding, costs: _Costs, steps: int) -> str:
    """Confidence in a primary finding, from how often it would be primary in resampled steps."""
    drawn = resampled_shares({str(limit): saved for limit, saved in costs.saved.items()}, costs.times)
    if not drawn:
        return "likely"
    every = np.array(list(drawn.values()))
    if primary.limit is Limit.COMPUTE:
        likelihood = float((every.max(axis=0) < LEAST_SHARE).mean())
    else:
        mine = drawn[str(primary.limit)]
        likelihood = float(((mine >= every.max(axis=0)) & (mine >= SURE_SHARE)).mean())
    word = next(word for word, least in CONFIDENT.items() if likelihood >= least)
    return "likely" if word == "sure" and steps < SURE_STEPS else word
