"""A link that is really slow: three machines in network namespaces, of which one passes 20 Mbit/s."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from machines import machines

from scaleray.clusters.preflight.tournament import slow_links
from scaleray.records.doctor_record import LinkRate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RANK = """
import dataclasses, json, sys, time
from pathlib import Path
from scaleray.clusters.doctor import measure
from scaleray.clusters.doctor.node import NodeInspector
from scaleray.training.setup.stores import StorePlace

rank, hosts, place = int(sys.argv[1]), sys.argv[2].split(","), Path(sys.argv[3])
node = NodeInspector(hosts[rank], hosts[rank])
if rank == 0:
    where = node.open_store()
    place.with_suffix(".new").write_text(json.dumps([where.host, where.port]))
    place.with_suffix(".new").rename(place)
while not place.exists():
    time.sleep(0.1)
measure.SIZES = {"cpu": (2**12,)}
times, links = node.links(rank, measure.Seats(tuple(hosts), 1), StorePlace(*json.loads(place.read_text())), 120.0)
if rank == 0:
    print(json.dumps([dataclasses.asdict(pair) for pair in links.pairs]))
"""


def test_a_machine_whose_link_is_slow_is_named(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with machines(3, tmp_path) as found:
        slow = found[1]
        slow.limit("20mbit")
        hosts = ",".join(machine.address for machine in found)
        ranks = [
            subprocess.Popen(
                machine.command([sys.executable, "-c", RANK, str(rank), hosts, str(tmp_path / "place")]),
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, machine in enumerate(found)
        ]
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    pairs = [LinkRate(**pair) for pair in json.loads(outputs[0].splitlines()[-1])]
    assert len(pairs) == 3
    named = slow_links(pairs, below=0.3)
    assert named.ends == [slow.address] and named.links == [] and named.share < 0.05
