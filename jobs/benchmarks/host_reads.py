"""Reads of tensors by the host, counted where they are written: on a GPU each waits for the device."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import scaleray
from scaleray.training.step.step import TrainStep

PACKAGE = Path(scaleray.__file__).parent
READS = {
    getattr(torch.Tensor, name)
    for name in ("item", "tolist", "numpy", "cpu", "nonzero", "equal", "__bool__", "__int__", "__float__", "__index__")
} | {torch.equal, torch.nonzero, torch.is_nonzero}
OPERATORS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default}
COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}


class HostReads:
    """Context that counts reads by the line of the package that asks for them: `found["step.py:_update"]`.

    of: type of the devices whose tensors count. On a GPU copies from it and to it count too, where the host waits for
    them; on the CPU they are no reads.
    """

    def __init__(self, of: str = "cpu") -> None:
        self.found: Counter[str] = Counter()
        self.of = of
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

    def concerns(self, args: Any) -> bool:
        """Whether a tensor among the arguments lies on such a device."""
        return any(isinstance(leaf, torch.Tensor) and leaf.device.type == self.of for leaf in tree_leaves(args))


class _Functions(TorchFunctionMode):
    """Python's own ways to a value: `float(t)`, `t.tolist()`, `if t:`."""

    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in READS and self.reads.concerns(args):
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
        out = function(*args, **(kwargs or {}))
        if not self.reads._depth:
            is_read = function in OPERATORS and self.reads.concerns(args)
            if is_read or (function in COPIES and self.reads.of != "cpu" and _waits(function, args, kwargs or {}, out)):
                self.reads.note()
        return out


def _waits(function: Any, args: Any, kwargs: Any, out: torch.Tensor) -> bool:
    """Whether the host waits for a copy: one between a device and the CPU that was not asked for as non-blocking, or
    whose memory on the CPU is not pinned, so that it could not be."""
    source = args[1] if function is torch.ops.aten.copy_.default else args[0]
    if (source.device.type == "cpu") == (out.device.type == "cpu"):
        return False
    at = args[2:3] if function is torch.ops.aten.copy_.default else ()
    asked = bool(kwargs.get("non_blocking", at[0] if at else False))
    on_host = source if source.device.type == "cpu" else out
    return not asked or not on_host.is_pinned()


@contextlib.contextmanager
def _heard(of: str) -> Iterator[list[Any]]:
    """Context that collects what torch itself says of waiting for a GPU, whichever thread and code waits."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        if of == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield heard
        finally:
            if of == "cuda":
                torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def reads_of_steps(of: str = "cpu") -> Iterator[dict[int, dict[str, int]]]:
    """Context that gives the reads within the launch of each step, by its number."""
    found: dict[int, dict[str, int]] = {}
    launch = TrainStep.launch

    def counted(self: TrainStep, *args: Any, **kwargs: Any) -> Any:
        with HostReads(of) as reads, _heard(of) as heard:
            launched = launch(self, *args, **kwargs)
        found[self.num_updates] = dict(reads.found)
        if said := sum("synchronizing" in str(warning.message) for warning in heard):
            found[self.num_updates]["torch warns"] = said
        return launched

    with mock.patch.object(TrainStep, "launch", counted):
        yield found
