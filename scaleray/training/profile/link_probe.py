"""Measures the bandwidth between each pair of ranks, one pair after another.

Not part of a training step: it runs at the end of a profiled training, and when the alert about slow links requests it,
see `profiler.py`. With many ranks on several nodes, only the first rank of each node takes part, since the ranks of a
node share its links."""

import itertools
import math
import time

import torch
import torch.distributed as dist

from scaleray.records.profile_record import LinkRow
from scaleray.training.setup.rank_context import RankContext

FIRST_BYTES, MOST_BYTES = 2**16, 2**22
LONGEST_S = 0.25
"""Maximum seconds of one message; on a slow link the message is shorter."""
REPEATS = 3
MOST_RANKS = 8
"""Maximum number of ranks that take part. If there are more, only the first rank of each node does, up to this
number."""


def probe_links(place: RankContext, *, limit_s: float = math.inf) -> list[LinkRow]:
    """Measure the bandwidth from this rank to each other participating one. After `limit_s`, no further pair is begun.
    Collective over all ranks."""
    rows, until = [], time.monotonic() + limit_s
    for first, second in itertools.combinations(_taking_part(place), 2):
        for sender, receiver in ((first, second), (second, first)):
            if place.rank == sender:
                rows.append(_sent(place, receiver))
            elif place.rank == receiver:
                _received(place, sender)
        # pairs would share links, so that all ranks wait here, and agree on whether there is time for another one
        if place.all_reduce_max([float(time.monotonic() > until)])[0] > 0:
            break
    return rows


def _taking_part(place: RankContext) -> list[int]:
    nodes = place.gathered(place.node)
    if len(nodes) <= MOST_RANKS:
        return list(range(len(nodes)))
    firsts = [nodes.index(node) for node in dict.fromkeys(nodes)]
    return firsts[:MOST_RANKS] if len(firsts) > 1 else list(range(MOST_RANKS))


def _sent(place: RankContext, to: int) -> LinkRow:
    """Send some messages, waiting for the answer to each; the best result counts."""
    _took_s(place, to, FIRST_BYTES)  # connects
    first_s = _took_s(place, to, FIRST_BYTES)
    size = int(min(MOST_BYTES, max(FIRST_BYTES, FIRST_BYTES * LONGEST_S / max(first_s, 1e-9))))
    dist.send(torch.tensor([size], device=place.device), to)
    best_s = min(_took_s(place, to, size) for _ in range(REPEATS))
    return LinkRow(place.rank, to, size / best_s, size)


def _received(place: RankContext, sender: int) -> None:
    for _ in range(2):
        _answered(place, sender, FIRST_BYTES)
    size = torch.zeros(1, dtype=torch.int64, device=place.device)
    dist.recv(size, sender)
    for _ in range(REPEATS):
        _answered(place, sender, int(size))


def _took_s(place: RankContext, to: int, size: int) -> float:
    message = torch.zeros(size, dtype=torch.uint8, device=place.device)
    answer = torch.zeros(1, dtype=torch.uint8, device=place.device)
    begun = time.perf_counter()
    dist.send(message, to)
    dist.recv(answer, to)
    if place.device.type == "cuda":
        torch.cuda.synchronize(place.device)
    return time.perf_counter() - begun


def _answered(place: RankContext, sender: int, size: int) -> None:
    dist.recv(torch.empty(size, dtype=torch.uint8, device=place.device), sender)
    dist.send(torch.zeros(1, dtype=torch.uint8, device=place.device), sender)
