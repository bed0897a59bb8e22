"""Connections of a broken group are closed at both ends, and a process that gloo keeps in one ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import struct
import threading
import time

import torch
import torch.distributed as dist

from scaleray.training.process_group import join_group
from scaleray.training.recovery.connections import GroupConnections
from scaleray.training.recovery.coordinator import Coordinator
from scaleray.training.recovery.member import EXIT_CODE, Member
from scaleray.training.setup.stores import OwnedStore, open_store

HOST, SECRET, NUM_VALUES = "127.0.0.1", "secret", 2**26


def pair(server, *, is_of_gloo):
    """Both ends of a new connection."""
    ours = socket.create_connection(server.getsockname())
    theirs, _ = server.accept()
    if is_of_gloo:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 60, 0))
    return ours, theirs


def is_open(connection):
    connection.settimeout(0.2)
    try:
        return connection.recv(1) != b""
    except TimeoutError:
        return True


def test_connections_of_a_group_are_closed_from_the_end_that_opened_them_and_no_others():
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server((HOST, 0)))
        older = pair(server, is_of_gloo=True)
        found = GroupConnections()
        of_group, of_user = pair(server, is_of_gloo=True), pair(server, is_of_gloo=False)
        for end in (*older, *of_group, *of_user):
            stack.enter_context(end)
        assert not found.close()
        assert not is_open(of_group[1])
        assert is_open(of_user[1])
        assert is_open(older[1])
        for end in of_group:
            end.close()
        assert not found.close()  # there is no group
        stack.enter_context(socket.create_server((HOST, 0)))
        assert found.close()


def join(place, number, timeout_s):
    join_group(
        place,
        "gloo",
        timeout_s,
        name="group",
        node=HOST,
        device="cpu",
        rank=number,
        world_size=2,
        local_rank=number,
        local_world_size=2,
        node_rank=0,
    )


def meet_later(number, first, second):
    torch.set_num_threads(1)
    if number == 1:
        with contextlib.suppress(dist.DistStoreError):
            join(first, number, 1.0)
            os._exit(2)
    join(second, number, 20.0)
    dist.barrier()


def test_a_worker_whose_attempt_to_form_a_group_has_failed_meets_a_new_one_in_the_next():
    places = [OwnedStore(HOST) for _ in range(2)]
    stores = [open_store(owned.place) for owned in places]
    context = multiprocessing.get_context("spawn")
    arguments = [owned.place for owned in places]
    processes = [context.Process(target=meet_later, args=(number, *arguments)) for number in range(2)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=100)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
        del stores
        for owned in places:
            owned.close()


def run(number, place):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    member = Member(place, SECRET, number=number, node=HOST, silent_s=60.0)
    member._longest_s = 100.0  # of a step
    member.next_group().join("gloo", 300.0, "cpu")
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    values = torch.zeros(NUM_VALUES)
    if number == 1:
        dist.send(values + 1, 0)
        return

    def kill_sender():
        while values[0] == 0:  # nothing has come
            time.sleep(0.001)
        os.kill(pids[1], signal.SIGKILL)

    threading.Thread(target=kill_sender, daemon=True).start()
    dist.recv(values, 1)


def test_a_process_ends_that_waits_for_the_rest_of_a_message_of_a_lost_one():
    coordinator = Coordinator(HOST, 2, token=SECRET, silent_s=60.0)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=run, args=(number, coordinator.place)) for number in range(2)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=60)
        assert [process.exitcode for process in processes] == [EXIT_CODE, -signal.SIGKILL]
    finally:
        for process in processes:
            process.kill()
        coordinator.close()
