"""Measure the speed of GPUs and links by matrix products, all-reduces inside and between nodes, and a tournament of
pairs. Every rank of the default group runs `measure_links`, whose messages grow as long as time allows.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from scaleray.clusters.preflight.speed_checks import PROCESSOR
from scaleray.clusters.preflight.tournament import partner_of, rounds_of
from scaleray.records.doctor_record import AllReduceTime, DeviceRate, LinkRate, Links

MATMUL_S = 0.5
REPEATS = 5
ALL_REDUCE_S = 6.0
"""Seconds after which no larger all-reduce starts, and which its expected end must not exceed."""
TOURNAMENT_S = 10.0
"""Seconds after which no further round of the tournament starts."""
EXCHANGE_S = 0.5
"""Maximum expected seconds of a pair's exchange for it to try the next larger message."""
SIZES = {"cpu": (2**16, 2**20, 2**23), "cuda": (2**16, 2**20, 2**24, 2**28)}
"""Sizes of all-reduces in bytes."""
MESSAGES = {"cpu": (2**16, 2**20, 2**23), "cuda": (2**20, 2**24, 2**27)}
"""Sizes in bytes of the messages that a pair exchanges."""


@dataclass(frozen=True)
class Seats:
    """Placement of ranks: `per_node` consecutive ranks on each node. device: `cpu` or `cuda`."""

    nodes: tuple[str, ...]
    per_node: int
    device: str = "cpu"

    @property
    def num_ranks(self) -> int:
        """Total number of ranks."""
        return len(self.nodes) * self.per_node

    def name(self, rank: int) -> str:
        """Name of a rank as an end of a link."""
        node, local = divmod(rank, self.per_node)
        if self.per_node == 1:
            return self.nodes[node]
        return f"{'GPU' if self.device == 'cuda' else 'process'} {local} of {self.nodes[node]}"


Exchange = Callable[[int, torch.Tensor, torch.Tensor, "dist.ProcessGroup | None"], None]
"""Send a tensor to a rank of the group while receiving one from it."""


def matmul_rate(node: str, index: int | None) -> DeviceRate:
    """Rate of the fastest of several matrix products, which shows what the device can do even if it is shared. index:
    of a GPU; None for one CPU core."""
    if index is None:
        kind, name, precision, dtype, size = PROCESSOR, "a core", "fp32", torch.float32, 768
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", index)
        has_bf16 = torch.cuda.get_device_capability(index)[0] >= 8
        precision, dtype = ("bf16", torch.bfloat16) if has_bf16 else ("fp16", torch.float16)
        kind, name, size = torch.cuda.get_device_name(index), f"GPU {index}", 8192
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        left = torch.randn(size, size, device=device).to(dtype)
        out = torch.empty_like(left)
        _matmul_s(left, out)  # warm-up: selects the kernel
        deadline, times = time.perf_counter() + MATMUL_S, [_matmul_s(left, out)]
        while time.perf_counter() < deadline or len(times) < REPEATS:
            times.append(_matmul_s(left, out))
    finally:
        torch.set_num_threads(threads)
    return DeviceRate(node=node, device=name, kind=kind, precision=precision, flops_per_s=2 * size**3 / min(times))


def _matmul_s(matrix: torch.Tensor, out: torch.Tensor) -> float:
    _wait_for(matrix.device)
    started = time.perf_counter()
    torch.mm(matrix, matrix, out=out)
    _wait_for(matrix.device)
    return time.perf_counter() - started


def exchange(peer: int, outgoing: torch.Tensor, incoming: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Send and receive concurrently, as rings and trees do over a link."""
    operations = [
        dist.P2POp(dist.isend, outgoing, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, incoming, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def measure_links(rank: int, seats: Seats, *, send: Exchange = exchange) -> tuple[list[AllReduceTime], Links]:
    """Measure all-reduces and the tournament, with the same result on every rank. Collective over all ranks of `seats`,
    which must be the ranks of the default group, a gloo group."""
    device = torch.device("cpu") if seats.device == "cpu" else torch.device("cuda", rank % seats.per_node)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    every = None if device.type == "cpu" else dist.new_group(backend="nccl", device_id=device)
    return _all_reduces(rank, seats, device, every), _tournament(rank, seats, device, every, send)


def _all_reduces(rank: int, seats: Seats, device: torch.device, every: dist.ProcessGroup | None) -> list[AllReduceTime]:
    """Time all-reduces inside all nodes at once, over one rank of each node, and over all ranks."""
    found: list[AllReduceTime] = []
    num_nodes, per_node = len(seats.nodes), seats.per_node
    deadline = time.perf_counter() + ALL_REDUCE_S
    backend = "gloo" if device.type == "cpu" else "nccl"
    if per_node > 1:
        group = None
        for node in range(num_nodes):  # all ranks create all groups, in the same order
            ranks = list(range(node * per_node, (node + 1) * per_node))
            made = dist.new_group(ranks, backend=backend)
            group = made if rank in ranks else group
        times = _times(group, seats, device, own=rank // per_node, count=num_nodes, deadline=deadline)
        found += [
            AllReduceTime(ranks=per_node, nodes=1, num_bytes=size, seconds=seconds, where=seats.nodes[node])
            for size, by_node in times.items()
            for node, seconds in enumerate(by_node)
        ]
    if num_nodes > 1 and per_node > 1:
        heads = [node * per_node for node in range(num_nodes)]
        group = dist.new_group(heads, backend=backend)
        times = _times(
            group if rank in heads else None,
            seats,
            device,
            own=0 if rank in heads else None,
            count=1,
            deadline=deadline,
        )
        found += _of_many(num_nodes, num_nodes, times)
    if num_nodes > 1:
        times = _times(every or dist.group.WORLD, seats, device, own=0, count=1, deadline=deadline)
        found += _of_many(seats.num_ranks, num_nodes, times)
    return found


def _of_many(ranks: int, nodes: int, times: dict[int, list[float]]) -> list[AllReduceTime]:
    return [AllReduceTime(ranks=ranks, nodes=nodes, num_bytes=size, seconds=found[0]) for size, found in times.items()]


def _times(
    group: dist.ProcessGroup | None, seats: Seats, device: torch.device, *, own: int | None, count: int, deadline: float
) -> dict[int, list[float]]:
    """Seconds of an all-reduce by size in each of `count` groups, all with the same sizes; this rank belongs to group
    `own`. A group's time is the median of its slowest rank."""
    found: dict[int, list[float]] = {}
    sizes = SIZES[seats.device]
    for size, larger in zip(sizes, [*sizes[1:], 0], strict=True):
        values = torch.zeros(count, dtype=torch.float64)
        if own is not None:
            values[own] = _all_reduce_s(torch.zeros(size // 4, device=device), group)
        expected_s = float(values.max()) * larger / size * (REPEATS + 1)
        late = torch.tensor([float(time.perf_counter() + expected_s > deadline)], dtype=torch.float64)
        largest = torch.cat([values, late])
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        found[size] = largest[:count].tolist()
        if largest[-1]:
            break
    return found


def _all_reduce_s(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> float:
    times = []
    for number in range(REPEATS + 1):  # the first one opens connections
        _wait_for(tensor.device)
        started = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        _wait_for(tensor.device)
        times += [time.perf_counter() - started] if number else []
    return statistics.median(times)


def _tournament(
    rank: int, seats: Seats, device: torch.device, every: dist.ProcessGroup | None, send: Exchange
) -> Links:
    """Measure pairs inside each node, then pairs of nodes, in which ranks with equal numbers are paired."""
    node, local = divmod(rank, seats.per_node)
    inside, between = rounds_of(seats.per_node), rounds_of(len(seats.nodes))
    peers = [_peer(partner_of(local, pairs), lambda other: node * seats.per_node + other) for pairs in inside]
    peers += [_peer(partner_of(node, pairs), lambda other: other * seats.per_node + local) for pairs in between]
    seconds, sizes = torch.zeros(2, len(peers), seats.num_ranks, dtype=torch.float64)
    deadline, played = time.perf_counter() + TOURNAMENT_S, 0
    for number, peer in enumerate(peers):
        late = torch.tensor([float(time.perf_counter() > deadline)])
        dist.all_reduce(late, op=dist.ReduceOp.MAX)  # so that all ranks start a round, or none does
        if late[0]:
            break
        played = number + 1
        if peer is not None:
            sizes[number, rank], seconds[number, rank] = _pair_s(peer, seats, device, every, send)
    largest = torch.stack([sizes, seconds])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return Links(pairs=_pairs(largest, seats, inside, between), rounds=played, all_rounds=len(peers))


def _peer(partner: int | None, rank_of: Callable[[int], int]) -> int | None:
    return None if partner is None else rank_of(partner)


def _pair_s(
    peer: int, seats: Seats, device: torch.device, every: dist.ProcessGroup | None, send: Exchange
) -> tuple[float, float]:
    """(bytes, seconds) of the largest message that a pair exchanged in time."""
    found = (0.0, 0.0)
    sizes = MESSAGES[seats.device]
    for size, larger in zip(sizes, [*sizes[1:], None], strict=True):
        outgoing, incoming = torch.zeros(2, size // 4, device=device)
        times = []
        for number in range(3):  # the first one opens connections
            _wait_for(device)
            started = time.perf_counter()
            send(peer, outgoing, incoming, every)
            _wait_for(device)
            times += [time.perf_counter() - started] if number else []
        mine, theirs = torch.tensor([min(times)], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        exchange(peer, mine, theirs, None)
        slowest = max(float(mine), float(theirs))  # both sides must decide alike
        found = (float(size), slowest)
        if larger is None or slowest * larger / size > EXCHANGE_S:
            break
    return found


def _pairs(
    largest: torch.Tensor,
    seats: Seats,
    inside: Sequence[Sequence[tuple[int, int]]],
    between: Sequence[Sequence[tuple[int, int]]],
) -> list[LinkRate]:
    sizes, seconds = largest
    links = [
        (number, node * seats.per_node + a, node * seats.per_node + b, False)
        for number, pairs in enumerate(inside)
        for node in range(len(seats.nodes))
        for a, b in pairs
    ]
    links += [
        (number, a * seats.per_node + local, b * seats.per_node + local, True)
        for number, pairs in enumerate(between, start=len(inside))
        for a, b in pairs
        for local in range(seats.per_node)
    ]
    return [
        LinkRate(
            one=seats.name(a),
            other=seats.name(b),
            is_between_nodes=is_between,
            bytes_per_s=float(sizes[number, a] / seconds[number, a]),
        )
        for number, a, b, is_between in links
        if seconds[number, a] > 0
    ]


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
