"""Which collective a training hangs in and who is to blame, from what each rank says; torch's own analyzer agrees."""

from __future__ import annotations

import dataclasses

import pytest
from torch_analyzer import first_trouble

from scaleray.launch.workers.hang_reports import ranks, to_text
from scaleray.profiling.desync import Kind, find
from scaleray.records.hangs import CALLS_KEPT, CALLS_OF_A_GROUP, Call, Group, Line, RankDump, are_all, calls_of

ALL, LEFT, RIGHT = "0", "1", "2"


def groups(world_size):
    half = world_size // 2
    return (
        Group(ALL, "default_pg", tuple(range(world_size))),
        Group(LEFT, "left", tuple(range(half))),
        Group(RIGHT, "right", tuple(range(half, world_size))),
    )


class Rank:
    """A rank whose calls are written down one after another."""

    def __init__(self, rank, world_size=4):
        self.rank, self.world_size = rank, world_size
        self.calls: list[Call] = []

    def call(self, operation="all_reduce", size=16, *, group=ALL, dtype="float", done=True, line=None, backend="gloo"):
        number = 1 + sum((c.group, c.backend) == (group, backend) for c in self.calls)
        lines = (Line("model.py", line, "loss"),) if line else ()
        at = 1000 * (len(self.calls) + 1) + self.rank
        sizes = ((size,),)
        call = Call(group, backend, number, operation, sizes, sizes, (dtype,), done, at, False, lines)
        self.calls.append(call)
        return self

    def dump(self, stands_on=9, **changes):
        where = (Line("model.py", stands_on, "loss", "work()"),)
        own = tuple(g for g in groups(self.world_size) if self.rank in g.ranks)
        dump = RankDump(
            self.rank, self.world_size, "here", 1, "", 7, "loss", 9.0, 0.0, "2.13", own, tuple(self.calls), True, False, where
        )  # fmt: skip
        return dataclasses.replace(dump, **changes)


def dumps(*each):
    return {rank.rank: rank.dump() for rank in each}


def many(world_size, act):
    made = [Rank(rank, world_size) for rank in range(world_size)]
    for rank in made:
        act(rank)
    return dumps(*made)


def test_ranks_that_agree_have_no_trouble():
    found = many(4, lambda rank: rank.call().call("broadcast", 4))
    assert find(found) is None and first_trouble(found) is None


def test_a_rank_that_did_not_come_is_told_from_those_that_wait():
    found = many(4, lambda rank: rank.call() if rank.rank == 2 else rank.call().call("all_gather", 8, done=False))
    trouble = find(found)
    assert (trouble.kind, trouble.number, trouble.missing, trouble.waiting) == (Kind.ABSENT, 2, (2,), (0, 1, 3))
    assert trouble.group.description == "default_pg" and trouble.call.operation == "all_gather"
    assert first_trouble(found) == (2, {2})


def test_a_rank_of_which_nothing_is_known_is_the_one_that_did_not_come():
    found = many(3, lambda rank: rank.call().call(done=False))
    del found[1]
    trouble = find(found)
    assert (trouble.kind, trouble.number, trouble.missing) == (Kind.ABSENT, 2, (1,))
    assert "rank 1 left no record" in to_text(trouble, found)
    found[1] = Rank(1, 3).dump(calls=None, why="it holds Python's lock")
    assert find(found).missing == (1,)
    assert "rank 1 is at model.py:9 in loss: work() (it holds Python's lock)" in to_text(find(found), found)


def test_after_an_error_the_last_call_of_each_rank_is_the_one_it_was_in():
    found = {rank: dump for rank, dump in many(3, lambda rank: rank.call().call()).items() if rank != 1}
    assert find(found) is None, "all of it is done"
    failed = {rank: dataclasses.replace(dump, is_after_error=True) for rank, dump in found.items()}
    assert (find(failed).number, find(failed).missing) == (2, (1,))


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"operation": "reduce"}, Kind.OTHER_CALL),
        ({"size": 8}, Kind.OTHER_SIZE),
        ({"dtype": "double"}, Kind.OTHER_TYPE),
    ],
)
def test_a_call_that_differs_on_one_rank_is_found_with_its_number(changes, kind):
    found = many(4, lambda rank: rank.call().call(**(changes if rank.rank == 3 else {}), done=False, line=3))
    trouble = find(found)
    assert (trouble.kind, trouble.number, trouble.odd) == (kind, 2, (3,))
    assert trouble.call.operation == "all_reduce"
    assert first_trouble(found)[0] == 2
    text = to_text(trouble, found)
    assert "collective 2 of group default_pg differs" in text and "on ranks 0-2" in text and "on rank 3" in text


def test_a_difference_that_was_long_ago_is_found_although_all_went_on():
    found = many(2, lambda rank: rank.call(dtype="int" if rank.rank else "float").call().call())
    assert (find(found).kind, find(found).number) == (Kind.OTHER_TYPE, 1)


def test_sizes_that_may_differ_are_no_trouble():
    for operation in ("all_to_all", "all_to_all_single", "all_gather_v"):
        assert find(many(3, lambda rank, name=operation: rank.call(name, 8 + rank.rank))) is None
    found = many(2, lambda rank: rank.call("scatter"))
    found[1] = dataclasses.replace(
        found[1], calls=tuple(dataclasses.replace(c, input_sizes=()) for c in found[1].calls)
    )
    assert find(found) is None, "one rank alone puts something into a scatter"


def test_a_call_left_out_is_told_from_one_too_many_and_from_another_order_by_the_calls_around_it():
    def around(rank, *, odd, usual=("all_reduce", "broadcast", "reduce")):
        for name in odd if rank.rank == 1 else usual:
            rank.call(name, done=False)

    left_out = find(many(3, lambda rank: around(rank, odd=("broadcast", "reduce"))))
    assert "rank 1 skipped all_reduce" in left_out.hint
    one_more = find(many(3, lambda rank: around(rank, odd=("gather", "all_reduce", "broadcast"))))
    assert "rank 1 calls gather float [16] before it; the others do not" in one_more.hint
    order = find(many(3, lambda rank: around(rank, odd=("broadcast", "all_reduce", "reduce"))))
    assert order.hint == "rank 1 calls the two in reverse order"
    assert {trouble.number for trouble in (left_out, one_more, order)} == {1}


def test_where_everybody_waits_at_once_the_rounds_before_tell_what_was_left_out():
    def act(rank):
        rank.call("all_reduce").call("broadcast")
        rank.call("broadcast" if rank.rank == 1 else "all_reduce", done=False)

    trouble = find(many(3, act))
    assert (trouble.kind, trouble.number, trouble.odd) == (Kind.OTHER_CALL, 3, (1,))
    assert "before, broadcast float [16] came right after all_reduce float [16]" in trouble.hint


def test_a_call_left_out_that_looks_like_the_next_one_is_found_by_its_line():
    def act(rank):
        rank.call(line=3)
        if rank.rank != 1:
            rank.call(line=4)
        rank.call(line=5, done=rank.rank == 1)

    found = many(3, act)
    trouble = find(found)
    assert (trouble.kind, trouble.number, trouble.missing) == (Kind.ABSENT, 3, (1,))
    assert trouble.hint == "rank 1 skipped number 2, which the others called (model.py:4 in loss)"
    assert first_trouble(found) == (3, {1})


def test_the_group_where_it_began_is_named_and_not_those_that_wait_for_it():
    def act(rank):
        rank.call()
        if rank.rank == 1:
            return  # asleep
        if rank.rank == 0:
            rank.call(group=LEFT, done=False)
        else:
            rank.call(done=False)  # waits for ranks 0 and 1

    trouble = find(many(4, act))
    assert trouble.group.description == "left"
    assert (trouble.missing, trouble.waiting) == ((1,), (0,))


def test_ranks_that_wait_for_each_other_in_two_groups_are_a_circle():
    def act(rank):
        rank.call().call(group=LEFT if rank.rank == 0 else ALL, done=False)

    pair = (Group(ALL, "default_pg", (0, 1)), Group(LEFT, "left", (0, 1)))
    made = [Rank(0, 2), Rank(1, 2)]
    for rank in made:
        act(rank)
    found = {rank.rank: rank.dump(groups=pair) for rank in made}
    trouble = find(found)
    assert trouble.kind == Kind.CIRCLE and {trouble.missing, trouble.and_then.missing} == {(0,), (1,)}
    assert "did not arrive, since rank" in to_text(trouble, found)


def test_a_collective_that_all_came_to_and_that_does_not_end_points_at_the_network():
    found = many(3, lambda rank: rank.call().call(done=False))
    trouble = find(found)
    assert (trouble.kind, trouble.number) == (Kind.UNFINISHED, 2)
    assert "check the network" in to_text(trouble, found)


def test_backends_of_one_group_count_for_themselves():
    def act(rank):
        rank.call(backend="nccl").call(backend="gloo")
        if rank.rank:
            rank.call(backend="nccl", done=False)

    trouble = find(many(2, act))
    assert (trouble.number, trouble.call.backend, trouble.missing) == (2, "nccl", (0,))


def test_a_rank_whose_calls_in_a_group_are_forgotten_is_not_said_to_lack_them():
    found = many(2, lambda rank: rank.call(group=LEFT) if rank.rank else rank.call())
    pair = (Group(ALL, "default_pg", (0, 1)),)
    found = {rank: dataclasses.replace(dump, groups=pair, has_all_calls=False) for rank, dump in found.items()}
    assert find(found) is None


def test_the_newest_calls_are_kept_and_some_of_each_group():
    def entry(number, group):
        return {
            "record_id": number, "process_group": (group, "x"), "collective_seq_id": number, "p2p_seq_id": 0, "is_p2p": False, "profiling_name": "gloo:all_reduce",
            "input_sizes": [[1]], "output_sizes": [[1]], "input_dtypes": ["Float"], "output_dtypes": ["Float"], "retired": True, "time_created_ns": number,
        }  # fmt: skip

    entries = [entry(n, "rare" if n < 40 else "often") for n in range(2 * CALLS_KEPT)]
    kept = calls_of(entries, [()] * len(entries))
    assert len(kept) == CALLS_KEPT + CALLS_OF_A_GROUP
    assert [call.number for call in kept if call.group == "rare"] == list(range(20, 40))
    assert not are_all(entries, kept)
    few = calls_of(entries[:30], [()] * 30)
    assert are_all(entries[:30], few) and not are_all(entries[5:30], few[5:]), "the ring has lost its first ones"


def test_an_account_survives_its_file():
    dump = Rank(1).call(line=3).call(done=False).dump()
    assert RankDump.from_json(dump.to_json()) == dump
    assert repr(dump).splitlines()[0] == "rank 1 in `loss` of step 8, "


def test_ranks_are_written_as_people_do():
    assert [ranks(r) for r in ((3,), (0, 1), (7, 0, 2, 3, 4), range(1000))] == [
        "rank 3",
        "ranks 0, 1",
        "ranks 0, 2-4, 7",
        "ranks 0-999",
    ]


def test_many_ranks_are_told_in_few_lines():
    found = {
        rank: Rank(rank, 1000).call(done=rank == 5).dump(stands_on=rank if rank < 8 else 8) for rank in range(1000)
    }
    del found[5]
    text = to_text(find(found), found)
    assert len(text.splitlines()) == 9 and "and at 2 other lines" in text and len(text) < 1000
