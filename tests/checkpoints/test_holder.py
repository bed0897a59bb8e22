"""Holders: files in the memory of another process, and states in several of them, of which some are damaged."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import pickle
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from small_runs import Classify, RankContext, make_job
from waiting import wait_until

from scaleray.checkpoints import sharded
from scaleray.checkpoints.catalog import Catalog, Pruned
from scaleray.checkpoints.holder import OPEN, Holder, SharedMemory, _File
from scaleray.checkpoints.manifest import FILE_NAME, folder_name
from scaleray.checkpoints.memory_store import Generations, MemoryStore, homes
from scaleray.checkpoints.retention import Retention
from scaleray.checkpoints.saver import Saver
from scaleray.checkpoints.storage import Store
from scaleray.checkpoints.tensor_files import write_all
from scaleray.launch.cluster import connection
from scaleray.models.stored_checkpoints import MEMORY, list_checkpoints, verify_checkpoints
from scaleray.records.run_record import EventRecord, StepRecord
from scaleray.training.recovery import node_holders
from scaleray.training.setup.job import TrainJob
from scaleray.training.state.checkpointing import Checkpointing
from scaleray.training.state.memory_copies import HolderPlace, Holders, as_json, share_bytes

SECRET = "secret"
MIB = 2**20
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="memory files exist on Linux only")


@pytest.fixture
def holder():
    found = Holder("127.0.0.1", SECRET)
    yield found
    found.close()


def store_of(holder: Holder, secret: str = SECRET) -> MemoryStore:
    return MemoryStore.at("127.0.0.1", holder.port, secret)


def here(holder: Holder) -> MemoryStore:
    return MemoryStore.at("127.0.0.1", holder.port, SECRET, is_here=True)


def test_a_holder_is_a_store_like_any_other(holder, tmp_path):
    stores = [store_of(holder), Store(str(tmp_path))]
    stores[0].reserve("a worker", MIB)
    for store in stores:
        assert store.write("one/file", [b"ab", b"cd"])[1] == 4
        store.write("one/other", [b"x"])
        store.write("two/file", [torch.arange(3, dtype=torch.int16).numpy()])
    for name in ("one/file", "two/file"):
        assert stores[0].read(name) == stores[1].read(name)
    for ask in (
        lambda store: store.names(),
        lambda store: store.names("one"),
        lambda store: store.size("one/file"),
        lambda store: store.size("one/none"),
        lambda store: [(entry.name, entry.num_bytes) for entry in store.entries("one")],
        lambda store: store.digest("one/file")[1],
    ):
        assert ask(stores[0]) == ask(stores[1])
    target = bytearray(2)
    stores[0].read_into("one/file", 1, memoryview(target))
    assert bytes(target) == b"bc"
    with pytest.raises(OSError, match="ends 1 bytes too early"):
        stores[0].read_into("one/file", 3, memoryview(target))
    with pytest.raises(FileNotFoundError):
        stores[0].read("one/none")
    stores[0].copy_from(stores[1], "one/file")
    stores[0].delete("one/other")
    stores[0].delete_folder("two")
    assert [entry.name for entry in stores[0].entries("")] == ["one/file"]
    assert pickle.loads(pickle.dumps(stores[0])).read("one/file") == b"abcd"
    assert SECRET not in repr(stores[0])


def test_a_holder_that_takes_the_place_of_another_one_has_its_clients_and_their_reservations(holder, monkeypatch):
    monkeypatch.setattr("scaleray.checkpoints.memory_store.RETRY_S", 0.0)
    store = store_of(holder)
    store.reserve("a worker", MIB)
    store.write("one", [b"1"])
    holder.close()
    store._link._close()
    with pytest.raises(OSError, match="does not answer"):
        store.write("two", [b"2"])
    successor = Holder("127.0.0.1", SECRET, holder.port)
    store.write("three", [b"3" * (MIB - 1)])
    assert store.names() == ["three"]
    with pytest.raises(OSError, match="is full"):
        store.write("four", [b"44"])
    successor.close()


def test_the_buffer_of_a_removed_file_is_used_again_unless_it_was_read(holder):
    store = store_of(holder)
    store.reserve("a worker", 3 * MIB)
    store.write("one", [b"1" * MIB])
    buffer = holder._files["one"].content
    store.delete("one")
    store.write("two", [b"2" * MIB])
    assert holder._files["two"].content is buffer
    assert store.read("two") == b"2" * MIB
    store.delete_folder("two")
    store.write("three", [b"3" * MIB])
    assert holder._files["three"].content is not buffer, "its bytes may still be on the way to the reader"
    store.write("three", [b"4" * MIB])
    store.write("four", [b"5" * (2 * MIB)])  # the buffer of the first version of "three" makes room
    assert not holder._free
    assert store.read("three") == b"4" * MIB


@ON_LINUX
def test_a_client_on_the_node_writes_into_the_holders_memory(holder):
    store = here(holder)
    store.reserve("a worker", 2 * MIB)
    content = [b"1" * MIB, b"", b"23"]
    stored = store.write("one", content)
    assert isinstance(holder._files["one"].content, SharedMemory)
    assert store.read("one") == b"".join(content) and store.digest("one") == stored
    assert store.write("small", [b"4"])[1] == 1 and store.read("small") == b"4", "small files are sent"
    with pytest.raises(OSError, match="is full"):
        store.write("two", content)
    assert not holder._written


def test_a_file_is_sent_if_its_memory_cannot_be_opened_or_belongs_to_another_process(holder, monkeypatch):
    store, answer = here(holder), holder.answer
    store.reserve("a worker", 2 * MIB)
    for change in ({"path": "/nowhere"}, {"target": "/memfd:of another (deleted)"}):

        def other(request, read_into, change=change):
            found, content = answer(request, read_into)
            return (found | change if request["kind"] == OPEN else found), content

        monkeypatch.setattr(holder, "answer", other)
        store.write("one", [b"1" * MIB])
        assert store.read("one") == b"1" * MIB
        assert not holder._written


@ON_LINUX
def test_memory_of_a_file_that_could_not_be_written_is_free_again(holder, monkeypatch):
    store = here(holder)
    store.reserve("a worker", MIB)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *arguments: (_ for _ in ()).throw(OSError("no memory")))
        with pytest.raises(OSError, match="no memory"):
            store.write("one", [b"1" * MIB])
    store.write("two", [b"2" * MIB])
    assert store.names() == ["two"]


def test_memory_of_a_client_that_is_lost_while_it_writes_is_free_again(holder):
    lost, store = here(holder), here(holder)
    lost.reserve("a worker", MIB)
    lost._ask(OPEN, name="one", length=MIB)
    with pytest.raises(OSError, match="is full"):
        store.write("two", [b"2" * MIB])
    lost._link._close()
    wait_until(lambda: not holder._written, seconds=30)
    store.write("two", [b"2" * MIB])
    assert store.names() == ["two"]


def test_a_file_is_hashed_once_for_all_stores_of_a_class(holder, tmp_path, monkeypatch):
    stores = [store_of(holder), Store(str(tmp_path / "one")), Store(str(tmp_path / "two"))]
    stores[0].reserve("a worker", MIB)
    hashed, sha256 = [], hashlib.sha256
    monkeypatch.setattr("scaleray.checkpoints.storage.hashlib.sha256", lambda: hashed.append(sha256()) or hashed[-1])
    stored, problems = write_all(stores, "file", lambda: iter([b"ab", b"cd"]))
    assert stored.sha256 == sha256(b"abcd").hexdigest() == hashed[0].hexdigest()
    assert hashed[1].hexdigest() == sha256().hexdigest()
    assert not problems and all(store.read("file") == b"abcd" for store in stores)


def test_a_holder_answers_nobody_without_its_secret_and_takes_no_more_than_was_reserved(holder):
    with pytest.raises(OSError, match="does not answer"):
        store_of(holder, "another").names()
    store = store_of(holder)
    with pytest.raises(OSError, match="memory for copies is full"):
        store.write("one/file", [b"ab"])
    assert store.reserve("a worker", 3) is None
    store.write("one/file", [b"ab"])
    with pytest.raises(OSError, match="2 of 3 bytes are in use, 2 more are needed"):
        store.write("one/other", [b"cd"])
    store.write("one/file", [b"abc"])  # in its own place
    assert (holder.num_bytes, store.names()) == (3, ["one"])
    assert store.reserve("another", 2**60) > 0
    holder.close()
    with pytest.raises(OSError, match="does not answer"):
        store_of(holder).names()


@pytest.mark.parametrize(
    ("domains", "copies", "expected"),
    [
        ({"a": "1"}, 2, {"a": ("a",)}),
        ({"a": "1", "b": "2"}, 1, {"a": ("a",), "b": ("b",)}),
        ({"a": "1", "b": "2"}, 2, {"a": ("a", "b"), "b": ("b", "a")}),
        ({"a": "1", "b": "2", "c": "3"}, 2, {"a": ("a", "b"), "b": ("b", "c"), "c": ("c", "a")}),
        (
            {"a": "1", "b": "1", "c": "2", "d": "2"},
            2,
            {"a": ("a", "c"), "c": ("c", "a"), "b": ("b", "d"), "d": ("d", "b")},
        ),
    ],
)
def test_copies_go_to_groups_of_nodes_in_different_domains(domains, copies, expected):
    assert homes(domains, copies) == expected


def test_no_node_keeps_copies_within_its_rack_as_long_as_there_is_another():
    domains = {f"node{i}": f"rack{i % 3}" for i in range(16)}
    for node, places in homes(domains, 2).items():
        assert places[0] == node and len({domains[place] for place in places}) == 2


def test_states_in_memory_are_listed_and_verified_with_those_in_storage(holder, tmp_path, monkeypatch):
    save([holder], [6, 7])
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setenv("RAY_ADDRESS", "a cluster")
    monkeypatch.setattr(connection, "joined", lambda address, name: contextlib.nullcontext())
    places = {str(tmp_path): [HolderPlace("0", "0", "127.0.0.1", holder.port, SECRET)]}
    monkeypatch.setattr(node_holders, "other_holders", lambda run_path: places[run_path])
    assert [(row["step"], row["folder"]) for row in list_checkpoints(tmp_path)] == [(7, MEMORY), (6, MEMORY)]
    assert verify_checkpoints(tmp_path)["good"]
    name = next(name for name in holder._files if name.startswith(folder_name(7)) and not name.endswith(FILE_NAME))
    corrupt(holder, name, lambda content: content[:-1])
    found = verify_checkpoints(tmp_path)
    assert [(one["step"], one["good"]) for one in found["checkpoints"]] == [(7, False), (6, True)]
    assert "bytes instead of" in found["checkpoints"][0]["damages"][0]["problem"]


def test_a_state_is_used_only_if_the_record_of_its_steps_is_complete(holder):
    save([holder], [7], facts={"messages": [["StepRecord", as_json(step_record(n))] for n in (5, 6, 7, 8)]})
    job, _ = make_job(Classify(num_rows=8), {"checkpoint.memory.every": "1 step"})
    place = HolderPlace("0", "0", "127.0.0.1", holder.port, SECRET)
    for recorded, is_used in ((7, True), (4, True), (3, False), (-1, False)):
        messages: list[EventRecord] = []
        copies = Holders(place, lambda: [place], recorded=lambda recorded=recorded: recorded)
        saves = Checkpointing(job, RankContext(), Nothing([]), emit=messages.append, holders=copies)
        assert [manifest.step for manifest in saves.memory.found()] == [7] * is_used
        assert any("the record ends with step" in message.text for message in messages) is not is_used
    [manifest] = saves.memory.generations.found()[0]
    steps = saves.memory.messages(manifest)
    assert [step.step for step in steps] == [5, 6, 7]
    assert math.isnan(steps[0].loss) and steps[1] == step_record(6)


def test_the_memory_for_a_part_is_bounded_by_what_the_worker_has_alone():
    tensors = {"all.a": torch.zeros(1000), "all.b": torch.zeros(10), "mine": torch.zeros(500)}
    found = share_bytes(tensors, {"all.a", "all.b"}, 4)
    assert 4 * (1010 / 4 + 500) <= found <= 4 * (1010 / 4 + 500) + 4 * 1000 + 64 * 3


def step_record(number: int) -> StepRecord:
    return StepRecord(number, math.nan if number == 5 else 0.5, 4.0, 4, 0.1, None, 0.1, 0.0, 1.0, more={"a/b": 1.0})


def state_after(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {f"model.{name}": torch.randn(40, 3, generator=generator) for name in "abcd"}


class Kept(Generations):
    """States that are not pruned, as a loss in that moment would leave them."""

    def prune(self, *args, **options) -> Pruned:
        return Pruned([], 0)


def save(holders: list[Holder], steps: Sequence[int], facts: dict[str, Any] | None = None) -> None:
    stores = [store_of(holder) for holder in holders]
    for store in stores:
        store.reserve("a worker", MIB)
    saver = Saver(
        Kept(stores),
        None,
        world_size=1,
        strategy="ddp",
        is_asynchronous=True,
        full_every=1,
        retention=Retention(),
        emit=lambda message: None,
        repeats=True,
    )
    for step in steps:
        saver.save(step, state_after(step), volatile=set(), values=lambda gather: {"progress": {}}, facts=facts or {})
        saver.wait()
        assert saver.last_saved == step


OF_MANIFESTS = ("stale manifest", "manifest bits")
KINDS = ("bits", "length", "stale file", "lies", "missing", *OF_MANIFESTS)


def corrupt(holder: Holder, name: str, change: Callable[[bytearray], bytearray]) -> None:
    """Replace the content of a file that a holder has."""
    holder._files[name].content = change(holder._files[name].content)


class Nothing(Catalog):
    """No checkpoints in storage."""

    def steps(self) -> list[int]:
        return []


def damage(kind: str, holder: Holder, rng: random.Random) -> None:
    """Damage what a holder has of step 7."""
    names = sorted(name for name in holder._files if name.startswith(f"{folder_name(7)}/"))
    manifest = next(name for name in names if name.endswith(FILE_NAME))
    file = next(name for name in names if name != manifest)
    older = next(n for n in holder._files if n.startswith(f"{folder_name(6)}/") and not n.endswith(FILE_NAME))

    def flipped(content: bytearray) -> bytearray:
        changed = bytearray(content)
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        return changed

    if kind == "bits":
        corrupt(holder, file, flipped)
    elif kind == "length":
        corrupt(holder, file, lambda content: content[: rng.randrange(len(content))])
    elif kind == "stale file":
        corrupt(holder, file, lambda content: bytearray(holder._files[older].content))
    elif kind == "stale manifest":
        corrupt(holder, manifest, lambda content: bytearray(holder._files[f"{folder_name(6)}/{FILE_NAME}"].content))
    elif kind == "manifest bits":
        corrupt(holder, manifest, flipped)
    elif kind == "missing":
        del holder._files[file]
    else:
        answer = holder.answer

        def lie(request, read_into):
            found, content = answer(request, read_into)
            if request.get("name") == file and len(content):
                content = bytes(rng.randrange(256) for _ in range(len(content)))
            return found, content

        holder.answer = lie


def test_no_damaged_copy_is_loaded_and_each_is_named(monkeypatch):
    monkeypatch.setattr(TrainJob, "continued", lambda job, progress: job)  # these states are of no training
    rng, num_named, found = random.Random(0), 0, set()
    job, _ = make_job(Classify(num_rows=8), {"checkpoint.memory.every": "1 step"})
    holders = [Holder("127.0.0.1", SECRET) for _ in range(2)]
    save(holders, [6, 7])
    good = [{name: bytes(file.content) for name, file in holder._files.items()} for holder in holders]
    places = [HolderPlace(str(i), str(i), "127.0.0.1", h.port, SECRET) for i, h in enumerate(holders)]
    for number in range(1000):
        for holder, contents in zip(holders, good, strict=True):
            vars(holder).pop("answer", None)
            holder._files = {name: _File(bytearray(content)) for name, content in contents.items()}
        damaged = holders if number % 2 else [rng.choice(holders)]
        kinds = [rng.choice(KINDS) for _ in damaged]
        for kind, holder in zip(kinds, damaged, strict=True):
            damage(kind, holder, rng)
        messages: list[EventRecord] = []
        copies = Holders(places[0], lambda: places)
        saves = Checkpointing(job, RankContext(), Nothing([]), emit=messages.append, holders=copies)
        step = saves.find()
        one_of_each = len(damaged) == 1 or len({kind in OF_MANIFESTS for kind in kinds}) == 2
        assert step == (7 if one_of_each else 6), kinds
        target = {name: torch.zeros(40, 3) for name in state_after(0)}
        sharded.load(target, saves._source.stores, saves.resumed_from, None)
        assert all(torch.equal(target[name], value) for name, value in state_after(step).items()), kinds
        text = " ".join(message.text for message in messages)
        for kind, holder in zip(kinds, damaged, strict=True):
            if kind != "missing":
                assert f"memory://127.0.0.1:{holder.port}/{folder_name(7)}/" in text, (kinds, text)
                num_named += 1
        found.add((step, *kinds))
    for holder in holders:
        holder.close()
    assert len(found) > len(KINDS) and num_named > 1000
