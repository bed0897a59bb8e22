"""Reads of tensors by the host, counted where they are written: on a GPU each would wait for the device."""

from __future__ import annotations

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import scaleray

PACKAGE = Path(scaleray.__file__).parent
READS = {
    getattr(torch.Tensor, name)
    for name in ("item", "tolist", "numpy", "cpu", "nonzero", "equal", "__bool__", "__int__", "__float__", "__index__")
} | {torch.equal, torch.nonzero, torch.is_nonzero}
OPERATORS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default}


class HostReads:
    """Context that counts reads by the line of the package that asks for them: `found["step.py:_update"]`."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._depth = 0

    def __enter__(self) -> HostReads:
        self._modes = [_Functions(self), _Operators(self)]
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*exc)

    def note(self) -> None:
        """Count a read, and who asked for it."""
        own = [f for f in traceback.extract_stack() if PACKAGE in Path(f.filename).parents]
        where = f"{Path(own[-1].filename).relative_to(PACKAGE)}:{own[-1].name}" if own else "?"
        self.found[where] += 1


class _Functions(TorchFunctionMode):
    """Python's own ways to a value: `float(t)`, `t.tolist()`, `if t:`."""

    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in READS:
            self.reads.note()
            self.reads._depth += 1  # what it is made of is no second read
            try:
                return function(*args, **(kwargs or {}))
            finally:
                self.reads._depth -= 1
        return function(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    """What torch's own code reads below."""

    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in OPERATORS and not self.reads._depth:
            self.reads.note()
        return function(*args, **(kwargs or {}))
