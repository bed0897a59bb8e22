"""Messages between the coordinator of recoveries and workers, without any training."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import torch.distributed as dist

from scaleray.errors import PeerLostError
from scaleray.training.recovery.coordinator import Coordinator
from scaleray.training.recovery.member import Member
from scaleray.training.recovery.recovering import train_in_groups

HOST, TOKEN = "127.0.0.1", "secret"


@pytest.fixture
def coordinator():
    ended: list[int] = []
    found = Coordinator(HOST, 2, token=TOKEN, silent_s=60.0, end=lambda number, node, pid: ended.append(number))
    found.ended = ended
    yield found
    found.close()


def member(coordinator, number, *, token=TOKEN, silent_s=60.0):
    return Member(coordinator.place, token, number=number, node=HOST, silent_s=silent_s)


def groups_of(members):
    """The next group of each member, which waits in a thread of its own."""
    found = {}
    threads = [threading.Thread(target=lambda m=m, n=n: found.update({n: m.next_group()})) for n, m in members.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return found


def test_a_spare_gets_the_rank_and_the_random_state_of_a_lost_worker(coordinator):
    torch = pytest.importorskip("torch")
    members = {number: member(coordinator, number) for number in range(2)}
    first = groups_of(members)
    assert {number: group.rank for number, group in first.items()} == {0: 0, 1: 1}
    members[1].keep_random(1, 3, {"torch": torch.arange(5, dtype=torch.uint8)})
    members[2] = member(coordinator, 2)
    members[1].close()
    del members[1]
    second = groups_of(members)
    assert {number: group.rank for number, group in second.items()} == {0: 0, 2: 1}
    assert second[2].random[3]["torch"].tolist() == [0, 1, 2, 3, 4]
    assert second[0].epoch == 2 and second[0].store != first[0].store
    assert "rank 1 (worker 1" in second[0].lost[0]


def test_a_worker_with_an_error_of_its_own_is_not_called_lost():
    said: list[str] = []
    coordinator = Coordinator(HOST, 2, token=TOKEN, silent_s=60.0, say=said.append)
    members = {number: member(coordinator, number) for number in range(3)}
    groups_of({number: members[number] for number in range(2)})
    members[1].fail()
    again = groups_of({0: members[0], 2: members[2]})
    assert again[2].rank == 1, "the error may be one of that machine alone"
    [text] = said
    assert text.startswith("rank 1 (worker 1 ") and text.endswith(" ended with an error")
    coordinator.close()


def test_a_member_that_is_late_for_a_later_group_is_in_time_for_the_next_one(coordinator):
    members = {number: member(coordinator, number) for number in range(2)}
    results: dict[int, list[int]] = {0: [], 1: []}

    def trained(number: int) -> None:
        def join(group):
            if group.epoch == 2 and number == 1:
                raise dist.DistStoreError("wait timeout after 4000ms")

        def train(group, live):
            results[number].append(group.epoch)
            if group.epoch < 3:
                raise PeerLostError("another worker is gone")
            return number

        assert train_in_groups(members[number], join, train) == number

    threads = [threading.Thread(target=trained, args=[number]) for number in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == {0: [1, 2, 3], 1: [1, 3]}


def test_a_worker_that_is_silent_is_ended_and_replaced():
    ended: list[int] = []
    coordinator = Coordinator(HOST, 2, token=TOKEN, silent_s=1.0, end=lambda number, node, pid: ended.append(number))
    members = {number: member(coordinator, number, silent_s=1.0) for number in range(3)}
    groups_of({number: members[number] for number in range(2)})
    members[1]._stop.set()  # it sends no sign of life any more
    again = groups_of({0: members[0], 2: members[2]})
    assert ended == [1]
    assert again[2].rank == 1
    coordinator.close()


def test_training_is_over_when_all_members_are_done_and_spares_then_end_too(coordinator):
    members = {number: member(coordinator, number) for number in range(3)}
    groups_of({number: members[number] for number in range(2)})
    done = {}
    threads = [threading.Thread(target=lambda n=n: done.update({n: members[n].complete()})) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert done == {0: True, 1: True}
    assert members[2].next_group() is None


def test_without_a_coordinator_a_training_ends_but_no_group_follows(coordinator):
    members = {number: member(coordinator, number) for number in range(2)}
    groups_of(members)
    coordinator.close()
    assert members[0].complete() and members[0].complete()
    with pytest.raises(PeerLostError, match="coordinator of recoveries is lost"):
        members[1].next_group()


def test_nobody_joins_without_the_secret(coordinator):
    stranger = member(coordinator, 0, token="guess")
    with pytest.raises(PeerLostError):
        stranger.next_group()
    with socket.create_connection((HOST, coordinator.place.port)) as connection:
        connection.sendall(b"[1, 2]\n")
        assert connection.recv(1) == b""
    members = {number: member(coordinator, number) for number in range(2)}
    assert len(groups_of(members)) == 2


def test_a_worker_waits_until_the_coordinator_has_its_random_state(coordinator):
    torch = pytest.importorskip("torch")
    members = {number: member(coordinator, number) for number in range(2)}
    groups_of(members)
    for step in range(100):
        members[0].keep_random(0, step, {"torch": torch.tensor([step])})
        assert sorted(coordinator._random[0])[-1] == step


def test_a_worker_waits_for_a_coordinator_that_is_stopped_and_for_none_that_is_lost(coordinator):
    torch = pytest.importorskip("torch")
    members = {number: member(coordinator, number) for number in range(2)}
    groups_of(members)
    coordinator._loop.call_soon_threadsafe(time.sleep, 1.0)
    began = time.monotonic()
    members[0].keep_random(0, 1, {"torch": torch.tensor([1])})
    assert 0.8 < time.monotonic() - began < 30
    coordinator.close()
    for step in range(2, 4):
        members[0].keep_random(0, step, {"torch": torch.tensor([step])})
