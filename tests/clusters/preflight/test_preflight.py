"""What a look at a cluster says of one that is well, and of one with a single thing that is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from emulated_nodes import NAMES, PACKAGES, VERSIONS, found, gpu, healthy, node, not_green, with_node

from scaleray.clusters.doctor.doctor import collectives_csv, evaluate
from scaleray.clusters.preflight import check_limits
from scaleray.clusters.preflight.check_limits import GIB
from scaleray.clusters.preflight.check_texts import FAILED
from scaleray.clusters.preflight.clock_checks import offset
from scaleray.clusters.preflight.speed_checks import expected_s
from scaleray.records.doctor_record import (
    AllReduceTime,
    ClockSeen,
    DiskSeen,
    DoctorRecord,
    Links,
    Measured,
    StorageSeen,
)

BAD = NAMES[2]
DISK = DiskSeen(use="runs", path="/r", free_bytes=500 * GIB, total_bytes=1000 * GIB)


@pytest.mark.parametrize("gpus", [8, 1, 0])
def test_a_cluster_that_is_well_is_green(gpus):
    assert not_green(healthy(gpus=gpus)) == {}


def test_every_check_that_can_be_made_is_made_of_gpus():
    verdicts = {check.name: check.verdict for check in evaluate(healthy())}
    assert set(verdicts.values()) == {"green"} and len(verdicts) == 19


def test_without_gpus_what_concerns_them_does_not_apply():
    names = {check.name for check in evaluate(healthy(gpus=0)) if check.verdict == "not applicable"}
    assert {"GPU drivers", "GPUs visible", "GPUs idle", "all-reduce inside nodes"} <= names


def test_what_failed_is_in_doubt_and_is_no_check_that_does_not_apply():
    why = {"links": f"{FAILED}rank 0 on 10.0.0.1: no answer within 25 s"}
    measured = replace(healthy(), links=Links(), all_reduces=[], not_measured=why)
    assert not_green(measured) == {"links between nodes": "yellow"}
    assert "no answer within 25 s" in found(measured, "links between nodes").found
    in_use = replace(healthy(), rates=[], not_measured={"rates": "1 GPU is in use"})
    assert found(in_use, "matrix products").verdict == "not applicable"


PLANTED = [
    ("another torch", {"packages": {**PACKAGES, "torch": "2.12.1"}}, "versions", "red", "torch 2.13.0 on 3 nodes, 2.12.1 on 10.0.0.3"),
    ("no torch", {"packages": {k: v for k, v in PACKAGES.items() if k != "torch"}}, "versions", "red", "missing on 10.0.0.3"),
    ("another peft", {"packages": {**PACKAGES, "peft": "0.20"}}, "versions", "yellow", "peft 0.21.0"),
    ("another Python", {"python": "3.12.1"}, "versions", "red", "Python 3.11.7 on 3 nodes"),
    ("another patch of Python", {"python": "3.11.9"}, "versions", "yellow", "3.11.9 on 10.0.0.3"),
    ("another driver", {"accelerators": {**VERSIONS, "driver": "550.54"}}, "GPU drivers", "yellow", "550.54 on 10.0.0.3"),
    ("another NCCL", {"accelerators": {**VERSIONS, "nccl": "2.21.5"}}, "GPU drivers", "red", "nccl 2.27.3"),
    ("a card that fell off the bus", {"gpus": [gpu(i) for i in range(7)], "torch_gpus": 7}, "GPUs visible", "red", "the driver shows 7, torch 7, Ray 8"),
    ("a torch without CUDA", {"torch_gpus": 0}, "GPUs visible", "red", "torch 0"),
    ("seven cards, all agree", {"gpus": [gpu(i) for i in range(7)], "torch_gpus": 7, "ray_gpus": 7.0}, "GPUs visible", "yellow", "7 x NVIDIA H100"),
    ("somebody trains there", {"gpus": [gpu(0, processes=["python (42)"]), *(gpu(i) for i in range(1, 8))]}, "GPUs idle", "red", "GPU 0 of 10.0.0.3: python (42)"),
    ("low nofile", {"limits": {"nofile": 1024, "nproc": None, "memlock": None}}, "open files", "red", "10.0.0.3: 1024"),
    ("nofile below what Ray recommends", {"limits": {"nofile": 4096, "nproc": None, "memlock": None}}, "open files", "yellow", "4096"),
    ("few processes", {"limits": {"nofile": None, "nproc": 1024, "memlock": None}}, "processes", "yellow", "1024"),
    ("memory that cannot be locked", {"limits": {"nofile": None, "nproc": None, "memlock": 65536}}, "locked memory", "red", "64.0 KiB"),
    ("Docker's /dev/shm", {"shm_bytes": 64 * 2**20}, "/dev/shm", "red", "10.0.0.3: 64.0 MiB"),
    ("a /dev/shm below the object store", {"shm_bytes": 20 * GIB}, "/dev/shm", "yellow", "less than the object store of 200.0 GiB"),
    ("a small object store", {"object_store_bytes": 100 * 2**20}, "object store", "yellow", "100.0 MiB"),
    ("a full disk", {"disks": [replace(DISK, free_bytes=20 * GIB)]}, "free disk", "red", "98% full for runs (/r)"),
    ("a disk with little room", {"disks": [DISK, replace(DISK, free_bytes=8 * GIB, total_bytes=20 * GIB)]}, "free disk", "yellow", "8.0 GiB free"),
    ("few ports", {"port_range": 1000}, "ports", "yellow", "10.0.0.3 has 1000"),
    ("MLflow away from a node", {"mlflow_error": "it does not answer: timed out"}, "MLflow", "yellow", "10.0.0.3: it does not answer"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "name", "verdict", "words"), [case[1:] for case in PLANTED], ids=[case[0] for case in PLANTED]
)
def test_one_node_with_one_thing_wrong_is_named_and_nothing_else_is_held_against_it(changes, name, verdict, words):
    measured = with_node(healthy(), BAD, **changes)
    check = found(measured, name)
    assert (check.verdict, check.name) == (verdict, name) and words in check.found and check.remedy
    assert not_green(measured) == {name: verdict}


def test_a_node_that_does_not_answer_is_red_and_the_others_are_judged():
    measured = healthy()
    dead = node(BAD)
    dead = type(dead)(name=BAD, error="no answer within 25 s")
    measured = replace(measured, nodes=[dead if n.name == BAD else n for n in measured.nodes])
    assert not_green(measured) == {"nodes": "red"} and "no answer within 25 s" in found(measured, "nodes").found


def test_a_cluster_of_which_no_node_answers_is_one_red_check():
    measured = Measured(
        nodes=[type(node(BAD))(name=BAD, error="No module named 'scaleray'")], tracking_uri="sqlite:///x"
    )
    assert not_green(measured) == {"nodes": "red"}


def test_memory_is_only_to_be_locked_where_there_is_rdma():
    measured = with_node(healthy(), BAD, limits={"nofile": None, "memlock": 65536}, has_rdma=False)
    assert not_green(measured) == {}


@pytest.mark.parametrize(
    ("ahead", "within", "verdict"), [(3600.0, 0.01, "red"), (-0.5, 0.01, "yellow"), (0.5, 0.6, None), (0.05, 0.0, None)]
)
def test_a_wrong_clock_is_named_unless_the_round_trip_explains_it(ahead, within, verdict):
    measured = healthy()
    clocks = [ClockSeen(node=c.node, ahead_s=ahead, within_s=within) if c.node == BAD else c for c in measured.clocks]
    measured = replace(measured, clocks=clocks)
    assert not_green(measured) == ({"clocks": verdict} if verdict else {})
    if verdict:
        check = found(measured, "clocks")
        assert BAD in check.found and ("ahead" if ahead > 0 else "behind") in check.found


def test_nodes_of_one_machine_have_one_clock():
    measured = healthy()
    measured = replace(measured, nodes=[replace(n, machine="one") for n in measured.nodes])
    assert found(measured, "clocks").verdict == "not applicable"


def test_a_clock_is_known_within_half_of_the_shortest_round_trip():
    ahead = 5.0
    trips = [(10.0, 10.9 + ahead, 11.0), (20.0, 20.001 + ahead, 20.004), (30.0, 30.2 + ahead, 30.4)]
    seen = offset("a", trips)
    assert seen.within_s == pytest.approx(0.002) and abs(seen.ahead_s - ahead) <= seen.within_s


@pytest.mark.parametrize(
    ("spoiled", "verdict", "words"),
    [
        (
            {"error": "cannot write there: [Errno 30] Read-only file system"},
            "red",
            "10.0.0.3: cannot write there: [Errno 30]",
        ),
        ({"does_not_see": ["10.0.0.1"]}, "red", "/shared/runs is not shared: 10.0.0.3 does not see files of 10.0.0.1"),
        ({"write_bytes_per_s": 30e6}, "yellow", "30 MB/s or more; read at 2 GB/s or more, slowest on 10.0.0.3"),
        ({"write_bytes_per_s": 1e6}, "red", "1 MB/s"),
    ],
)
def test_a_storage_that_is_not_written_not_shared_or_slow_is_named_with_the_node(spoiled, verdict, words):
    measured = healthy()
    storage = [StorageSeen(**{**vars(s), **spoiled}) if s.node == BAD else s for s in measured.storage]
    measured = replace(measured, storage=storage)
    check = found(measured, "shared storage")
    assert not_green(measured) == {"shared storage": verdict} and words in check.found and "checkpoint." in check.remedy


def test_an_mlflow_that_does_not_answer_the_driver_is_red():
    measured = replace(healthy(), tracking_error="the MLflow server http://mlflow:5000: it does not answer: refused")
    assert not_green(measured) == {"MLflow": "red"}


def test_nodes_that_cannot_reach_each_other_are_named_both():
    measured = replace(healthy(), closed=[(NAMES[0], BAD)])
    assert (
        not_green(measured) == {"ports": "red"} and f"{NAMES[0]} cannot reach {BAD}" in found(measured, "ports").found
    )


@pytest.mark.parametrize(
    ("gpus", "share", "verdict"),
    [(8, 0.85, "yellow"), (8, 0.5, "red"), (8, 0.95, None), (0, 0.5, "yellow"), (0, 0.2, "red"), (0, 0.7, None)],
)
def test_a_slow_card_or_node_is_named_against_the_median(gpus, share, verdict):
    measured = healthy(gpus=gpus)
    slow = [
        replace(r, flops_per_s=share * r.flops_per_s) if (r.node, r.device) in ((BAD, "GPU 0"), (BAD, "a core")) else r
        for r in measured.rates
    ]
    measured = replace(measured, rates=slow)
    assert not_green(measured) == ({"matrix products": verdict} if verdict else {})
    if verdict:
        check = found(measured, "matrix products")
        assert f"of {BAD}" in check.found and BAD in check.remedy and NAMES[0] not in check.found


def test_of_two_cards_the_slower_one_is_named():
    measured = healthy(names=NAMES[:2], gpus=1)
    measured = replace(
        measured,
        rates=[replace(r, flops_per_s=r.flops_per_s * (0.5 if r.node == NAMES[1] else 1)) for r in measured.rates],
    )
    check = found(measured, "matrix products")
    assert check.verdict == "red" and NAMES[1] in check.found and NAMES[0] not in check.found


def test_cards_that_are_all_slow_are_found_by_the_catalogue():
    measured = healthy()
    measured = replace(measured, rates=[replace(r, flops_per_s=0.5 * r.flops_per_s) for r in measured.rates])
    check = found(measured, "matrix products")
    assert check.verdict == "yellow" and "of the catalogue's" in check.found


def test_an_all_reduce_over_pcie_instead_of_nvlink_is_red_on_its_node():
    measured = healthy()
    slow = [replace(one, seconds=one.seconds * 8) if one.where == BAD else one for one in measured.all_reduces]
    measured = replace(measured, all_reduces=slow)
    check = found(measured, "all-reduce inside nodes")
    assert not_green(measured) == {"all-reduce inside nodes": "red"} and f"slowest on {BAD}" in check.found


def test_an_all_reduce_by_sockets_instead_of_infiniband_is_red():
    measured = healthy()
    measured = replace(
        measured,
        all_reduces=[replace(one, seconds=one.seconds * 30) if one.nodes > 1 else one for one in measured.all_reduces],
    )
    check = found(measured, "all-reduce between nodes")
    assert not_green(measured) == {"all-reduce between nodes": "red"} and "NCCL_DEBUG" in check.remedy


def test_another_network_is_what_was_said():
    measured = healthy()
    [between] = [one for one in measured.all_reduces if one.nodes > 1]
    usual = expected_s(between, measured)
    assert expected_s(between, replace(measured, network="100G")) > 10 * usual


def test_without_gpus_an_all_reduce_is_compared_with_the_network_that_was_said_alone():
    measured = healthy(gpus=0)
    [between] = measured.all_reduces
    assert expected_s(between, measured) is None
    measured = replace(
        measured, network="10G-tcp", all_reduces=[replace(between, seconds=10 * between.num_bytes / 1.25e9)]
    )
    assert not_green(measured) == {"all-reduce between nodes": "red"}


def test_what_was_measured_is_read_by_the_planner(tmp_path):
    from scaleray.config.hardware.measured_collectives import read_measured_tables

    times = [
        AllReduceTime(ranks=8, nodes=1, num_bytes=2**20, seconds=seconds, where=name)
        for name, seconds in zip(NAMES, (1e-4, 1.1e-4, 1.2e-4, 9e-4), strict=True)
    ]
    times.append(AllReduceTime(ranks=32, nodes=4, num_bytes=2**20, seconds=3e-4))
    (tmp_path / "measured.csv").write_text(collectives_csv(times))
    inside, between = read_measured_tables(tmp_path / "measured.csv")
    assert (inside.num_ranks, inside.num_nodes, between.num_ranks, between.num_nodes) == (8, 1, 32, 4)
    assert inside.all_reduce_s(2**20) == pytest.approx(1.15e-4)  # the node that is slow does not count for the others
    assert between.all_reduce_s(2**20) == pytest.approx(3e-4)


def test_a_record_reads_what_it_wrote_and_says_the_worst():
    measured = with_node(healthy(), BAD, port_range=1000)
    record = DoctorRecord(checks=evaluate(measured), measured=measured, address="a:1", duration_s=12.0)
    assert DoctorRecord.from_json(record.to_json()) == record
    assert record.worst == "yellow" and record.verdict.startswith("ready, with doubts: yellow: ports")
    assert "ports" in repr(record)


def test_the_limit_on_clocks_is_below_what_makes_a_run_lost():
    from scaleray.records.live_state import LOST_S

    assert check_limits.CLOCK_RED_S < LOST_S


def test_the_storage_of_a_config_may_be_slower_than_the_planner_takes_it_to_be_but_not_by_much():
    from scaleray.planner.cost.checkpoint_stalls import STORAGE_GB_PER_S_PER_NODE

    assert pytest.approx(STORAGE_GB_PER_S_PER_NODE * 1e9 / 10) == check_limits.STORAGE_YELLOW_BYTES_PER_S
