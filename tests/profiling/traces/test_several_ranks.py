"""Traces of several ranks: who met whom, whose clock is ahead, who comes late, and one file of all."""

import json
import math

import pytest
from made_trace import BASE_NS, MadeTrace, gloo_step, gpu_step

from scaleray.errors import TraceError
from scaleray.profiling.traces.matched_collectives import collectives_of, join
from scaleray.profiling.traces.merge import merge
from scaleray.profiling.traces.trace_clocks import clocks_from_barriers
from scaleray.profiling.traces.trace_report import ranks_of, report_on


def report(*made, **options):
    return report_on(ranks_of([each.read() for each in made]), **options)


def rank_with(starts, *, rank=0, sequences=None, **changes):
    trace = MadeTrace(rank, **changes).steps(0, 1000)
    for place, start in enumerate(starts):
        sequence = sequences[place] if sequences else None
        trace.all_reduce(start, 500 - start % 100 * 5, launched=start - 5, sequence=sequence)
    return trace


def test_sequence_numbers_join_collectives_that_one_trace_has_and_the_other_lacks():
    first = collectives_of(rank_with([100, 300, 500], sequences=[8, 9, 10]).read())
    other = collectives_of(rank_with([310, 520], rank=1, sequences=[9, 10]).read())
    meetings = join({0: first, 1: other})
    assert [(each.number, each.by_sequence) for each in meetings] == [(9, True), (10, True)]
    assert [meeting.parts[1].start_ns - meeting.parts[0].start_ns for meeting in meetings] == [10_000, 20_000]


def test_without_sequence_numbers_the_nth_call_of_a_name_in_a_group_is_the_nth_of_the_others():
    first, other = rank_with([100, 300]), rank_with([120, 330], rank=1)
    first.kernel(
        "ncclDevKernel_AllReduce()",
        400,
        10,
        launched=390,
        **{"Collective name": "allreduce", "Process Group Name": "7"},
    )
    meetings = join({0: collectives_of(first.read()), 1: collectives_of(other.read())})
    assert [(each.group, each.number, each.by_sequence) for each in meetings] == [("0", 0, False), ("0", 1, False)]


def test_what_a_collective_moved_is_known_of_nccl_and_of_gloo_with_shapes():
    (collective,) = collectives_of(rank_with([100]).read())
    assert (collective.num_bytes, collective.group_size) == (1000 * 2, 2)
    (collective,) = collectives_of(gloo_step().read())
    assert (collective.operation, collective.num_bytes, collective.group_size) == ("all_reduce", 49536 * 4, None)
    without = gloo_step()
    del without.events[-1]["args"]["Input Dims"]
    assert collectives_of(without.read())[0].num_bytes is None


def test_clocks_that_lie_apart_are_found_from_barriers_and_lateness_is_free_of_them():
    """Rank 1's clock is 5 ms ahead; it comes 40 us late to each collective. One barrier was left late, by chance."""
    barriers = [1_000_000 * number for number in range(9)]
    ahead = [5_000_000 + moment + (900_000 if moment == 3_000_000 else 0) for moment in barriers]
    first = rank_with([100, 300, 500], left_barriers_at_ns=barriers)
    other = rank_with([140, 340, 540], rank=1, clock_ahead_us=5000, left_barriers_at_ns=ahead)
    found = report(first, other)
    assert (found.clocks.ahead_ns, found.clocks.found_from) == ({0: 0, 1: 5_000_000}, "barriers")
    assert found.late_ns == {0: 0, 1: 40_000}


def test_clocks_of_other_programs_traces_are_found_from_the_ends_of_collectives():
    found = report(rank_with([100, 300]), rank_with([140, 340], rank=1, clock_ahead_us=5000))
    assert found.clocks.found_from == "collectives"
    assert found.clocks.ahead_ns[1] == pytest.approx(5_000_000, abs=200_000)
    alone = report(MadeTrace().steps(0, 100).operator("a", 0, 9), MadeTrace(1).steps(0, 100).operator("a", 0, 9))
    assert alone.clocks.found_from == "nothing" and alone.late_ns == {}


def test_the_spread_of_clocks_says_how_sure_they_are():
    clocks = clocks_from_barriers({0: [0, 0, 0, 0, 0], 1: [90, 95, 100, 105, 110]})
    assert (clocks.ahead_ns, clocks.within_ns) == ({0: 0, 1: 100}, {0: 0, 1: 5})


def merged(*made):
    by_rank = ranks_of([each.read() for each in made])
    found, pieces = report_on(by_rank), []
    files = {rank: (trace, each.file()) for (rank, trace), each in zip(by_rank.items(), made, strict=True)}
    merge(files, found.clocks, found.meetings, pieces.append)
    return json.loads("".join(pieces))


def test_the_merged_file_is_one_that_perfetto_opens_with_ranks_apart_and_on_one_clock():
    barriers = [0, 1, 2]
    first = gpu_step(0, left_barriers_at_ns=barriers)
    other = gpu_step(1, left_barriers_at_ns=[5_000_000 + each for each in barriers], clock_ahead_us=5000)
    for each in (first, other):
        each.events.append(
            {"ph": "M", "name": "process_name", "pid": 4000, "tid": 0, "ts": 0, "args": {"name": "python"}}
        )
        each.events.append(
            {"ph": "s", "id": 3, "cat": "ac2g", "name": "ac2g", "pid": 4000, "tid": 1, "ts": 10 + each.ahead}
        )
    found = merged(first, other)
    events = found["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(first.events) + len(other.events) - 4
    assert {type(event[key]) for event in events for key in ("pid", "tid")} == {int}
    assert found["baseTimeNanoseconds"] == BASE_NS and min(event["ts"] for event in complete) == 0
    assert min(event.get("ts", 0) for event in events) == 0, "Perfetto drops what comes before the begin"
    by_name = {}
    for event in complete:
        by_name.setdefault((event["name"], event["dur"]), []).append(event)
    for same in by_name.values():  # rank 1's clock was 5 ms ahead; here both did the same at the same time
        processes = {event["pid"] // 1000 for event in same}
        assert processes == {0, 1} and len({event["ts"] for event in same}) == len(same) / 2
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        "rank 0: host python", "rank 1: host python", "rank 0: GPU 0", "rank 1: GPU 0",
    }, "devices are named too, of which these traces say nothing"  # fmt: skip
    assert len({event["id"] for event in events if event.get("cat") == "ac2g"}) == 2


def arrows_in(events):
    """The ends of the arrows that join ranks, by arrow, in the order of their times; of one time, as they are written."""
    found = {}
    for event in events:
        if event.get("cat") == "collective":
            found.setdefault(event["id"], []).append(event)
    return {number: sorted(ends, key=lambda end: end["ts"]) for number, ends in found.items()}


def test_arrows_join_the_parts_of_each_collective_across_ranks():
    events = merged(gpu_step(0), gpu_step(1))["traceEvents"]
    kernels = {(event["pid"], event["tid"], event["ts"]) for event in events if event["name"].startswith("ncclDev")}
    arrows = [end for ends in arrows_in(events).values() for end in ends]
    assert sorted((arrow["ph"], arrow["id"], arrow["pid"] // 1000) for arrow in arrows) == [
        ("f", 0, 1), ("f", 1, 1), ("s", 0, 0), ("s", 1, 0),
    ]  # fmt: skip
    assert {(arrow["pid"], arrow["tid"], arrow["ts"]) for arrow in arrows} == kernels


def test_arrows_keep_to_the_trace_event_format_whichever_rank_comes_first():
    """A start, steps, and one finish, never before each other: Perfetto drops a finish that comes before its start, and
    what follows a finish. Each end lies in a slice of its thread, and the finish says that it means that one."""
    made = []
    for rank, starts in enumerate(([100, 300, 500], [90, 340, 500], [120, 290, 500])):
        trace = MadeTrace(rank, world_size=3, left_barriers_at_ns=[0, 1, 2]).steps(0, 1000)
        for sequence, start in enumerate(starts):
            trace.all_reduce(start, 80, launched=start - 5, sequence=sequence)
        made.append(trace)
    events = merged(*made)["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    arrows = arrows_in(events)
    order = [[end["pid"] // 1000 for end in ends] for ends in arrows.values()]
    assert order == [[1, 0, 2], [2, 0, 1], [0, 1, 2]], "of parts that begin together the first rank's is the first"
    for ends in arrows.values():
        assert [end["ph"] for end in ends] == ["s", "t", "f"]
        assert len({(end["cat"], end["name"], end["id"]) for end in ends}) == 1, "what makes them one arrow"
        assert [end.get("bp") for end in ends] == [None, None, "e"]
        for end in ends:
            around = [each for each in slices if (each["pid"], each["tid"]) == (end["pid"], end["tid"])]
            (around,) = [each for each in around if each["ts"] <= end["ts"] <= each["ts"] + each["dur"]]
            assert around["name"].startswith("ncclDevKernel_AllReduce")
            assert events.index(around) < events.index(end), "an end at the begin of a slice is read after it"


def test_arrows_of_ranks_with_clocks_apart_go_from_the_rank_that_really_came_first():
    barriers = [0, 1, 2]
    first = rank_with([140], sequences=[1], left_barriers_at_ns=barriers)
    ahead = [5_000_000 + each for each in barriers]
    other = rank_with([100], rank=1, sequences=[1], clock_ahead_us=5000, left_barriers_at_ns=ahead)
    ((start, finish),) = arrows_in(merged(first, other)["traceEvents"]).values()
    assert (start["ph"], start["pid"] // 1000, finish["ph"], finish["ts"] - start["ts"]) == ("s", 1, "f", 40.0)


def test_a_trace_of_another_rank_count_is_refused():
    with pytest.raises(TraceError, match=r"the number of ranks in rank1.json is 8: rank0.json is from a run with 2"):
        report(gpu_step(0), gpu_step(1, world_size=8))


def test_a_trace_of_another_torch_is_refused():
    with pytest.raises(TraceError, match=r"rank1.json is from torch 2.9.1, but rank0.json is from 2.13.0"):
        report(gpu_step(0), gpu_step(1, torch="2.9.1"))


def test_traces_of_other_steps_are_refused():
    with pytest.raises(TraceError, match=r"rank1.json has the steps \[8\], but rank0.json has \[7\]"):
        report(rank_with([100]), MadeTrace(1).steps(0, 1000, first=8))


def test_two_traces_of_one_rank_are_refused_and_so_is_one_without_a_rank():
    with pytest.raises(TraceError, match=r"the rank of rank0.json is 0: rank0.json has the same rank"):
        ranks_of([gpu_step(0).read(), gpu_step(0).read()])
    nobody = gpu_step(0)
    nobody.values["distributedInfo"]["rank"] = None
    with pytest.raises(TraceError, match="has no rank in distributedInfo"):
        ranks_of([gpu_step(1).read(), nobody.read()])
    assert list(ranks_of([nobody.read()])) == [0]


def test_a_report_has_no_value_that_is_not_a_number():
    found = report(MadeTrace().steps(0, 100).kernel("gemm", 10, 50, launched=0))
    (rank,) = found.ranks
    assert rank.overlap is None and rank.mfu is None and found.num_meetings == 0
    assert all(math.isfinite(part) for part in rank.partition.parts.values())


def test_the_mfu_of_a_rank_is_over_its_whole_steps():
    made = MadeTrace().steps(0, 1000).operator("aten::mm", 0, 10, **{"Input Dims": [[100, 10], [10, 50]]})
    (rank,) = report(made.kernel("gemm", 0, 500, launched=0), peak_flops={0: 1e9}).ranks
    assert rank.flops == 2 * 100 * 10 * 50 and rank.mfu == pytest.approx(rank.flops / 1e-3 / 1e9)
