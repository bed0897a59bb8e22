"""Snapshots of a device's memory: four numbers with known answers, and pickles that cannot run code."""

import io
import json
import os
import pickle

import pytest

from scaleray.errors import TraceError
from scaleray.profiling.traces.memory_blocks import CATEGORIES, FORMAT, read_snapshot

PARAMETERS, GRADIENTS, STATE, OTHERS = CATEGORIES
MIB = 2**20


def block(size, state="active_allocated", *, requested=None, **more):
    return {"size": size * MIB, "requested_size": (requested or size) * MIB, "state": state, "address": 0, **more}


def snapshot(**changes):
    """20 MiB with a hole of 6 and one of 4 between blocks in use; 10 MiB that nobody uses at all."""
    frames = [{"filename": "torch/optim/adam.py", "line": 3, "name": "_init_group"}]
    first = [
        block(2, requested=1, category=PARAMETERS),
        block(6, "inactive"),
        block(3, category=GRADIENTS),
        block(4, "inactive"),
        block(4, "active_awaiting_free"),
        block(1, frames=frames),
    ]
    segments = [{"total_size": 20 * MIB, "segment_type": "large", "blocks": first}]
    segments.append({"total_size": 10 * MIB, "segment_type": "large", "blocks": [block(10, "inactive")]})
    return {"segments": segments, "device_traces": [[]], **changes}


def of_json(values):
    return read_snapshot(io.BytesIO(json.dumps(values).encode()), "memory0.json")


def of_pickle(values):
    return read_snapshot(io.BytesIO(pickle.dumps(values)), "snapshot.pickle")


@pytest.mark.parametrize("read", [of_json, of_pickle])
def test_the_four_numbers_are_those_of_the_drawing(read):
    found = read(snapshot())
    assert (found.reserved_bytes, found.active_bytes) == (30 * MIB, 10 * MIB)
    assert found.rounding_bytes == 1 * MIB  # of blocks in use: 2 for 1 asked
    assert found.cached_bytes == 20 * MIB  # 6 + 4 + 10
    assert found.stranded_bytes == 10 * MIB  # without the segment that can be given back
    assert found.largest_hole_bytes == 10 * MIB and found.fragmentation == 0.5


def test_blocks_are_counted_by_what_they_are_for():
    found = of_json(snapshot(format=FORMAT, rank=3))
    assert found.rank == 3
    assert found.by_category() == {OTHERS: 4 * MIB, GRADIENTS: 3 * MIB, PARAMETERS: 2 * MIB, STATE: 1 * MIB}
    assert list(found.by_category()) == [OTHERS, GRADIENTS, PARAMETERS, STATE], "the largest first"


def test_a_device_with_nothing_unused_has_no_fragmentation_rather_than_not_a_number():
    found = of_json({"segments": [{"blocks": [block(4)]}]})
    assert (found.cached_bytes, found.largest_hole_bytes, found.fragmentation) == (0, 0, None)


def test_segments_that_grow_are_said():
    assert of_json({"segments": [{"blocks": [block(4)], "is_expandable": True}]}).is_expandable
    assert not of_json(snapshot()).is_expandable


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harm",)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_that_would_run_code_is_refused_and_runs_none(tmp_path, monkeypatch, protocol):
    monkeypatch.chdir(tmp_path)
    content = pickle.dumps(snapshot(extra=Harmful()), protocol=protocol)
    with pytest.raises(TraceError, match=r"a pickle that imports (posix|nt).mkdir.*could run any code"):
        read_snapshot(io.BytesIO(content), "snapshot.pickle")
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps(snapshot())[:200], "not a complete memory snapshot .(UnpicklingError|EOFError)"),
        (json.dumps(snapshot()).encode()[:200], "not a complete memory snapshot .JSONDecodeError"),
        (b'{"traceEvents": []}', "not a complete memory snapshot .KeyError: 'segments'"),
        (pickle.dumps([1, 2]), "not a complete memory snapshot .TypeError: list instead of dict"),
        (b'{"segments": []}', "has no memory blocks"),
    ],
)
def test_what_is_no_snapshot_is_refused_with_one_message(content, message):
    with pytest.raises(TraceError, match=message):
        read_snapshot(io.BytesIO(content), "memory0.json")
