"""Requirements on a node, each limit with its source. Limits of our choice are marked as such; a measurement that only
comes near a limit on a busy machine is yellow, not red.
"""

from __future__ import annotations

MIB, GIB = 2**20, 2**30

OPEN_FILES_RED, OPEN_FILES_YELLOW = 4096, 8192
"""Ray warns below 4096 open files and recommends 8192 (`ray._private.worker`, Ray 2.60)."""
PROCESSES_YELLOW = 4096
"""Ours, not measured: threads count as processes here, and each process of Ray has dozens of them."""
SHM_RED = 128 * MIB
"""Docker and Kubernetes give a container 64 MiB at /dev/shm, too little for NCCL and Ray's object store."""
SHM_YELLOW = GIB
"""NCCL's page on troubleshooting asks for --shm-size=1g."""
OBJECT_STORE_YELLOW = 256 * MIB
"""Chosen by us: input tasks keep a few blocks of rows (up to 128 MiB each, Ray Data's default) in flight; Ray's own
minimum is 75 MiB."""
DISK_FULL_RED = 0.95
"""Ray stops writing objects to a disk that is fuller (RAY_local_fs_capacity_threshold, default 0.95)."""
DISK_FULL_YELLOW = 0.90
DISK_FREE_RED, DISK_FREE_YELLOW = GIB, 10 * GIB
"""Our choice: a checkpoint with Adam takes 12 to 16 bytes a parameter; 10 GiB is one of 700 million parameters."""
PORTS_YELLOW = 10_000
"""Our choice: Linux hands out 28,232 ports by default; a node of 8 workers listens on and connects to some hundred."""
CLOCK_YELLOW_S = 0.1
"""Our choice: NTP keeps machines of one network within 10 ms; beyond 0.1 s, times of ranks cannot be compared."""
CLOCK_RED_S = 10.0
"""Our choice: a third of the silence after which `watch` reports a run as lost (`records.live.LOST_S`)."""
GPU_MEMORY_RED, GPU_MEMORY_YELLOW = 0.10, GIB
"""Our choice, from memory: an idle card's driver keeps up to 600 MiB; a tenth of the card is a process that trains."""
GPU_BUSY_YELLOW = 0.10
"""Our choice: an idle card shows 0 %; a desktop some percent."""
STORAGE_YELLOW_BYTES_PER_S = 100e6
"""A tenth of the planner's write rate of a node (`planner.cost.checkpoint_stalls`)."""
STORAGE_RED_BYTES_PER_S = 5e6
"""Our choice: a checkpoint of 3 GB would take ten minutes, the usual interval."""
SLOW_CARD_YELLOW, SLOW_CARD_RED = 0.90, 0.75
"""Share of the other cards' median. MegaScale (NSDI 2024), from memory, removed machines that were 10 % slower than
others; a card throttled by heat or power loses a quarter and more."""
SLOW_PROCESSOR_YELLOW, SLOW_PROCESSOR_RED = 0.60, 0.25
"""Ours: the same for processors, which others may use at the same time; the fastest of several products counts."""
CATALOGUE_YELLOW, CATALOGUE_RED = 0.70, 0.40
"""Share of the planner's catalogue. Our choice: published all-reduces and products are within 30 % of it
(docs/plan.md); NVLink that fell back to PCIe has 0.13, InfiniBand that fell back to sockets 0.2."""
SLOW_LINK_YELLOW, SLOW_LINK_RED = 0.70, 0.40
"""Share of the median of links of the same kind. Our choice: pairs over one switch are within a few percent of each
other; a cable at half its speed has 0.5, an adapter at a quarter 0.25."""
SLOW_LOCAL_LINK_YELLOW, SLOW_LOCAL_LINK_RED = 0.30, 0.05
"""The same between processes of one machine without GPUs, which share its cores with other processes."""
