"""A worker says where it is, and notices when it hangs."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections import deque

import pytest
from waiting import wait_until

from scaleray.records.worker_requests import ControlRequest
from scaleray.training.health.worker_progress import Progress, Tail, Watchdog, waits_for_others, where


def watch(progress, *, limit_s=0.2, beat=lambda step, phase, since_s: ControlRequest.NOTHING):
    hangs: list[str] = []
    leaves = threading.Event()
    dog = Watchdog(progress, interval_s=0.02, limit_s=limit_s, beat=beat, on_leave=leaves.set, on_hang=hangs.append)
    return dog, hangs, leaves


def test_a_thread_that_stays_in_the_users_loss_is_found_with_its_place():
    release = threading.Event()
    progress = Progress()

    def users_loss():
        progress.thread_id = threading.get_ident()
        progress.finish_step(36)
        progress.enter("forward")
        release.wait(30)

    dog, hangs, _ = watch(progress)
    thread = threading.Thread(target=users_loss)
    with dog:
        thread.start()
        wait_until(lambda: hangs)
    release.set()
    thread.join()
    (text,) = hangs
    assert "`forward` of step 37" in text
    assert "test_progress.py" in text and "users_loss" in text and "release.wait" in text


def test_waiting_in_a_collective_or_for_input_is_no_hang_of_this_worker():
    for phase in ("backward", "exposed_communication", "input", "start", "checkpoint"):
        progress = Progress()
        progress.finish_step(1)
        progress.enter(phase)
        beats = []
        dog, hangs, _ = watch(progress, limit_s=0.01, beat=lambda *beat, beats=beats: beats.append(beat))
        with dog:
            wait_until(lambda beats=beats: len(beats) >= 3)
        assert hangs == [] and {beat[1] for beat in beats} == {phase}


def test_the_first_step_may_take_longer():
    progress = Progress()
    progress.enter("forward")
    progress.since = time.monotonic() - 0.5
    dog, hangs, _ = watch(progress, limit_s=0.4)
    with dog:
        wait_until(lambda: hangs)
    assert float(hangs[0].split(" for ")[1].split(" s")[0]) >= 1


def in_a_function_of(file, release):
    """Wait inside a function whose code comes from this file."""
    names = {"release": release}
    exec(compile("def work():\n    release.wait(30)", file, "exec"), names)
    names["work"]()


def long_since(progress, phase, *, seconds):
    progress.enter(phase)
    progress.since = time.monotonic() - seconds


@pytest.mark.parametrize(
    "file",
    ["/x/torch/_dynamo/convert_frame.py", "/x/torch/_inductor/compile_fx.py", "/x/torch/_inductor/async_compile.py"],
)
def test_a_thread_that_compiles_in_the_middle_of_training_is_no_hang_and_says_what_it_does(file):
    progress, release, beats = Progress(), threading.Event(), []
    progress.enter("forward")
    progress.enter("optimizer")
    progress.finish_step(22)
    thread = threading.Thread(target=in_a_function_of, args=(file, release))
    thread.start()
    progress.thread_id = thread.ident
    long_since(progress, "forward", seconds=100)
    dog, hangs, _ = watch(progress, limit_s=50, beat=lambda *beat: beats.append(beat))
    with dog:
        wait_until(lambda: len(beats) >= 3)
        assert hangs == [] and beats[-1][:2] == (22, "compiling")
        release.set()  # what was compiled runs, and has its time
        wait_until(lambda: beats[-1][1] == "forward")
        assert hangs == []
        progress.since = time.monotonic() - 100  # the next pass compiles nothing
        wait_until(lambda: hangs)
    thread.join()


def test_a_compiler_that_hangs_is_found_after_three_times_the_limit():
    progress, release = Progress(), threading.Event()
    progress.enter("forward")
    progress.finish_step(22)
    thread = threading.Thread(target=in_a_function_of, args=("/x/torch/_dynamo/convert_frame.py", release))
    thread.start()
    progress.thread_id = thread.ident
    long_since(progress, "forward", seconds=160)
    dog, hangs, _ = watch(progress, limit_s=50)
    with dog:
        wait_until(lambda: hangs)
    release.set()
    thread.join()


def test_the_first_evaluation_may_take_as_long_as_a_first_step():
    progress, beats = Progress(), []
    progress.enter("forward")
    progress.finish_step(1)
    long_since(progress, "evaluation", seconds=100)
    dog, hangs, _ = watch(progress, limit_s=50, beat=lambda *beat: beats.append(beat))
    with dog:
        wait_until(lambda: len(beats) >= 3)
        assert hangs == []
        progress.enter("input")
        long_since(progress, "evaluation", seconds=100)
        wait_until(lambda: hangs)


def test_a_request_to_leave_reaches_the_loop_and_a_deaf_recorder_is_no_reason_to_stop():
    progress = Progress()
    calls = []

    def beat(step, phase, since_s):
        calls.append(step)
        if len(calls) < 3:
            raise ConnectionError("nobody listens")
        return ControlRequest.LEAVE

    dog, hangs, leaves = watch(progress, beat=beat)
    with dog:
        wait_until(leaves.is_set)
    assert len(calls) >= 3 and hangs == []


def test_the_last_lines_are_remembered_and_passed_on():
    lines: deque[str] = deque(maxlen=3)
    stream = io.StringIO()
    tail = Tail(stream, lines)
    print("one\ntwo", file=tail)
    print("half", end="", file=tail)
    tail.write(" line\n\nfour\nfi")
    tail.writelines(["ve\n", "six"])
    assert list(lines) == ["half line", "four", "five"]
    assert stream.getvalue() == "one\ntwo\nhalf line\n\nfour\nfive\nsix"
    tail.flush()


def test_a_place_is_given_even_for_a_thread_that_is_gone():
    assert where(0) == "the thread is gone"
    assert "test_progress.py" in where(threading.get_ident())


@pytest.mark.parametrize("file", ["/x/torch/cuda/streams.py", "/x/scaleray/strategies/contract/later.py"])
def test_a_worker_that_waits_for_its_device_waits_for_others(file):
    """In a GPU's queue a collective of NCCL waits for the other ranks, and the host for what comes after it."""
    lock, names = threading.Lock(), {}
    lock.acquire()
    exec(compile("def work(lock):\n    lock.acquire()", file, "exec"), names)
    thread = threading.Thread(target=names["work"], args=(lock,))
    thread.start()
    wait_until(lambda: sys._current_frames()[thread.ident].f_code.co_filename == file)
    assert waits_for_others(thread.ident)
    lock.release()
    thread.join()
