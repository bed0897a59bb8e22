"""The four numbers of memory from torch's counters and from the blocks of a snapshot, which must be the same.

There is no GPU here: an allocator by the rules of torch's (best fit, blocks that are split and merged, frees that wait
for another stream) keeps both its counters, step by step, and its blocks.
"""

from __future__ import annotations

import io
import json
import random

import pytest

from scaleray.profiling.traces.memory_blocks import read_snapshot
from scaleray.training.profile.memory_curve import numbers_of

KIB, MIB = 2**10, 2**20
SMALL, LEAST = 2 * MIB, 512
NUMBERS = ("rounding_bytes", "cached_bytes", "stranded_bytes", "largest_hole_bytes")


class Block:
    def __init__(self, size):
        self.size, self.requested, self.state = size, 0, "inactive"


class Allocator:
    """Counters change with each call by what the call does, as torch's do; nothing is counted anew from blocks."""

    def __init__(self, grows=False):
        self.grows, self.segments = grows, []
        self.allocated = self.asked = self.active = self.reserved = self.split = 0

    def take(self, requested):
        size = LEAST * -(-requested // LEAST)
        fitting = [(b.size, n, p) for n, s in enumerate(self.segments) for p, b in enumerate(s) if _fits(b, size)]
        if fitting:
            _, number, place = min(fitting)
        else:
            whole = SMALL * -(-size // SMALL)
            self.segments.append([Block(whole)])
            self.reserved += whole
            number, place = len(self.segments) - 1, 0
        segment = self.segments[number]
        block, was_split = segment[place], len(segment) > 1
        if block.size > size:
            rest = Block(block.size - size)
            segment.insert(place + 1, rest)
            block.size = size
            self._strand(-size if was_split else rest.size)
        elif was_split:
            self._strand(-size)
        block.requested, block.state = requested, "active_allocated"
        self.allocated, self.active, self.asked = self.allocated + size, self.active + size, self.asked + requested
        return block

    def give(self, block, *, waits=False):
        self.allocated -= block.size
        block.state = "active_awaiting_free"
        if not waits:
            self.end(block)

    def end(self, block):
        """The other stream is done with the block."""
        self.active, self.asked = self.active - block.size, self.asked - block.requested
        (segment,) = [segment for segment in self.segments if block in segment]
        block.requested, block.state = 0, "inactive"
        for step in (-1, 1):
            place = segment.index(block) + step
            if 0 <= place < len(segment) and segment[place].state == "inactive":
                self._strand(-segment[place].size)
                block.size += segment.pop(place).size
        if len(segment) > 1:
            self._strand(block.size)

    def empty_cache(self):
        unused = [segment for segment in self.segments if len(segment) == 1 and segment[0].state == "inactive"]
        self.reserved -= sum(segment[0].size for segment in unused)
        self.segments = [segment for segment in self.segments if segment not in unused]

    def _strand(self, num_bytes):
        self.split += 0 if self.grows else num_bytes

    def stats(self):
        found = {"allocated_bytes": self.allocated, "requested_bytes": self.asked, "active_bytes": self.active}
        found |= {"reserved_bytes": self.reserved, "inactive_split_bytes": self.split}
        return {f"{name}.all.current": value for name, value in found.items()} | {"num_alloc_retries": 0}

    def snapshot(self):
        """Segments as `torch.cuda.memory_snapshot` gives them."""
        return [
            {
                "is_expandable": self.grows,
                "blocks": [{"size": b.size, "requested_size": b.requested, "state": b.state} for b in segment],
            }
            for segment in self.segments
        ]

    def both(self):
        """The four numbers from the counters, and from the blocks of a file."""
        segments = self.snapshot()
        read = read_snapshot(io.BytesIO(json.dumps({"segments": segments}).encode()), "memory0.json")
        books = numbers_of(self.stats(), segments)
        return {name: books[name] for name in NUMBERS}, {name: getattr(read, name) for name in NUMBERS}


def _fits(block, size):
    return block.state == "inactive" and block.size >= size


def test_both_sources_give_the_numbers_of_a_drawing():
    allocator = Allocator()
    first, second, third = (allocator.take(requested) for requested in (600 * KIB - 100, 500 * KIB, 300 * KIB))
    allocator.give(second)
    whole = allocator.take(2 * MIB)
    allocator.give(whole)
    drawn = {
        "rounding_bytes": 100,
        "cached_bytes": 4 * MIB - 900 * KIB,
        "stranded_bytes": 2 * MIB - 900 * KIB,
        "largest_hole_bytes": 2 * MIB,
    }
    assert allocator.both() == (drawn, drawn)
    allocator.give(first, waits=True)
    assert allocator.both() == (drawn, drawn), "a block that waits for another stream is not free yet"
    allocator.end(first)
    allocator.empty_cache()
    left = 2 * MIB - 300 * KIB
    drawn = {"rounding_bytes": 0, "cached_bytes": left, "stranded_bytes": left, "largest_hole_bytes": 1100 * KIB}
    assert allocator.both() == (drawn, drawn)
    assert third.state == "active_allocated"


@pytest.mark.parametrize("grows", [False, True], ids=["segments that stay", "segments that grow"])
@pytest.mark.parametrize("seed", range(2))
def test_both_sources_agree_after_every_call_of_an_allocator(seed, grows):
    draw, allocator = random.Random(seed), Allocator(grows)
    held, waiting = [allocator.take(1)], []
    seen = dict.fromkeys(NUMBERS, 0)
    for _ in range(150):
        call = draw.random()
        if call < 0.5 or not held:
            held.append(allocator.take(draw.choice([300, 700, 90 * KIB + 1, 700 * KIB, 3 * MIB])))
        elif call < 0.85:
            waits = draw.random() < 0.3
            block = held.pop(draw.randrange(len(held)))
            allocator.give(block, waits=waits)
            waiting += [block] if waits else []
        elif call < 0.97:
            if waiting:
                allocator.end(waiting.pop(0))
        else:
            allocator.empty_cache()
        books, blocks = allocator.both()
        assert books == blocks
        seen = {name: seen[name] + (books[name] > 0) for name in NUMBERS}
    assert min(seen[name] for name in NUMBERS if not (grows and name == "stranded_bytes")) > 40
    assert not grows or seen["stranded_bytes"] == 0
