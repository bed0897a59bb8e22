"""Late ranks and slow links: one line of a heat map for every rank."""

from scaleray.common import live_metrics as live
from scaleray.common import metric_names as names
from scaleray.live.dashboards import variables
from scaleray.live.dashboards.panels import Dashboard, Panel, Row, Threshold
from scaleray.live.dashboards.queries import (
    NODE,
    OF_RUNS,
    RANK,
    by_rank,
    each_run,
    in_order_of_ranks,
    once,
    over,
    select,
    where,
)

OF_RANK = f"rank {{{{{RANK}}}}} on {{{{{NODE}}}}}"
ENDS = live.SLOWEST_LINK.labels
LINK = "rank {{source}} to rank {{to}}"
MOST = 10
"""Length of a list of the worst ranks."""

LATE = Row(
    "Who is late",
    (
        Panel(
            title="Lateness",
            description="How long after the first rank each one reached the collectives of a step: all others wait "
            "that long. Normal: a few per cent of the step, on changing ranks. One line that stays dark is "
            "a straggler: compare its node's GPUs (dashboard Cluster) and its phases below.",
            queries=(in_order_of_ranks(by_rank(live.LATENESS_S)),),
            unit="s",
            kind="heatmap",
            width=16,
            height=12,
        ),
        Panel(
            title="Latest ranks",
            description="The ten ranks that others wait for longest, now. Normal: all alike. One far ahead of the "
            "second is the straggler.",
            queries=(each_run(f"topk({MOST}, {by_rank(live.LATENESS_S)})", OF_RANK),),
            unit="s",
            kind="bargauge",
            minimum=0,
            width=8,
            height=12,
        ),
        Panel(
            title="Latest nodes",
            description="Mean lateness of a node's ranks. Normal: all alike. A node whose ranks are all late has a "
            "cause of its own: heat, power, a neighbour on its network, a slow disk.",
            queries=(each_run(f"avg by ({OF_RUNS}, {NODE}) ({select(live.LATENESS_S)})", f"{{{{{NODE}}}}}"),),
            unit="s",
            minimum=0,
        ),
        Panel(
            title="Lateness of the worst rank",
            description="Over time, with the median rank. Normal: close together. Apart from some moment on: see "
            "what changed then, in the events of the node.",
            queries=(
                each_run(over(live.LATENESS_S, "max"), "worst"),
                each_run(f"quantile by ({OF_RUNS}) (0.5, {select(live.LATENESS_S)})", "median"),
            ),
            unit="s",
            minimum=0,
        ),
        Panel(
            title="Workers that report",
            description="Ranks with their own series, and the number of workers. Normal: equal. Fewer: a "
            "worker is gone, or its node's agent; the run restarts, or will fail with the name of that rank.",
            queries=(
                each_run(over(live.LAST_STEP_TIMESTAMP_S, "count"), "heard"),
                each_run(once(names.WORKERS), "workers"),
            ),
            unit="none",
            minimum=0,
            decimals=0,
        ),
        Panel(
            title="Since the last step, by rank",
            description="Normal: all alike. In a hang, all wait for the ranks that are in an earlier step or whose "
            "line has ended.",
            queries=(in_order_of_ranks(f"time() - {by_rank(live.LAST_STEP_TIMESTAMP_S)}"),),
            unit="s",
            kind="heatmap",
        ),
    ),
)

LINKS = Row(
    "Which link",
    (
        Panel(
            title="Links",
            description="Speed of the collectives when all ranks have come, over their best in this run. Normal: above "
            "0.7. Ranks end a collective together, so it shows all links at once. Below: once the alert slow "
            "link has fired, each pair is measured, and Slowest link names the one.",
            queries=(each_run(once(live.LINK_RATIO)),),
            unit="percentunit",
            minimum=0,
            maximum=1,
            thresholds=(Threshold(float("-inf"), "red"), Threshold(0.7, "green")),
        ),
        Panel(
            title="Slowest link",
            description="The slowest link between two ranksas a share of the median of all, as measured "
            "when links were last slow, in the last ten minutes. Normal: nothing here, or above 0.5: then all carry "
            "less, which is a neighbour on the network. Below: that cable or its two nodes; to rank any: the first "
            "one's node. Two ranks have one link, so nothing is shown.",
            queries=(each_run(once(live.SLOWEST_LINK, *ENDS), LINK),),
            unit="percentunit",
            needs="slow link",
            kind="bargauge",
            minimum=0,
            maximum=1,
            thresholds=(Threshold(float("-inf"), "red"), Threshold(0.5, "green")),
        ),
        Panel(
            title="Bandwidth of the slowest link",
            description="The same in bytes a second. Normal: nothing here, or what `scaleray doctor` measured between "
            "these nodes.",
            queries=(each_run(once(live.SLOWEST_LINK_BYTES_PER_S, *ENDS), LINK),),
            unit="Bps",
            needs="slow link",
            kind="bargauge",
            minimum=0,
        ),
    ),
)

WORK = Row(
    "What each rank does",
    (
        Panel(
            title="Step time by rank",
            description="Normal: alike, as each step waits for the last rank. Apart only where ranks train apart "
            "between meetings (local_sgd, diloco, gossip, async_sgd).",
            queries=(in_order_of_ranks(by_rank(names.STEP_TIME_S)),),
            unit="s",
            kind="heatmap",
            width=12,
            height=10,
        ),
        *(
            Panel(
                title=title,
                description=description,
                queries=(in_order_of_ranks(by_rank(live.PHASE_S, where("phase", phase))),),
                unit="s",
                kind="heatmap",
                width=12,
                height=10,
            )
            for title, phase, description in (
                (
                    "Input by rank",
                    "input",
                    "Normal: near 0. One line: that node's disk or network; all lines: the input as a whole, see "
                    "the dashboard Cluster.",
                ),
                (
                    "Forward by rank",
                    "forward",
                    "Normal: alike. One line darker: a slower device, or more work a row (rows of unequal length: "
                    "data.bucket_by_length).",
                ),
                (
                    "Backward by rank",
                    "backward",
                    "Normal: alike; it includes the communication that it hides. One line darker "
                    "and late above: a slower device.",
                ),
            )
        ),
        Panel(
            title="Memory",
            description="In use now. Normal: alike. One rank far above the others will be the first to run out: first "
            "and last stage of a pipeline, or rows of unequal length.",
            queries=(in_order_of_ranks(by_rank(live.MEMORY_BYTES, where("kind", "used"))),),
            unit="bytes",
            kind="heatmap",
            width=12,
            height=10,
        ),
        Panel(
            title="Memory over its limit",
            description="Peak of each rank over what it can have. Normal: below 0.9. Above: a smaller micro-batch, "
            "activation checkpointing, or fsdp; `scaleray plan` says what would fit.",
            queries=(
                in_order_of_ranks(
                    f"{by_rank(live.MEMORY_BYTES, where('kind', 'peak'))} / {by_rank(live.MEMORY_LIMIT_BYTES)}"
                ),
            ),
            unit="percentunit",
            kind="heatmap",
            width=12,
            height=10,
        ),
    ),
)

DASHBOARD = Dashboard(
    name="ranks",
    title="scaleray: ranks",
    description="Who is late, which link is slow, and what each rank does.",
    variables=variables.RANKS,
    rows=(LATE, LINKS, WORK),
    notes=(variables.FIRING, variables.RESTARTED),
)
