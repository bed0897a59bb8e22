"""The same figures as Holistic Trace Analysis 0.5.0 (PyPI, MIT licence) on real traces of GPUs.

The figures were printed by it once, over the files in `data/`, with `include_last_profiler_step=True` and the
environment variable HTA_DISABLE_NS_ROUNDING=1: by default it rounds the start of each event up and its end down to whole
microseconds, which moves 1,181 us of the 213,533 us of `nccl_two_ranks` from work to idleness. Where it is wrong, the
test says so. Times are microseconds.
"""

import gzip
from pathlib import Path

import numpy as np
import pytest

from scaleray.profiling.traces.intervals import both, length, union
from scaleray.profiling.traces.kernel_kinds import Kind, kinds_of
from scaleray.profiling.traces.launches import launches_of, pauses_of, queues_of
from scaleray.profiling.traces.matched_collectives import collectives_of
from scaleray.profiling.traces.partition import marked_steps, partition_of
from scaleray.profiling.traces.trace import read_trace

DATA = Path(__file__).parent / "data"


def read(name):
    with gzip.open(DATA / f"{name}.json.gz") as file:
        return read_trace(file, name)


def breakdown(trace):
    """HTA's temporal breakdown and overlap: from the first kernel to the end of the last one."""
    kinds, device = kinds_of(trace), trace.is_on_device
    of = lambda kind: union(trace.start[kinds == kind], trace.end[kinds == kind])
    busy, compute, communication = (
        union(trace.start[device], trace.end[device]),
        of(Kind.COMPUTE),
        of(Kind.COMMUNICATION),
    )
    kernel_time = int(busy[-1, 1] - busy[0, 0])
    overlap = length(both(compute, communication)) / length(communication) if len(communication) else None
    idle = kernel_time - length(busy)
    return [each / 1000 for each in (idle, length(compute), length(busy) - length(compute), kernel_time)], overlap


@pytest.mark.parametrize(
    ("name", "expected", "overlap"),
    [
        ("nccl_two_ranks", [163803.824, 38429.422, 11299.504, 213532.750], 0.1431),
        ("dlrm_rank0", [321378, 106252, 172428, 600058], 0.1181),
        ("dlrm_rank1", [328671, 135548, 136455, 600674], 0.2005),
        # HTA says NaN for the overlap of a trace without communication
        ("rocm_toy", [8762.845, 110.881, 38.161, 8911.887], None),
    ],
)
def test_the_temporal_breakdown_and_the_overlap_are_those_of_hta(name, expected, overlap):
    found, found_overlap = breakdown(read(name))
    assert found == pytest.approx(expected, abs=0.002)
    assert found_overlap == (None if overlap is None else pytest.approx(overlap, abs=5e-5))


def test_waiting_for_the_device_is_no_computing_as_hta_has_it():
    """HTA 0.5.0 takes the `cuda_sync` events of this trace, such as `Stream Wait Event`, for kernels: 7 us more compute,
    and 75,767 us more from the first kernel to the last."""
    found, _ = breakdown(read("alexnet_without_steps"))
    idle, compute, other, kernel_time = found
    assert (12929684 - idle, 10637 - compute, 55690 - other, 12996011 - kernel_time) == (75581, 7, 179, 75767)


@pytest.mark.parametrize("name", ["nccl_two_ranks", "dlrm_rank0", "dlrm_rank1"])
def test_over_the_same_steps_the_partition_says_what_the_breakdown_says(name):
    trace = read(name)
    (idle, compute, other, kernel_time), overlap = breakdown(trace)
    found = partition_of(trace, marked_steps(trace))
    assert found.compute_ns / 1000 == compute and found.overlap == pytest.approx(overlap)
    assert (found.exposed_communication_ns + found.copy_ns) / 1000 == pytest.approx(other)
    # HTA begins at the first kernel and ends with the last one; a step is longer
    around = found.total_ns / 1000 - kernel_time
    assert (found.host_idle_ns + found.other_idle_ns) / 1000 == pytest.approx(idle + around)


IDLE = {  # (stream, host wait, kernel wait, other)
    "nccl_two_ranks": [(7, 173532.94, 702.97, 0), (40, 171501.73, 0, 0)],
    "dlrm_rank0": [
        (7, 213825, 1985, 261740),
        (23, 596037, 70, 34),
        (25, 0, 9, 47865),
        (84, 148934, 6, 0),
        (203, 0, 0, 0),
    ],
    "dlrm_rank1": [
        (7, 156827, 1816, 281064),
        (23, 596313, 100, 0),
        (25, 0, 9, 53028),
        (84, 251860, 0, 23247),
        (203, 0, 0, 0),
    ],
    "rocm_toy": [(0, 8762.84, 0, 0)],
    "alexnet_without_steps": [(7, 12855007, 104, 0), (20, 12011718, 3, 0)],
}


@pytest.mark.parametrize("name", IDLE)
def test_pauses_of_streams_have_the_reasons_of_hta(name):
    found = [
        (each.stream, each.host_ns / 1000, each.kernel_ns / 1000, each.other_ns / 1000)
        for each in pauses_of(read(name))
    ]
    assert np.array(found) == pytest.approx(np.array(IDLE[name]), abs=0.01)


@pytest.mark.parametrize(
    ("name", "expected"),  # count, median, p90 and most of the delay; late kernels, slow calls, short kernels
    [
        ("nccl_two_ranks", [1258, 1.967, 73.133, 878.977, 88, 0, 688]),
        ("dlrm_rank0", [602, 10246, 61982.3, 103661, 469, 0, 140]),
        ("dlrm_rank1", [577, 10282, 33286.6, 113609, 442, 0, 140]),
        ("alexnet_without_steps", [98, 32.5, 1139.8, 1533, 43, 11, 32]),
    ],
)
def test_launches_are_those_of_hta(name, expected):
    found = launches_of(read(name))
    delays = [found.delay_median_ns / 1000, found.delay_p90_ns / 1000, found.delay_max_ns / 1000]
    assert [found.count, *delays, found.late_kernels, found.slow_calls, found.short_kernels] == pytest.approx(
        expected, abs=0.002
    )


def test_launches_of_amd_are_seen_too():
    """HTA 0.5.0 knows launch calls by their CUDA names, and finds none in a trace of ROCm."""
    found = launches_of(read("rocm_toy"))
    assert (found.count, found.slow_calls) == (16, 2)


@pytest.mark.parametrize(
    ("name", "longest"),
    [
        ("nccl_two_ranks", {7: 10, 40: 1}),
        ("dlrm_rank0", {7: 76, 23: 4, 25: 8, 84: 1, 203: 1}),
        ("dlrm_rank1", {7: 75, 23: 2, 25: 8, 84: 1, 203: 1}),
        ("rocm_toy", {0: 1}),
        ("alexnet_without_steps", {7: 18, 20: 2}),
    ],
)
def test_the_longest_lines_are_those_of_hta(name, longest):
    queues = queues_of(read(name))
    assert {queue.stream: queue.longest for queue in queues} == longest
    assert all(queue.full_ns == 0 and 0 <= queue.mean <= queue.longest for queue in queues)


def test_collectives_of_nccl_carry_their_group_and_their_bytes():
    found = collectives_of(read("nccl_two_ranks"))
    assert {(each.group, each.group_size, each.operation) for each in found} == {
        ("0", 2, "broadcast"),
        ("0", 2, "allreduce"),
    }
    reduced = sum(each.num_bytes for each in found if each.operation == "allreduce")
    assert reduced == 102_228_128  # the gradients of a ResNet-50: 25,557,032 floats
    assert {each.operation for each in collectives_of(read("dlrm_rank0"))} == {
        "SendRecv"
    }  # older: from the kernel's name
