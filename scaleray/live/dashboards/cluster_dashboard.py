"""The dashboard Cluster: GPUs measured by NVIDIA's DCGM, nodes and Ray measured by Ray's agents, and the input."""

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
            description="As counted by Ray. Normal: as many as were started. If there are fewer, a node was lost, and "
            "its runs have restarted or are waiting for it.",
            queries=(Query(f"sum({foreign(of.NODES)})", "nodes"),),
            unit="none",
            kind="stat",
            needs="Ray",
            width=4,
        ),
        Panel(
            title="CPU",
            description="Share of all cores in use. Normal: below 0.9. If it is higher while GPUs wait, decoding and "
            "collating are the limit: add nodes for input tasks.",
            queries=(Query(f"{foreign(of.NODE_CPU)} / 100", OF_NODE),),
            unit="percentunit",
            needs="Ray",
            minimum=0,
            maximum=1,
            width=10,
        ),
        Panel(
            title="Memory of nodes",
            description="Share in use. Normal: below 0.9. At 0.95, Ray begins to kill tasks and workers.",
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
            description="Free share of the disks that hold the run folders, on the drivers' machines. Normal: above 10 "
            "%. If a disk fills up, run `scaleray checkpoint prune` or choose another checkpoint.storage_path.",
            queries=(each_run(once(live.DISK_FREE)),),
            unit="percentunit",
            minimum=0,
            maximum=1,
            thresholds=(Threshold(float("-inf"), "red"), Threshold(0.05, "orange"), Threshold(0.1, "green")),
        ),
        Panel(
            title="Disk of Ray's folder",
            description="Free share. Normal: above 10 %. Below 5 %, Ray stops spilling and creating objects.",
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
            description="Sum over all interfaces. Normal: similar on all nodes of a run. If one node is below the "
            "others, see the links on the dashboard Ranks.",
            queries=(
                Query(foreign(of.NODE_SENT), f"sent by {OF_NODE}"),
                Query(foreign(of.NODE_RECEIVED), f"received by {OF_NODE}"),
            ),
            unit="Bps",
            needs="Ray",
            minimum=0,
        ),
        Panel(
            title="Unreachable targets",
            description="Targets that Prometheus cannot scrape. Normal: 0. If a node's agent does not answer, the node "
            "is gone or its port is closed to Prometheus.",
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
            title="CPUs and GPUs allocated by Ray",
            description="Logical resources in use. Normal: as many as the runs requested. When all are in use, further "
            "runs wait.",
            queries=(Query(f"sum by (Name) ({foreign(of.RESOURCES, *IN_USE)})", "{{Name}}"),),
            unit="none",
            needs="Ray",
            minimum=0,
        ),
        Panel(
            title="Tasks",
            description="Tasks by state. Normal: a few running, which read ahead. If many are pending, no CPU is left "
            "for the input: reserving one CPU in three for it is a good start.",
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
            title="Work that no node can run",
            description="Kinds of tasks and actors that request more than any node has, and worker processes that did "
            "not start. Normal: 0. Otherwise request less or add a larger node; the node's log has the reason.",
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
            description="Memory by component. Normal: constant, a few hundred MiB each. If workers grow, the workload "
            "has a memory leak or the input reads too far ahead.",
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
            description="Share in use, by node. Normal: below 0.8. When it is full, objects are spilled to disk, which "
            "slows the input down: read less far ahead.",
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
            description="Bytes that Ray has spilled, by state. Normal: 0. If it grows, the object store is too small "
            "for the rows that the input reads ahead.",
            queries=(Query(f"sum by (State) ({foreign(of.SPILLED)})", "{{State}}"),),
            unit="bytes",
            needs="Ray",
            minimum=0,
        ),
        Panel(
            title="Waiting for input, all runs",
            description="Share of a step that rank 0 spent waiting for its rows. Normal: below 5 %. If one run waits, "
            "its transform is slow; if all runs wait, it is the storage or network that they share.",
            queries=(each_run(once(names.INPUT_WAIT_SHARE)),),
            unit="percentunit",
            minimum=0,
        ),
        Panel(
            title="Waiting for Ray Datasets",
            description="Share of time that training spent waiting for batches of a Ray Dataset. Normal: below 5 %. If "
            "it is higher, see the operators on the Data page of Ray's dashboard.",
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
