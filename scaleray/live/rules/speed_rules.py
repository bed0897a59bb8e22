"""Rules for the speed of a run: stragglers, slow links, slow input, and slowdown against its past or the prediction."""

import numpy as np

from scaleray.common import live_metrics as live
from scaleray.common import metric_names as names
from scaleray.common.metric import prometheus_name
from scaleray.config.alerts import AlertLimits
from scaleray.live.rules.promql import RUN, of_rank, of_run, over
from scaleray.live.rules.rule import OF_LINK, OF_RANK, Match, Rule
from scaleray.live.rules.series_history import SeriesHistory

LEAST_LATENESS_S = 0.001
"""Smallest lateness in seconds that counts; less is scheduling noise of the host, see `profiling/lateness.py`."""
RECENT_S, PAST_S, LEAST_PAST_S = 60.0, 1800.0, 120.0
"""Seconds of the recent mean, of the earlier median with which it is compared, and the shortest history for that."""
LINK_PAST_S, LINK_RECENT_S, LEAST_EXPOSED = 3600.0, 30.0, 0.1
"""Minimum share of a step spent waiting for communication for slow collectives to be reported. They are compared with
their own median of the last hour, since their best value means little on a shared machine."""
LATENESS, STEP_TIME = prometheus_name(live.LATENESS_S), prometheus_name(names.STEP_TIME_S)
EXPOSED = prometheus_name(live.EXPOSED_COMMUNICATION_SHARE)
SLOWEST_LINK = prometheus_name(live.SLOWEST_LINK)
LINK_RATIO, WORLD_SIZE = prometheus_name(live.LINK_RATIO), prometheus_name(names.WORKERS)
SAMPLES_PER_S, INPUT_WAIT = prometheus_name(names.SAMPLES_PER_S), prometheus_name(names.INPUT_WAIT_SHARE)
OVER_PREDICTION = prometheus_name(live.EFFICIENCY_OVER_PREDICTION)


def _straggler_query(limits: AlertLimits) -> str:
    late = of_rank(live.LATENESS_S)
    share = f"({late} > {LEAST_LATENESS_S:g}) / on ({RUN}) group_left () {of_run(names.STEP_TIME_S)}"
    return f"{share} > {limits.straggler_share:g}"


def _straggler(seen: SeriesHistory, limits: AlertLimits) -> Match | None:
    step_s = seen.last(STEP_TIME)
    late = {of: value for of, value in seen.newest(LATENESS).items() if value > LEAST_LATENESS_S}
    if not late or not step_s:
        return None
    rank = max(late, key=lambda of: late[of])
    share = late[rank] / step_s
    return Match(share, rank) if share > limits.straggler_share else None


def _slow_link_query(limits: AlertLimits) -> str:
    usual = over("quantile_over_time", live.LINK_RATIO, LINK_PAST_S, first="0.5", ago_s=LINK_RECENT_S)
    slower = f"{LINK_RATIO} / ({usual} and {LINK_RATIO} offset {2 * LINK_RECENT_S:g}s) < {limits.link_ratio:g}"
    costs = f"{of_run(live.EXPOSED_COMMUNICATION_SHARE)} > {LEAST_EXPOSED:g}"
    return f"min by ({RUN}) ({slower}) and on ({RUN}) {costs}"


def _slow_link(seen: SeriesHistory, limits: AlertLimits) -> Match | None:
    now = seen.last(LINK_RATIO)
    if now is None or (seen.last(EXPOSED) or 0.0) <= LEAST_EXPOSED:
        return None
    usual = seen.past(LINK_RATIO, last_s=LINK_PAST_S + LINK_RECENT_S, until_s=LINK_RECENT_S)
    if not len(usual) or not seen.knows_since(LINK_RATIO, 2 * LINK_RECENT_S):
        return None
    ratio = now / max(float(np.median(usual)), 1e-9)
    return Match(ratio) if ratio < limits.link_ratio else None


def _slow_pair(seen: SeriesHistory, limits: AlertLimits) -> Match | None:
    found = seen.newest(SLOWEST_LINK)
    slowest = min(found, key=lambda of: found[of], default=None)
    if slowest is None or found[slowest] >= limits.pair_ratio:
        return None
    return Match(found[slowest], slowest)


def _slower_than_before_query(limits: AlertLimits) -> str:
    recent = f"max by ({RUN}) ({over('avg_over_time', names.SAMPLES_PER_S, RECENT_S)})"
    median = over("quantile_over_time", names.SAMPLES_PER_S, PAST_S, first="0.5", ago_s=RECENT_S)
    past = f"(max by ({RUN}) ({median}) and max by ({RUN}) ({SAMPLES_PER_S} offset {RECENT_S + LEAST_PAST_S:g}s))"
    resized = f"max by ({RUN}) ({over('changes', names.WORKERS, PAST_S + RECENT_S)}) > 0"
    return f"{recent} / {past} < {limits.throughput_ratio:g} unless {resized}"


def _slower_than_before(seen: SeriesHistory, limits: AlertLimits) -> Match | None:
    recent = seen.past(SAMPLES_PER_S, last_s=RECENT_S)
    past = seen.past(SAMPLES_PER_S, last_s=PAST_S + RECENT_S, until_s=RECENT_S)
    sizes = seen.past(WORLD_SIZE, last_s=PAST_S + RECENT_S)
    is_known = len(recent) and len(past) and seen.knows_since(SAMPLES_PER_S, RECENT_S + LEAST_PAST_S)
    if not is_known or len(np.unique(sizes)) > 1:
        return None
    usual = float(np.median(past))
    ratio = float(recent.mean()) / usual if usual > 0 else 1.0
    return Match(ratio) if ratio < limits.throughput_ratio else None


def _slower_than_predicted(seen: SeriesHistory, limits: AlertLimits) -> Match | None:
    ratio = seen.last(OVER_PREDICTION)
    return Match(ratio) if ratio is not None and ratio < limits.predicted_ratio else None


def _input_starved(seen: SeriesHistory, limits: AlertLimits) -> Match | None:
    share = seen.last(INPUT_WAIT)
    return Match(share) if share is not None and share > limits.input_wait_share else None


RULES = (
    Rule(
        "straggler",
        "warning",
        "{of} arrives at collectives {value} of a step later than the others",
        "share",
        "All other workers wait for that share of every step.",
        "Compare the phases of this rank with those of the others: its own work (use shares.by speed or another node), "
        "its input, or a throttled GPU. scaleray profile RUN names the phase and the layers.",
        ("ranks", "Lateness"),
        _straggler_query,
        _straggler,
        for_s=20,
        of=OF_RANK,
    ),
    Rule(
        "slow_link",
        "warning",
        "collectives run at {value} of their usual rate after all ranks have arrived",
        "share",
        "Collectives are as fast as the slowest link: all workers wait for it.",
        "Once each pair is measured (alerts.measures_links), the alert slow_pair or an event of the run names the "
        "link; scaleray profile -c FILE also measures links. Until then, send fewer bytes with compression.name bf16 "
        "or local_sgd.",
        ("ranks", "Links"),
        _slow_link_query,
        _slow_link,
        for_s=20,
    ),
    Rule(
        "slow_pair",
        "warning",
        "the link from {of} runs at {value} of the rate of the others",
        "share",
        "All workers wait for this one link in every step.",
        "Check network errors, cables and neighbours of its two nodes; `to rank any` means all links of the first "
        "rank: check only its node. Exclude the node until it is fixed (scale.label_selector).",
        ("ranks", "Slowest link"),
        lambda limits: f"min by ({RUN}, source, to) ({SLOWEST_LINK}) < {limits.pair_ratio:g}",
        _slow_pair,
        of=OF_LINK,
    ),
    Rule(
        "slower_than_before",
        "warning",
        "throughput is {value} of what it was in the half hour before",
        "share",
        "The same training costs more.",
        "Check what changed at that time: phases, lateness, input, or GPU clocks. scaleray compare RUN OTHER finds the "
        "difference between two runs.",
        ("run", "Throughput"),
        _slower_than_before_query,
        _slower_than_before,
        for_s=60,
    ),
    Rule(
        "slower_than_predicted",
        "warning",
        "throughput is {value} of what the study or the planner predicts",
        "share",
        "The added workers do not give the expected speed.",
        "scaleray profile RUN names the bottleneck; the study's report names the bottleneck of each of its points.",
        ("scaling", "Measured over predicted"),
        lambda limits: f"{of_run(live.EFFICIENCY_OVER_PREDICTION)} < {limits.predicted_ratio:g}",
        _slower_than_predicted,
        for_s=60,
    ),
    Rule(
        "input_starved",
        "warning",
        "{value} of a step is spent waiting for input",
        "share",
        "GPUs are idle while they wait for rows.",
        "Read further ahead (data.prefetch_mib), read in Ray tasks on more CPUs (data.readers ray), or make rows "
        "cheaper to process; scaleray profile RUN shows the gain.",
        ("run", "Input"),
        lambda limits: f"{of_run(names.INPUT_WAIT_SHARE)} > {limits.input_wait_share:g}",
        _input_starved,
        for_s=20,
    ),
)
