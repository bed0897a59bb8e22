"""Hardware and services of the runs: GPUs as measured by NVIDIA's DCGM, nodes and Ray as measured by Ray's agents, and
the input."""

from scaleray.common import live_metrics as live
from scaleray.common import metric_names as names
from scaleray.live import foreign as of
from scaleray.live.dashboards import variables
from scaleray.live.dashboards.gpu_dashboard import GPUS
from scaleray.live.dashboards.panels import Dashboard, Panel, Query, Row, Threshold
from scaleray.live.dashboards.queries import each_run, foreign, foreign_per_second, once, where

OF_NODE = "{{ip}}"
IN_NODE = "{{NodeAddress}}"
IN_USE = (where("State", "USED"), where("Name", "CPU|GPU", is_pattern=True))

NODES = Row(
    "Nodes",
    (
        Panel(
            title="Nodes alive",
            description="As Ray counts them. Normal: as many as were started. Fewer: a node was lost; its runs have "
            "restarted or wait for it.",
            queries=(Query(f"sum({foreign(of.NODES)})", "nodes"),),
            unit="none",
            kind="stat",
            needs="Ray",
            width=4,
        ),
        Panel(
            title="CPU",
            description="Share of all cores in use. Normal: below 0.9. Above while GPUs wait: decoding and collating "
            "are the limit; more nodes for input tasks.",
            queries=(Query(f"{foreign(of.NODE_CPU)} / 100", OF_NODE),),
            unit="percentunit",
            needs="Ray",
            minimum=0,
            maximum=1,
            width=10,
        ),
        Panel(
            title="Memory of nodes",
            description="Share in use. Normal: below 0.9. At 0.95 Ray begins to end tasks and workers.",
            queries=(Query(f"{foreign(of.NODE_MEMORY_USED)} / {foreign(of.NODE_MEMORY)}", OF_NODE),),
            unit="percentunit",
            needs="Ray",
            minimum=0,
            maximum=1,
            thresholds=(Threshold(0.9, "orange"), Threshold(0.95, "red")),
            width=10,
        ),
        Panel(
            title="Free disk",
            description="Of the disks with the folders of runs, on the machines of their drivers. Normal: above 10 %. "
            "Full: `scaleray checkpoint prune`, or another checkpoint.storage_path.",
            queries=(each_run(once(live.DISK_FREE)),),
            unit="percentunit",
            minimum=0,
            maximum=1,
            thresholds=(Threshold(float("-inf"), "red"), Threshold(0.05, "orange"), Threshold(0.1, "green")),
        ),
        Panel(
            title="Disk of Ray's folder",
            description="Free share. Normal: above 10 %; below 5 % Ray stops spilling and creating objects.",
            queries=(
                Query(
                    f"{foreign(of.NODE_DISK_FREE)} / ({foreign(of.NODE_DISK_FREE)} + {foreign(of.NODE_DISK_USED)})",
                    OF_NODE,
                ),
            ),
            unit="percentunit",
            needs="Ray",
            minimum=0,
            maximum=1,
            thresholds=(Threshold(float("-inf"), "red"), Threshold(0.05, "orange"), Threshold(0.1, "green")),
        ),
        Panel(
            title="Network of nodes",
            description="All interfaces. Normal: alike on nodes of one run. One below the others: see the links on the "
            "dashboard Ranks.",
            queries=(
                Query(foreign(of.NODE_SENT), f"sent by {OF_NODE}"),
                Query(foreign(of.NODE_RECEIVED), f"received by {OF_NODE}"),
            ),
            unit="Bps",
            needs="Ray",
            minimum=0,
        ),
        Panel(
            title="Targets that do not answer",
            description="Targets that Prometheus cannot scrape. Normal: 0. A node's agent that does not answer: the "
            "node is gone, or its port is closed to Prometheus.",
            queries=(Query(f"sum by (job, instance) (1 - {foreign(of.UP)})", "{{job}} {{instance}}"),),
            unit="none",
            minimum=0,
            maximum=1,
            decimals=0,
        ),
    ),
)

RAY = Row(
    "Ray",
    (
        Panel(
            title="CPUs and GPUs that Ray has given out",
            description="Logical resources in use. Normal: as many as the runs requested. If all are in use, "
            "further runs wait.",
            queries=(Query(f"sum by (Name) ({foreign(of.RESOURCES, *IN_USE)})", "{{Name}}"),),
            unit="none",
            needs="Ray",
            minimum=0,
        ),
        Panel(
            title="Tasks",
            description="By state. Normal: a few running, reading ahead. Many pending: no CPU is left for the input; "
            "one CPU in three for it is a good start.",
            queries=(
                Query(
                    f"sum by (State) ({foreign(of.TASKS, where('State', '(PENDING|RUNNING).*', is_pattern=True))})",
                    "{{State}}",
                ),
            ),
            unit="none",
            needs="Ray",
            minimum=0,
        ),
        Panel(
            title="Work that no node can do",
            description="Kinds of tasks and actors that request more than any node has, and worker processes that did "
            "not start. Normal: 0. Otherwise request less, or add such a node; the node's log has the reason.",
            queries=(
                Query(f"sum({foreign(of.INFEASIBLE)})", "infeasible"),
                Query(f"sum by (Reason) ({foreign(of.FAILED_STARTS)})", "not started: {{Reason}}"),
            ),
            unit="none",
            needs="Ray",
            minimum=0,
        ),
        Panel(
            title="Memory of Ray's processes",
            description="By component. Normal: a few hundred MiB each, and flat. Workers that grow: a leak in the "
            "workload, or the input reads too far ahead.",
            queries=(Query(f"sum by (Component) ({foreign(of.PROCESS_MEMORY)})", "{{Component}}"),),
            unit="bytes",
            needs="Ray",
            minimum=0,
        ),
    ),
)

INPUT = Row(
    "Object store and input",
    (
        Panel(
            title="Object store in use",
            description="Share, by node. Normal: below 0.8. Full: objects go to disk and slow the input down; read "
            "less far ahead.",
            queries=(
                Query(
                    f"{foreign(of.OBJECT_STORE_USED)} / ({foreign(of.OBJECT_STORE_USED)} + "
                    f"{foreign(of.OBJECT_STORE_FREE)})",
                    IN_NODE,
                ),
            ),
            unit="percentunit",
            needs="Ray",
            minimum=0,
            maximum=1,
        ),
        Panel(
            title="Objects on disk",
            description="Bytes that Ray has spilled, by state. Normal: 0. Growing: the object store is too small for "
            "what the input reads ahead.",
            queries=(Query(f"sum by (State) ({foreign(of.SPILLED)})", "{{State}}"),),
            unit="bytes",
            needs="Ray",
            minimum=0,
        ),
        Panel(
            title="Waiting for input, all runs",
            description="Share of a step that rank 0 waited for its rows. Normal: below 5 %. One run: its own "
            "transform; all runs: the store or the network that they share.",
            queries=(each_run(once(names.INPUT_WAIT_SHARE)),),
            unit="percentunit",
            minimum=0,
        ),
        Panel(
            title="Waiting for Ray Datasets",
            description="Share of time that training waited for batches of a Ray Dataset. Normal: below 5 %. "
            "Otherwise see the operators in Ray's dashboard, Data.",
            # cumulative, although Ray calls it a gauge
            queries=(Query(foreign_per_second(of.ITER_BLOCKED_S, "dataset"), "{{dataset}}"),),
            unit="percentunit",
            needs="Ray Dataset",
            minimum=0,
        ),
    ),
)

DASHBOARD = Dashboard(
    name="cluster",
    title="scaleray: cluster",
    description="GPUs, nodes, Ray, its object store, and the input of all runs.",
    variables=(*variables.TARGETS, variables.RUN, variables.ID, variables.NODE_OF_RAY),
    rows=(GPUS, NODES, RAY, INPUT),
    notes=(variables.FIRING,),
)
