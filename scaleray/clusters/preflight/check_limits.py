"""Requirements for nodes, each limit with its source. Limits that we chose are marked as such; values that may be low
just because a machine is busy give yellow, not red.
"""

MIB, GIB = 2**20, 2**30

OPEN_FILES_RED, OPEN_FILES_YELLOW = 4096, 8192
"""Limits of open files: Ray warns below 4096 and recommends 8192 (`ray._private.worker`, Ray 2.60)."""
PROCESSES_YELLOW = 4096
"""Our choice, not measured: threads count as processes, and each Ray process has dozens of them."""
SHM_RED = 128 * MIB
"""Docker and Kubernetes give a container 64 MiB of /dev/shm, too little for NCCL and Ray's object store."""
SHM_YELLOW = GIB
"""NCCL's troubleshooting page recommends --shm-size=1g."""
OBJECT_STORE_YELLOW = 256 * MIB
"""Our choice: input tasks keep a few blocks of rows (up to 128 MiB each, Ray Data's default) in flight; Ray's own
minimum is 75 MiB."""
DISK_FULL_RED = 0.95
"""Used share of a disk above which Ray stops writing objects to it (RAY_local_fs_capacity_threshold, default 0.95)."""
DISK_FULL_YELLOW = 0.90
DISK_FREE_RED, DISK_FREE_YELLOW = GIB, 10 * GIB
"""Our choice: a checkpoint with Adam takes 12 to 16 bytes per parameter, so 10 GiB hold 700 million parameters."""
PORTS_YELLOW = 10_000
"""Our choice: Linux offers 28,232 ports by default; a node with 8 workers uses a few hundred."""
CLOCK_YELLOW_S = 0.1
"""Our choice: NTP keeps machines in one network within 10 ms; beyond 0.1 s, ranks' times are not comparable."""
CLOCK_RED_S = 10.0
"""Our choice: a third of the silence after which `watch` reports a run as lost (`records.live.LOST_S`)."""
GPU_MEMORY_RED, GPU_MEMORY_YELLOW = 0.10, GIB
"""Our choice, from memory: an idle GPU's driver uses up to 600 MiB; a tenth of the memory means a training process."""
GPU_BUSY_YELLOW = 0.10
"""Our choice: an idle GPU shows 0 %, one with a desktop a few percent."""
STORAGE_YELLOW_BYTES_PER_S = 100e6
"""A tenth of the write rate that the planner assumes for a node (`planner.cost.checkpoint_stalls`)."""
STORAGE_RED_BYTES_PER_S = 5e6
"""Our choice: at this rate, a checkpoint of 3 GB takes ten minutes, the usual interval."""
SLOW_CARD_YELLOW, SLOW_CARD_RED = 0.90, 0.75
"""Share of the GPUs' median. MegaScale (NSDI 2024) removed machines that were 10 % slower than others (from memory); a
GPU throttled by heat or power loses a quarter or more."""
SLOW_PROCESSOR_YELLOW, SLOW_PROCESSOR_RED = 0.60, 0.25
"""Our choice: the same share for CPUs, which may be shared; the fastest of several products counts."""
CATALOGUE_YELLOW, CATALOGUE_RED = 0.70, 0.40
"""Share of the value in the planner's catalogue. Our choice: published all-reduces and products are within 30 % of it
(docs/plan.md); NVLink that fell back to PCIe reaches 0.13, InfiniBand that fell back to sockets 0.2."""
SLOW_LINK_YELLOW, SLOW_LINK_RED = 0.70, 0.40
"""Share of the median of links of the same type. Our choice: pairs over one switch are within a few percent of each
other; a cable at half its speed reaches 0.5, an adapter at a quarter 0.25."""
SLOW_LOCAL_LINK_YELLOW, SLOW_LOCAL_LINK_RED = 0.30, 0.05
"""The same share between processes of one machine without GPUs, which share its cores with other processes."""
