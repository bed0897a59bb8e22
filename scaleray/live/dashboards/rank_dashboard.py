"""The dashboard Ranks: heat maps of late ranks and slow links, with one line per rank."""

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
"""Number of ranks in a list of the worst."""

LATE = Row(
    "Who is late",
    (
        Panel(
            title="Lateness",
            description="Delay of each rank behind the first one at the collectives of a step, for which all others "
            "wait. Normal: a few per cent of the step, on changing ranks. A line that stays dark is a straggler: "
            "compare its node's GPUs (dashboard Cluster) and its phases below.",
            queries=(in_order_of_ranks(by_rank(live.LATENESS_S)),),
            unit="s",
            kind="heatmap",
            width=16,
            height=12,
        ),
        Panel(
            title="Latest ranks",
            description="The ten ranks that the others currently wait for longest. Normal: all similar. If the first "
            "is far worse than the second, it is the straggler.",
            queries=(each_run(f"topk({MOST}, {by_rank(live.LATENESS_S)})", OF_RANK),),
            unit="s",
            kind="bargauge",
            minimum=0,
            width=8,
            height=12,
        ),
        Panel(
            title="Latest nodes",
            description="Mean lateness of a node's ranks. Normal: similar on all nodes. If all ranks of one node are "
            "late, the cause is in the node: heat, power, a neighbour on its network, or a slow disk.",
            queries=(each_run(f"avg by ({OF_RUNS}, {NODE}) ({select(live.LATENESS_S)})", f"{{{{{NODE}}}}}"),),
            unit="s",
            minimum=0,
        ),
        Panel(
            title="Lateness of the worst rank",
            description="The worst rank and the median rank over time. Normal: close together. If they separate at "
            "some point, check the node's events for what changed then.",
            queries=(
                each_run(over(live.LATENESS_S, "max"), "worst"),
                each_run(f"quantile by ({OF_RUNS}) (0.5, {select(live.LATENESS_S)})", "median"),
            ),
            unit="s",
            minimum=0,
        ),
        Panel(
            title="Workers that report",
            description="Ranks that publish series, and the number of workers. Normal: equal. If ranks are missing, a "
            "worker or its node's agent is gone; the run restarts, or fails and names that rank.",
            queries=(
                each_run(over(live.LAST_STEP_TIMESTAMP_S, "count"), "heard"),
                each_run(once(names.WORKERS), "workers"),
            ),
            unit="none",
            minimum=0,
            decimals=0,
        ),
        Panel(
            title="Time since the last step, by rank",
            description="Normal: all similar. In a hang, all wait for the ranks that are in an earlier step or whose "
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
            description="Speed of the collectives after all ranks have arrived, relative to the best in this run. "
            "Normal: above 0.7. All ranks end a collective together, so this shows all links at once. If it is lower, "
            "the alert slow link starts a measurement of each pair, and Slowest link names the slow one.",
            queries=(each_run(once(live.LINK_RATIO)),),
            unit="percentunit",
            minimum=0,
            maximum=1,
            thresholds=(Threshold(float("-inf"), "red"), Threshold(0.7, "green")),
        ),
        Panel(
            title="Slowest link",
            description="The slowest link between two ranks as a share of the median link, as measured in the last ten "
            "minutes because links were slow. Normal: nothing here, or above 0.5: then all links are slower, because "
            "of a neighbour on the network. Below 0.5, check that cable and its two nodes, or only the first node for "
            "`to rank any`. With two ranks there is one link, so nothing is shown.",
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
            description="Bandwidth of that link in bytes per second. Normal: nothing here, or the value that `scaleray "
            "doctor` measured between these nodes.",
            queries=(each_run(once(live.SLOWEST_LINK_BYTES_PER_S, *ENDS), LINK),),
            unit="Bps",
            needs="slow link",
            kind="bargauge",
            minimum=0,
        ),
    ),
)

WORK = Row(
    "Activity of each rank",
    (
        Panel(
            title="Step time by rank",
            description="Normal: similar, as each step waits for the last rank. Ranks differ only with strategies that "
            "synchronise rarely (local_sgd, diloco, gossip, async_sgd).",
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
                    "Normal: near 0. If one line is high, check that node's disk and network; if all are, check the "
                    "input on the dashboard Cluster.",
                ),
                (
                    "Forward by rank",
                    "forward",
                    "Normal: similar. A darker line means a slower device, or more work per row (for rows of unequal "
                    "length, set data.bucket_by_length).",
                ),
                (
                    "Backward by rank",
                    "backward",
                    "Normal: similar; it includes the communication that it hides. A rank with a darker line that is "
                    "also late above has a slower device.",
                ),
            )
        ),
        Panel(
            title="Memory",
            description="Memory in use now. Normal: similar. A rank far above the others will run out first; causes "
            "are the first and last pipeline stage, or rows of unequal length.",
            queries=(in_order_of_ranks(by_rank(live.MEMORY_BYTES, where("kind", "used"))),),
            unit="bytes",
            kind="heatmap",
            width=12,
            height=10,
        ),
        Panel(
            title="Memory relative to its limit",
            description="Peak memory of each rank as a share of its limit. Normal: below 0.9. If it is higher, use a "
            "smaller micro-batch, activation checkpointing or fsdp; `scaleray plan` shows which settings fit.",
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
    description="Late ranks, slow links, and the activity of each rank.",
    variables=variables.RANKS,
    rows=(LATE, LINKS, WORK),
    notes=(variables.FIRING, variables.RESTARTED),
)
