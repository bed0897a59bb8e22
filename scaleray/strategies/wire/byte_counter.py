"""Count of the bytes given to collectives in a piece of work, seen from below torch's dispatcher.

It serves communication that no strategy starts itself, such as DTensor's.
It slows down what it watches, so watch work once and count its repetitions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
INPUT_SECOND = ("allgather", "_allgather_base", "reduce_scatter", "_reduce_scatter_base", "allgather_into", "alltoall")
"""Operations of `c10d` that take their output first, and their input second."""
NO_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_")


class Traffic(TorchDispatchMode):
    """Context that sums up, in `num_bytes`, the tensors given to collectives inside it, each once."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented  # its local tensors come by on their own
        name = func._schema.name.split("::")[-1]
        if func.namespace in NAMESPACES and name not in NO_COLLECTIVES and args:
            takes_output = func.namespace == "c10d" and name.startswith(INPUT_SECOND)
            given = tree_leaves(args[1] if takes_output else args[0])
            self.num_bytes += sum(t.numel() * t.element_size() for t in given if isinstance(t, torch.Tensor))
        return func(*args, **(kwargs or {}))
