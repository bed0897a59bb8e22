"""Rules for idle, slow and faulty GPUs, based on NVIDIA's DCGM exporter.

The exporter provides the counters of throttling and memory errors only if its field list has them; its default list has
them commented out. A GPU belongs to a run that trains on its node, which is given by the label `node` that Prometheus
is configured to add, or else by the exporter's address. The node of a run without Ray is the host of its target."""

from scaleray.common import live_metrics as live
from scaleray.common.metric import prometheus_name
from scaleray.config.alerts import AlertLimits
from scaleray.live import foreign
from scaleray.live.rules.rule import OF_GPU, Match, Rule
from scaleray.live.rules.series_history import SeriesHistory

ACTIVE = foreign.GPU_ENGINE_ACTIVE.name
THROTTLED = tuple(metric.name for metric in foreign.GPU_THROTTLED[:2])
"""Counters of throttling in nanoseconds, as in NVML; field lists that declare microseconds are wrong:
https://github.com/NVIDIA/dcgm-exporter/pull/589. Not measured here."""
ECC = (foreign.GPU_ECC_DOUBLE_BIT.name, foreign.GPU_REMAPPED_ROWS.name)
REMAP_FAILED = foreign.GPU_REMAP_FAILURE.name
XID = foreign.GPU_XID.name
APPLICATION_XIDS = (13, 31, 43, 45)
"""Xid numbers caused by errors of the application, which make the run itself fail. Source: NVIDIA's Xid catalogue."""
LOOK_BACK_S = 300.0
IN_DCGM = "gpu, UUID, instance"
NO_NODE = "local"
"""Node of a run without Ray."""


def _idle_query(limits: AlertLimits) -> str:
    def busy(by: str, node: str) -> str:
        mean = f"avg_over_time({ACTIVE}{{node{node}}}[{LOOK_BACK_S:g}s])"
        return f"avg by ({by}) ({mean}) < {limits.gpu_busy_share:g}"

    def trains(node: str) -> str:
        return f"{prometheus_name(live.LAST_STEP_TIMESTAMP_S)}{{node{node}}} offset {LOOK_BACK_S:g}s"

    labelled, by_address = busy(f"{IN_DCGM}, node", '!=""'), busy(IN_DCGM, '=""')
    on_ray, without_ray = trains(f'!="{NO_NODE}"'), trains(f'="{NO_NODE}"')
    of_runs = f"count by (node) ({on_ray} or {_at_its_host(without_ray)})"
    return f"({labelled} or {_at_its_host(by_address)}) and on (node) {of_runs}"


def _at_its_host(series: str) -> str:
    """Series with the label `node` set to the host from which they are scraped."""
    return f'label_replace({series}, "node", "$1", "instance", "([^:]+)(:.*)?")'


def _idle(seen: SeriesHistory, limits: AlertLimits) -> Match | None:
    if not seen.knows_since(ACTIVE, LOOK_BACK_S):
        return None
    for gpu in seen.newest(ACTIVE):
        busy = seen.past(ACTIVE, last_s=LOOK_BACK_S, of=gpu)
        if len(busy) and busy.mean() < limits.gpu_busy_share:
            return Match(float(busy.mean()), gpu)
    return None


def _throttled_query(limits: AlertLimits) -> str:
    rates = (
        f"max by ({IN_DCGM}) (rate({counter}[{LOOK_BACK_S:g}s])) / {foreign.NANOSECONDS:g}" for counter in THROTTLED
    )
    return " or ".join(f"{rate} > {limits.gpu_throttled_share:g}" for rate in rates)


def _ecc_query(limits: AlertLimits) -> str:
    grown = (f"max by ({IN_DCGM}) (increase({counter}[{LOOK_BACK_S:g}s])) > 0" for counter in ECC)
    return " or ".join([*grown, f"max by ({IN_DCGM}) ({REMAP_FAILED}) > 0"])


def _xid_query(limits: AlertLimits) -> str:
    return f"max by ({IN_DCGM}) ({XID}) != 0 " + " ".join(f"!= {number}" for number in APPLICATION_XIDS)


RULES = (
    Rule(
        "gpu_idle",
        "warning",
        "{of} was busy for only {value} of the last five minutes",
        "share",
        "An idle GPU costs as much as a busy one.",
        "scaleray profile RUN shows whether input, host or communication is the cause. For small kernels, set "
        "compilation.what blocks or a larger batch.micro_size.",
        ("cluster", "GPU activity"),
        _idle_query,
        _idle,
        of=OF_GPU,
    ),
    Rule(
        "gpu_throttled",
        "warning",
        "{of} was slowed down by power or heat for {value} of the last five minutes",
        "share",
        "The slowest GPU limits the speed of all.",
        "Check its temperature and power limit, and the node's cooling. Exclude the node until it is fixed "
        "(scale.label_selector).",
        ("cluster", "GPU throttling"),
        _throttled_query,
        for_s=30,
        of=OF_GPU,
    ),
    Rule(
        "gpu_ecc",
        "critical",
        "{of} has memory errors that cannot be corrected",
        "count",
        "Such an error ends the process that encounters it, and more will follow.",
        "Drain the node, reset the GPU, and replace it if rows cannot be remapped.",
        ("cluster", "GPU errors"),
        _ecc_query,
        of=OF_GPU,
    ),
    Rule(
        "gpu_xid",
        "critical",
        "{of} has reported Xid {value}",
        "count",
        "After most Xids, the GPU or its links cannot be used until a reset: the run hangs or fails.",
        "Look up the number in NVIDIA's Xid catalogue, check the node's kernel log, and drain the node. 79 means a "
        "lost GPU, 74 a failed link.",
        ("cluster", "GPU errors"),
        _xid_query,
        of=OF_GPU,
    ),
)
