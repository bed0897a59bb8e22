"""A link that the kernel slows down (`tc tbf` between two of three network namespaces) is found by its ranks."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from optional_programs import program

from scaleray.profiling.links import slow_link
from scaleray.records.profile_record import LinkRow

PORT, RATE = 29631, "40mbit"
RANK = """
import json, os, sys, time
os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
import torch.distributed as dist
from scaleray.training.profile.link_probe import probe_links
from scaleray.training.setup.rank_context import RankContext
rank = int(sys.argv[1])
store = dist.TCPStore(sys.argv[2], int(sys.argv[3]), is_master=rank == 0, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
rows = probe_links(RankContext(rank, 3, node=f"node {rank}"))
print(json.dumps([[row.sender, row.receiver, row.bytes_per_s, row.num_bytes] for row in rows]), flush=True)
dist.barrier()
"""


def sh(line):
    subprocess.run(line.split(), check=True, capture_output=True)


@contextlib.contextmanager
def three_hosts(tag):
    """Namespaces with addresses 10.77.0.1 to 3, each pair of which has a cable of its own; removed afterwards."""
    names = [f"{tag}{rank}" for rank in range(3)]
    try:
        for rank, name in enumerate(names):
            sh(f"ip netns add {name}")
            sh(f"ip -n {name} link set lo up")
            sh(f"ip -n {name} link add eth0 type bridge")  # carries the address alone
            sh(f"ip -n {name} addr add 10.77.0.{rank + 1}/32 dev eth0")
            sh(f"ip -n {name} link set eth0 up")
        for one, other in itertools.combinations(range(3), 2):
            sh(f"ip -n {names[one]} link add to{other} type veth peer name to{one} netns {names[other]}")
            for here, there in ((one, other), (other, one)):
                sh(f"ip -n {names[here]} link set to{there} up")
            for here, there in ((one, other), (other, one)):
                sh(f"ip -n {names[here]} route add 10.77.0.{there + 1}/32 dev to{there} src 10.77.0.{here + 1}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def slow_down(name, device):
    """Let what a namespace sends over a cable pass a token bucket."""
    sh(f"ip netns exec {name} tc qdisc add dev {device} root tbf rate {RATE} burst 64kbit latency 500ms")


@pytest.mark.slow
def test_the_ranks_at_a_slow_link_of_the_kernel_are_named(tmp_path):
    if os.geteuid() != 0 or not all(map(program, ("ip", "tc"))):
        pytest.skip("needs root, and ip and tc of iproute2")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    with three_hosts(f"p{os.getpid() % 10000}") as names:
        slow_down(names[0], "to2")
        slow_down(names[2], "to0")
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, "-c", RANK, str(rank), "10.77.0.1", str(PORT)],
                stdout=subprocess.PIPE,
                env=environment,
                text=True,
            )
            for rank, name in enumerate(names)
        ]
        try:
            told = [process.communicate(timeout=300)[0] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    rows = [LinkRow(*row) for text in told for row in json.loads(text.strip().splitlines()[-1])]
    found = slow_link(rows)
    assert found is not None, rows
    assert found.ranks == (0, 2) and found.one_way is None
    assert found.bytes_per_s < 6e6 < found.usual  # 40 Mbit/s are 5 MB/s
