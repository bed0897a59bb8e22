"""Forward and backward passes under DTensor: counts bytes sent and time spent waiting."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scaleray.parallel.experts import DivisibleExperts
from scaleray.profiling.collectives import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER
from scaleray.records.phases import Enter, Phase
from scaleray.strategies.contract.parallel import MicroBatch, Objective
from scaleray.strategies.sharding.counted_collectives import CountedAllGather, CountedReduceScatter
from scaleray.strategies.sharding.functional_waits import LayerArrivals, Waits
from scaleray.strategies.traffic.ledger import Ledger

if TYPE_CHECKING:
    from scaleray.strategies.fsdp import DividedExperts

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
INPUT_SECOND = ("allgather", "_allgather_base", "reduce_scatter", "_reduce_scatter_base", "allgather_into", "alltoall")
"""Operations of `c10d` that take their output as the first argument and their input as the second."""
NO_COLLECTIVES = (
    "wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_", "recv_", "recv_any_source_",
)  # fmt: skip
IN_WORDS = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "_allgather_base": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "broadcast": "broadcast",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "send": "send",
}
"""Names of operations by the beginning of torch's name, since torch has several for each."""


class Kind(NamedTuple):
    """Kind of collective: an operation in a group."""

    group: str
    """Name of torch's process group."""
    group_size: int
    operation: str


class Traffic(TorchDispatchMode):
    """Context that counts the tensors passed to collectives inside it, each once, below torch's dispatcher. It slows
    down the work, so it is used once and repetitions are counted.

    found: number of calls and bytes of each kind. Received bytes are counted by their sender."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Kind, tuple[int, float]] = {}

    @property
    def num_bytes(self) -> float:
        """Total bytes of all kinds."""
        return sum(num_bytes for _, num_bytes in self.found.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented  # its local tensors come by on their own
        name = func._schema.name.split("::")[-1]
        if func.namespace in NAMESPACES and name not in NO_COLLECTIVES and args:
            takes_output = func.namespace == "c10d" and name.startswith(INPUT_SECOND)
            given = tree_leaves(args[1] if takes_output else args[0])
            num_bytes = sum(t.numel() * t.element_size() for t in given if isinstance(t, torch.Tensor))
            kind = _kind(name, [*args, *(kwargs or {}).values()])
            count, before = self.found.get(kind, (0, 0.0))
            self.found[kind] = count + 1, before + num_bytes
        return func(*args, **(kwargs or {}))


def _kind(name: str, given: list[Any]) -> Kind:
    operation = next((IN_WORDS[begin] for begin in sorted(IN_WORDS, key=len)[::-1] if name.startswith(begin)), name)
    group: Any = None
    for value in given:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            group = dist.ProcessGroup.unbox(value)
        elif isinstance(value, str) and group is None:
            with contextlib.suppress(Exception):  # the functional ones name their group, and their operation
                group = dist.distributed_c10d._resolve_process_group(value)  # type: ignore[arg-type]
    return Kind(group.group_name, group.size(), operation) if group is not None else Kind("", 0, operation)


def data_axis(mesh: DeviceMesh) -> DeviceMesh:
    """The workers that have samples of their own, as one axis: `dp`, or the flattened axes `replicate` and `shard`."""
    # torch deprecates mesh["dp"] for the latter
    return mesh["replicate", "shard"]._flatten("dp") if "shard" in (mesh.mesh_dim_names or ()) else mesh["dp"]


class CountedPasses:
    """Forward and backward passes of a step's micro-batches, as the loop itself would run them. Traffic of the
    tensor-parallel styles and of FSDP is counted below the dispatcher, once per shape of a micro-batch."""

    def __init__(self, model: nn.Module, on_model: nn.Module, mesh: DeviceMesh) -> None:
        self._model, self._on_model, self._replicas = model, on_model, data_axis(mesh)
        self._axes = {str(mesh.get_group(axis).group_name): axis for axis in mesh.mesh_dim_names or ()}
        self._known: dict[Any, dict[Kind, tuple[int, float]]] = {}
        self._enter: Enter = lambda phase: phase
        self._waits = Waits(on_host=mesh.device_type == "cpu")
        self.arrivals = LayerArrivals(model, self._waits)
        self.sent = Ledger()

    def tell_phases(self, enter: Enter) -> None:
        """See `Parallel.tell_phases`."""
        self._enter = self._waits.enter = enter
        self.sent.tell_phases(enter)

    def count_units(self, experts: DividedExperts | None) -> None:
        """Count and time the collectives of FSDP's units and of divided experts where they are called."""
        if experts is not None:
            self._axes[experts.mesh.get_group("of_experts").group_name] = "of_experts"
        for unit in self._model.modules():
            axis, size = "dp", self._replicas.size()
            if experts is not None and isinstance(unit, DivisibleExperts):
                assert unit.group is not None
                unit.run = self.sent.entry("expert", experts.degree, ALL_TO_ALL).run
                self._axes[unit.group.group_name] = "expert"
                axis, size = "of_experts", experts.mesh.size(-1)
            if isinstance(unit, FSDPModule):
                unit.set_custom_all_gather(CountedAllGather(self.sent.entry(axis, size, ALL_GATHER)))
                unit.set_custom_reduce_scatter(CountedReduceScatter(self.sent.entry(axis, size, REDUCE_SCATTER)))

    def run(self, pieces: list[MicroBatch], objective: Objective, autocast: Any) -> None:
        """Run the micro-batches in order; only the last one sums gradients over the replicas."""
        for number, piece in enumerate(pieces):
            is_last = number == len(pieces) - 1
            shapes = tuple((tuple(t.shape), t.dtype) for t in tree_leaves(piece.batch) if isinstance(t, torch.Tensor))
            traffic = None if (shapes, is_last) in self._known else Traffic()
            before_s = self._waits.seconds
            synced = contextlib.nullcontext() if is_last else self._no_sync()
            with synced, traffic or contextlib.nullcontext(), self._waits:
                loss = objective(self._on_model, piece)
                self._enter(Phase.BACKWARD)
                self.arrivals.enter_backward()
                loss.backward()
            if traffic is not None:
                self._known[shapes, is_last] = self._of_layers(traffic)
            self._count(self._known[shapes, is_last], self._waits.seconds - before_s)

    def _of_layers(self, traffic: Traffic) -> dict[Kind, tuple[int, float]]:
        """Counts without the collectives of units, which are counted separately."""
        units = (ALL_GATHER, REDUCE_SCATTER) if isinstance(self._model, FSDPModule) else ()
        counted = {"dp": units, "of_experts": units, "expert": (ALL_TO_ALL,)}
        return {
            k: v for k, v in traffic.found.items() if k.operation not in counted.get(self._axes.get(k.group, ""), ())
        }

    def _count(self, found: dict[Kind, tuple[int, float]], waited_s: float) -> None:
        """Add the collectives of a micro-batch, and the host's wait for them, divided among operations by their
        bytes."""
        whole = sum(num_bytes for _, num_bytes in found.values())
        for kind, (count, num_bytes) in found.items():
            entry = self.sent.entry(self._axes.get(kind.group, "all"), kind.group_size, kind.operation)
            entry.count += count
            entry.num_bytes += num_bytes
            if self._waits.on_host and whole:
                entry.waited(waited_s * num_bytes / whole)

    @contextlib.contextmanager
    def _no_sync(self) -> Iterator[None]:
        if not isinstance(self._model, FSDPModule):
            yield
            return
        self._model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._model.set_requires_gradient_sync(True)
