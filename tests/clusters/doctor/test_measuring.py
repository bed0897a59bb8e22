"""What nodes measure: rates, links between ranks, storage, ports, and facts of this machine."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from scaleray.clusters.doctor import measure, node, storage_checks
from scaleray.clusters.doctor.doctor import evaluate
from scaleray.clusters.doctor.fleet import Answers
from scaleray.clusters.doctor.inspection import Inspection, Subject, seats_of
from scaleray.clusters.doctor.measure import Seats, exchange, measure_links
from scaleray.clusters.doctor.node import Listener, unreachable
from scaleray.clusters.preflight.tournament import slow_links
from scaleray.records.doctor_record import GpuSeen, NodeSeen

SMALL = {"cpu": (2**12, 2**14)}
NODES = ("a", "b", "c", "d")


def measured_on(place, seats):
    measure.SIZES, measure.MESSAGES = SMALL, SMALL
    return measure_links(place.rank, seats)


def measured_over_a_slow_link(place, seats, slow):
    """Between two of the ranks, everything takes a hundred times as long, by a clock that only messages move: that of
    a machine at work has such links by itself."""
    measure.SIZES, measure.MESSAGES = SMALL, SMALL
    now = 0.0

    def timed(peer, outgoing, incoming, group):
        nonlocal now
        exchange(peer, outgoing, incoming, group)
        now += 0.1 if {place.rank, peer} == {*slow} else 0.001

    with mock.patch.object(measure.time, "perf_counter", side_effect=lambda: now):
        return measure_links(place.rank, seats, send=timed)


def test_ranks_of_four_nodes_measure_all_links_and_agree_on_them(gloo):
    results = gloo.run(4, measured_on, Seats(NODES, 1))
    assert all(result == results[0] for result in results)
    times, links = results[0]
    assert {(t.ranks, t.nodes, t.num_bytes) for t in times} == {(4, 4, size) for size in SMALL["cpu"]}
    assert len(links.pairs) == 6 and links.rounds == links.all_rounds == 3
    assert all(pair.is_between_nodes and pair.bytes_per_s > 0 for pair in links.pairs)
    assert all(t.seconds > 0 for t in times)


def test_ranks_of_two_nodes_measure_inside_and_between_them(gloo):
    times, links = gloo.run(4, measured_on, Seats(("a", "b"), 2))[0]
    size = SMALL["cpu"][0]
    assert {(t.ranks, t.nodes, t.where) for t in times if t.num_bytes == size} == {
        (2, 1, "a"), (2, 1, "b"), (2, 2, ""), (4, 2, ""),
    }  # fmt: skip
    inside = {pair.name for pair in links.pairs if not pair.is_between_nodes}
    between = {pair.name for pair in links.pairs if pair.is_between_nodes}
    assert inside == {"process 0 of a - process 1 of a", "process 0 of b - process 1 of b"}
    assert between == {"process 0 of a - process 0 of b", "process 1 of a - process 1 of b"}


def test_a_link_that_is_slow_is_named_by_the_tournament(gloo):
    _, links = gloo.run(4, measured_over_a_slow_link, Seats(NODES, 1), (1, 3))[0]
    slow = slow_links(links.pairs, below=0.3)
    assert [pair.name for pair in slow.links] == ["b - d"] and slow.ends == []
    assert min(links.pairs, key=lambda pair: pair.bytes_per_s).name == "b - d"


@pytest.mark.parametrize(("bytes_per_s", "sizes"), [(2e9, 3), (2.5e6, 2), (1e4, 1)])
def test_an_all_reduce_that_would_take_too_long_over_a_slow_link_is_not_begun(monkeypatch, bytes_per_s, sizes):
    monkeypatch.setattr(measure, "_all_reduce_s", lambda tensor, group: tensor.nbytes / bytes_per_s)
    monkeypatch.setattr(measure.dist, "all_reduce", lambda tensor, **options: None)
    one = {"own": 0, "count": 1, "deadline": time.perf_counter() + 20}
    times = measure._times(None, Seats(NODES, 1), torch.device("cpu"), **one)
    assert list(times) == list(measure.SIZES["cpu"][:sizes])


def test_a_rate_is_that_of_the_fastest_product(monkeypatch):
    took = iter([9.0, *[0.5, 0.1, 0.2, 0.4, 0.3] * 3])
    monkeypatch.setattr(measure, "_matmul_s", lambda matrix, out: next(took))
    monkeypatch.setattr(measure, "MATMUL_S", 0.0)
    rate = measure.matmul_rate("a", None)
    assert rate.flops_per_s == pytest.approx(2 * 768**3 / 0.1) and (rate.kind, rate.precision) == ("cpu", "fp32")


def test_seats_are_gpus_where_there_are_any():
    gpus = [NodeSeen(name="a", torch_gpus=8), NodeSeen(name="b", torch_gpus=4), NodeSeen(name="head")]
    assert seats_of(gpus) == Seats(("a", "b"), 4, "cuda")
    assert (
        seats_of([NodeSeen(name="a")]).num_ranks == 2
        and seats_of([NodeSeen(name="a"), NodeSeen(name="b")]).num_ranks == 2
    )


def test_gpus_that_somebody_uses_are_left_alone():
    class Fleet:
        names, address, lost, drivers_node = ["a"], "x:1", {}, "a"

        def ask(self, method, arguments, *, timeout_s):
            assert method != "matmuls", "it would disturb whoever trains there"
            busy = NodeSeen(name="a", gpus=[GpuSeen(index=0, name="H100", processes=["python (1)"])], torch_gpus=1)
            return Answers({"a": busy} if method == "facts" else {})

        def links(self, seats, *, timeout_s):
            raise AssertionError("it would disturb whoever trains there")

        def trips(self, name, count, *, timeout_s):
            return []

        def facts_of_ray(self, name):
            return {}

        def places(self):
            return {}

        def __getattr__(self, name):
            raise AssertionError(name)

    look = Inspection(Fleet(), Subject("/nowhere", "sqlite:////tmp/x.db"))
    look._storage = lambda alive: None
    measured = look.everything()
    assert measured.not_measured["rates"] == measured.not_measured["links"] == "1 GPU is in use"
    assert {c.name: c.verdict for c in evaluate(measured)}["GPUs idle"] == "red"


def test_files_of_the_storage_are_seen_by_others_and_gone_afterwards(tmp_path, monkeypatch):
    monkeypatch.setattr(storage_checks, "MOST_BYTES", 2**20)
    monkeypatch.setattr(storage_checks, "PIECE_BYTES", 2**18)
    folder = f"{tmp_path}/runs/.look"
    written = {name: storage_checks.write_file(folder, name) for name in ("a", "b")}
    assert not any(one.error for one in written.values()) and all(one.bytes_per_s > 0 for one in written.values())
    found = storage_checks.read_files(folder, {name: one.content for name, one in written.items()})
    assert found.missing == () and found.bytes_per_s > 0
    storage_checks.remove_folder(folder)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_missing_or_holds_something_else_is_not_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(storage_checks, "APPEARS_WITHIN_S", 0.0)
    monkeypatch.setattr(storage_checks, "MOST_BYTES", 2**10)
    folder = f"{tmp_path}/look"
    written = storage_checks.write_file(folder, "a")
    other = (written.content[0], "0" * 64)
    assert storage_checks.read_files(folder, {"a": other, "b": written.content}).missing == ("a", "b")


def test_what_was_in_the_storage_stays(tmp_path):
    (tmp_path / "run").mkdir()
    storage_checks.write_file(f"{tmp_path}/.look", "a")
    storage_checks.remove_folder(f"{tmp_path}/.look")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_storage_that_cannot_be_written_says_why(tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot write there" in storage_checks.write_file(f"{tmp_path}/file/look", "a").error
    assert "cannot write there" in storage_checks.write_file("s4://nowhere/look", "a").error


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="needs root, to mount a disk")
def test_a_storage_that_is_mounted_read_only_is_said(tmp_path):
    code = (
        "import sys\nfrom scaleray.clusters.doctor.storage_checks import write_file\n"
        "print(write_file(sys.argv[1] + '/look', 'a').error)"
    )
    command = f"mount -t tmpfs -o ro tmpfs {tmp_path} && {sys.executable} -c '{code}' {tmp_path}".replace(
        "'a'", '"a"'
    ).replace("'/look'", '"/look"')
    done = subprocess.run(["unshare", "--mount", "bash", "-c", command], capture_output=True, text=True, timeout=300)
    if "mount" in done.stderr and done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    assert "Read-only file system" in done.stdout, done.stderr


def test_a_port_that_is_open_is_reached_and_a_closed_one_is_named():
    listener, gone = Listener("127.0.0.1"), Listener("127.0.0.1")
    gone.close()
    assert unreachable({"a": listener.place, "b": gone.place}) == ["b"]
    listener.close()
    assert unreachable({"a": listener.place}) == ["a"] and unreachable({}) == []


def test_the_limits_of_a_process_are_its_own():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
    try:
        assert node.limits_here()["nofile"] == 1000
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_disk_is_that_of_the_nearest_folder_that_exists(tmp_path):
    disk = node.disk_of("runs", f"{tmp_path}/not/there/yet")
    assert disk.total_bytes >= disk.free_bytes > 0 and disk.path.endswith("not/there/yet")
    assert node.disk_of("runs", "s3://bucket/runs") is None


class FakeNvml:
    """NVIDIA's library on a node with two cards, one of which is a slice that refuses most questions."""

    NVML_NVLINK_MAX_LINKS = 18

    class NVMLError(Exception):
        pass

    def nvmlInit(self):
        pass

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetName(self, handle):
        return b"NVIDIA H100 80GB HBM3"

    def _refuse(self, handle):
        if handle == 1:
            raise self.NVMLError("not supported")

    def nvmlDeviceGetMemoryInfo(self, handle):
        self._refuse(handle)
        return SimpleNamespace(total=80 * 2**30, used=30 * 2**30)

    def nvmlDeviceGetUtilizationRates(self, handle):
        self._refuse(handle)
        return SimpleNamespace(gpu=97)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        self._refuse(handle)
        return [SimpleNamespace(pid=os.getpid()), SimpleNamespace(pid=os.getppid()), SimpleNamespace(pid=2**30)]

    def nvmlDeviceGetNvLinkState(self, handle, link):
        self._refuse(handle)
        return int(link < 17)


def test_gpus_are_seen_with_whoever_uses_them_and_a_slice_by_what_it_answers(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    first, slice_ = node.gpus_here()
    assert (first.used_bytes, first.utilisation, first.num_nvlinks) == (30 * 2**30, 0.97, 17)
    assert len(first.processes) == 2 and f"({os.getppid()})" in first.processes[0], "this process is not a stranger"
    assert first.processes[1] == f"a process ({2**30})"
    assert slice_ == GpuSeen(index=1, name="NVIDIA H100 80GB HBM3")


def test_without_a_driver_there_are_no_gpus(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert node.gpus_here() == []
