"""Check of how far each node's clock is ahead of the driver's, from round trips."""

from collections.abc import Sequence

from scaleray.clusters.preflight.check_limits import CLOCK_RED_S, CLOCK_YELLOW_S
from scaleray.clusters.preflight.check_texts import node_list
from scaleray.records.doctor_record import ClockSeen, Measured, PreflightCheck, Verdict
from scaleray.records.text.units import seconds

NAME = "clocks"
ALLOWED = f"at most {seconds(CLOCK_YELLOW_S)} apart"


def offset(node: str, trips: Sequence[tuple[float, float, float]]) -> ClockSeen:
    """Compute a clock's offset from round trips (request, its clock, answer), with request and answer timed by the
    driver. As in NTP (RFC 5905), the shortest trip is used, and the offset is known to within half of it."""
    asked, there, answered = min(trips, key=lambda trip: trip[2] - trip[0])
    return ClockSeen(node=node, ahead_s=there - (asked + answered) / 2, within_s=(answered - asked) / 2)


def check_clocks(measured: Measured) -> PreflightCheck:
    """Check all nodes' clocks, ignoring differences within the uncertainty."""
    if len({node.machine or node.name for node in measured.nodes}) < 2 or not measured.clocks:
        why = measured.not_measured.get("clocks", "a single machine has a single clock")
        return PreflightCheck(name=NAME, verdict="not applicable", found=why, allowed=ALLOWED)
    clocks = [*measured.clocks, ClockSeen(node="the driver", ahead_s=0.0, within_s=0.0)]
    first, last = (pick(clocks, key=lambda one: one.ahead_s) for pick in (min, max))
    apart, within = last.ahead_s - first.ahead_s, first.within_s + last.within_s
    sure = apart - within
    verdict: Verdict = "red" if sure > CLOCK_RED_S else "yellow" if sure > CLOCK_YELLOW_S else "green"
    found = f"at most {seconds(apart)} apart, ± {seconds(within)}"
    remedy = ""
    if verdict != "green":
        wrong = [c for c in measured.clocks if abs(c.ahead_s) - c.within_s > CLOCK_YELLOW_S]
        ahead = [f"{c.node} {seconds(abs(c.ahead_s))} {'ahead' if c.ahead_s > 0 else 'behind'}" for c in wrong]
        found += f": {node_list(ahead)}" if ahead else ""
        remedy = "run chrony or systemd-timesyncd there, with the same server on all nodes: chronyc tracking"
    return PreflightCheck(name=NAME, verdict=verdict, found=found, allowed=ALLOWED, remedy=remedy)
