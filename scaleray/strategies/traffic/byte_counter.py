"""Count the collectives in a piece of work and their bytes, below torch's dispatcher. For communication that no
strategy starts itself, such as DTensor's. It slows the work, so measure it once and count repetitions."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
INPUT_SECOND = ("allgather", "_allgather_base", "reduce_scatter", "_reduce_scatter_base", "allgather_into", "alltoall")
"""Operations of `c10d` that take their output first, and their input second."""
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
"""Names of operations by the beginning of torch's, of which there are several for each."""


class Kind(NamedTuple):
    """A kind of collective: an operation in a group."""

    group: str
    """Name of torch's process group."""
    group_size: int
    operation: str


class Traffic(TorchDispatchMode):
    """Context that counts the tensors given to collectives inside it, each once.

    found: number of calls and bytes of each kind. Received bytes are counted by their sender.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Kind, tuple[int, float]] = {}

    @property
    def num_bytes(self) -> float:
        """Bytes of all kinds together."""
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
