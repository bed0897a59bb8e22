"""The parts of a traced step, with answers that follow from a drawing."""

import numpy as np
import pytest
from made_trace import MadeTrace, gloo_step, gpu_step

from scaleray.errors import TraceError
from scaleray.profiling.traces import intervals, partition
from scaleray.profiling.traces.partition import marked_steps, partition_of


def parts_of(trace):
    read = trace.read()
    return partition_of(read, marked_steps(read))


def test_each_moment_of_a_gpu_step_counts_once_and_the_parts_are_those_of_the_drawing():
    found = parts_of(gpu_step())
    in_us = {name: part / 1000 for name, part in found.parts.items()}
    assert in_us == {
        "compute": 380 + 200 + 40 + 50,
        "exposed communication": 100 + 100,  # 400-500 and 700-800
        "copies": 50,  # 800-850
        "host idle": 20 + 50,  # 0-20: launched when the step began; 900-950: launched at 920
        "other idle": 10,  # 850-860: was launched long before
    }
    assert sum(found.parts.values()) == found.total_ns == 1_000_000
    assert found.overlap == 1 - 200 / 450


def test_on_the_cpu_operators_compute_and_gloo_is_exposed_where_none_runs():
    found = parts_of(gloo_step())
    assert (found.compute_ns, found.exposed_communication_ns, found.host_idle_ns) == (500_000, 100_000, 400_000)
    assert found.copy_ns is None and found.other_idle_ns is None  # not to be told apart there, which is not 0
    assert found.overlap == 1 - 100 / 250


def test_without_communication_there_is_no_overlap_rather_than_not_a_number():
    trace = MadeTrace().steps(0, 100).kernel("gemm", 10, 50, launched=0)
    assert parts_of(trace).overlap is None and parts_of(trace).exposed_communication_ns == 0


def test_the_steps_last_until_the_device_has_done_what_they_launched():
    trace = MadeTrace().steps(0, 100, 200).kernel("gemm", 50, 400, launched=10).kernel("gemm", 450, 150, launched=190)
    found = parts_of(trace)
    assert (found.num_steps, found.total_ns, found.compute_ns) == (2, 600_000, 550_000)


def test_kernels_that_were_launched_after_the_steps_do_not_count():
    trace = MadeTrace().steps(0, 100).kernel("gemm", 10, 50, launched=0).kernel("gemm", 120, 900, launched=110)
    assert (parts_of(trace).total_ns, parts_of(trace).compute_ns) == (100_000, 50_000)


def test_waits_between_streams_are_no_computing():
    """Traces with synchronisation events have them on streams; Holistic Trace Analysis 0.5 counted them as compute."""
    trace = MadeTrace().steps(0, 100).kernel("gemm", 10, 20, launched=0)
    trace.event("cuda_sync", "Stream Wait Event", 40, 50, process=0, thread=7, stream=7)
    trace.event("kernel", "Context Sync", 40, 50, process=0, thread=7, stream=7)
    assert parts_of(trace).compute_ns == 20_000


@pytest.mark.parametrize("name", ["ncclDevKernel_AllGather_RING_LL()", "ncclKernel_Broadcast()", "hcclAllReduce"])
def test_kernels_of_every_generation_of_nccl_communicate(name):
    trace = MadeTrace().steps(0, 100).kernel(name, 10, 50, launched=0)
    assert parts_of(trace).communication_ns == 50_000


def test_copies_of_rocm_are_copies():
    """Newer versions of Holistic Trace Analysis take everything that begins with `hip` for communication."""
    trace = MadeTrace().steps(0, 100).kernel("hipMemcpyAsync", 10, 50, launched=0)
    assert parts_of(trace).copy_ns == 50_000 and parts_of(trace).communication_ns == 0


def test_a_trace_without_step_marks_is_refused_with_what_to_do():
    trace = MadeTrace().kernel("gemm", 10, 50, launched=0)
    with pytest.raises(TraceError, match=r"rank0.json has no step marks.*\n.*scaleray profile -c FILE --trace"):
        parts_of(trace)


def test_step_marks_with_gaps_are_refused_rather_than_divided_wrongly():
    with pytest.raises(TraceError, match="leave gaps for 17 % of their time"):
        parts_of(MadeTrace().steps(0, 100).steps(150, 200, first=8).steps(200, 300, first=9))
    with pytest.raises(TraceError, match="overlap for 50 %"):  # two ranks in one file
        parts_of(MadeTrace().steps(0, 100).steps(50, 100))


def test_parts_that_do_not_close_fail_loudly(monkeypatch):
    monkeypatch.setattr(partition, "without", lambda left, right: left)
    with pytest.raises(TraceError, match="has parts that differ from its steps by"):
        parts_of(gpu_step())


def test_operations_on_intervals_agree_with_counting_moments():
    random = np.random.default_rng(0)
    for _ in range(50):
        sets, moments = [], []
        for _ in range(2):
            start = random.integers(0, 60, random.integers(0, 12))
            end = start + random.integers(0, 9, len(start))
            sets.append(intervals.union(start, end))
            moments.append({moment for a, b in zip(start, end, strict=True) for moment in range(a, b)})
        counted = lambda found: {moment for a, b in found for moment in range(a, b)}
        left, right = moments
        assert counted(sets[0]) == left and intervals.length(sets[0]) == len(left)
        assert counted(intervals.both(*sets)) == left & right
        assert counted(intervals.without(*sets)) == left - right
        assert counted(intervals.either(*sets)) == left | right
        assert (sets[0][1:, 0] > sets[0][:-1, 1]).all()
