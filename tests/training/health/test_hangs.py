"""A planted hang is explained: the collective, its number, who did not come, and the line that each rank stands on."""

from __future__ import annotations

import inspect
import pickle

import hanging_group
import pytest
from hanging_group import hanging
from torch_analyzer import first_trouble
from waiting import wait_until

from scaleray.launch.workers.hang_reports import explain_hang, read_report
from scaleray.profiling.desync import Kind, find
from scaleray.records.hangs import place_of


def line_of(case, words):
    """`file:number` of the line of a case with these words."""
    lines, first = inspect.getsourcelines(case)
    (number,) = [first + n for n, line in enumerate(lines) if words in line]
    return f"hanging_group.py:{number} in {case.__name__}"


def explained(case, tmp_path, *, kind, number, missing=(), odd=(), waiting, mute=()):
    """Analysis, dumps and words of a planted hang, once its ranks have come as far as is expected of them. mute: ranks that
    cannot speak."""
    found = report = None
    with hanging(case, 3, tmp_path) as group:

        def is_so():
            nonlocal found, report
            group.look(mute)
            report = read_report(str(tmp_path), group.beats())
            found = find(report.dumps) if report else None
            known = (found.kind, found.number, found.missing, found.odd, found.waiting) if found else None
            is_whole = report is not None and all(dump.is_complete for dump in report.dumps.values())
            # a call that has ended everywhere is marked as done by each rank in its own time
            is_whole = is_whole and all(
                call.is_done for dump in report.dumps.values() for call in dump.calls or () if call.number < number
            )
            return known == (kind, number, missing, odd, waiting) and is_whole and len(report.dumps) == 3

        try:
            wait_until(is_so, seconds=60)
        except AssertionError:
            pytest.fail(f"found {found} in {report.dumps if report else None}")
        text = explain_hang(str(tmp_path), group.beats())
        assert str(group.folder) in text
        assert not [path for path in group.folder.iterdir() if is_pickle(path)]
        assert found.call.operation == "all_reduce"
        return found, report.dumps, text


def is_pickle(path):
    try:
        pickle.loads(path.read_bytes())  # made by this test's own processes
    except Exception:
        return False
    return True


def test_a_rank_that_skips_a_collective_is_named_with_the_line_that_it_left_out(tmp_path):
    case = hanging_group.skips
    _, dumps, text = explained(case, tmp_path, kind=Kind.ABSENT, number=3, missing=(1,), waiting=(0, 2))
    assert "ranks 0, 2 wait in collective 3 of group default_pg, all_reduce float [16]" in text
    assert "rank 1 did not arrive" in text and "time.sleep(600)  # the end" in text, "where rank 1 stands"
    assert "rank 1 skipped number 2, which the others called (" in text
    assert line_of(case, "leaves this out") in text
    assert first_trouble(dumps) == (3, {1})


@pytest.mark.combination
def test_a_rank_in_a_loop_that_holds_pythons_lock_is_named_by_the_others_and_its_line_by_the_fault_handler(tmp_path):
    case = hanging_group.holds_the_lock
    _, dumps, text = explained(case, tmp_path, kind=Kind.ABSENT, number=2, missing=(1,), waiting=(0, 2), mute=(1,))
    assert dumps[1].calls is None
    assert f"{line_of(case, 'PyDLL')}, called at" in text and "(it holds Python's lock" in text
    assert first_trouble(dumps) is None, "torch wants an account of each rank"


def test_a_rank_that_sleeps_in_user_code_is_named_with_its_line(tmp_path):
    case = hanging_group.sleeps
    _, dumps, text = explained(case, tmp_path, kind=Kind.ABSENT, number=2, missing=(1,), waiting=(0, 2))
    assert f"rank 1 is at {place_of(dumps[1].stands_on)}" in text and line_of(case, "asleep in user code") in text
    assert first_trouble(dumps) == (2, {1})


def test_a_rank_that_calls_two_collectives_in_the_other_order_is_named(tmp_path):
    case = hanging_group.other_order
    found, dumps, text = explained(case, tmp_path, kind=Kind.OTHER_CALL, number=3, odd=(1,), waiting=(0, 1, 2))
    assert found.calls[1].operation == "broadcast"
    assert "or calls the two in reverse order" in text and line_of(case, "before the other") in text
    assert first_trouble(dumps)[0] == 3


@pytest.mark.parametrize(
    ("case", "kind", "word"),
    [
        (hanging_group.other_size, Kind.OTHER_SIZE, "float [64]"),
        (hanging_group.other_type, Kind.OTHER_TYPE, "double [16]"),
    ],
)
def test_a_rank_with_another_size_or_dtype_is_named_although_gloo_ends_a_process(tmp_path, case, kind, word):
    # rank 0 receives more than it expects; of the other two nobody can tell which is right
    _, dumps, text = explained(case, tmp_path, kind=kind, number=2, missing=(0,), odd=(2,), waiting=(1, 2), mute=(0,))
    assert dumps[0].why == "Aborted" and line_of(case, "if rank == 1 else") in place_of(dumps[0].stands_on)
    assert f"all_reduce {word} (" in text and "all_reduce float [16] (" in text
    assert "gloo ends a process that receives more" in text
    assert first_trouble(dumps)[0] == 2
