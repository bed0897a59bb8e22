"""Waits for DTensor's collectives: their duration on the host, and arrival times. DTensor runs collectives concurrently
with the work that follows, and waits when a result is first used. All waits go through a single function of torch,
which this module replaces during the passes of a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from scaleray.profiling.collectives import layer_range
from scaleray.records.phases import Enter, Phase
from scaleray.records.profile_record import Places
from scaleray.strategies.contract.arrivals import Moments, drawn_together


class Waits:
    """Context of the forward and backward pass of a micro-batch, in which every wait is recorded; reused for each.

    on_host: whether the host blocks in a wait, as on the CPU; on a GPU the stream blocks. enter: see
    `Parallel.tell_phases`."""

    def __init__(self, *, on_host: bool) -> None:
        self.on_host = on_host
        self.enter: Enter | None = None
        self.seconds = 0.0
        """Seconds for which the host was blocked, over all passes."""
        self.count = 0
        """Number of waits in the current or last pass."""
        self.noted: dict[int, Callable[[], None]] = {}
        """Function called when the pass arrives at its n-th wait."""
        self.on_wait: Callable[[], None] | None = None
        """Function called at each wait, while their order is recorded."""
        self.on_pass: Callable[[], None] = lambda: None
        """Function called when a pass begins."""
        self._wait: Callable[[Any], Any] = functional.wait_tensor

    def __enter__(self) -> Waits:
        self.count = 0
        self.on_pass()
        self._wait, functional.wait_tensor = functional.wait_tensor, self._seen
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        functional.wait_tensor = self._wait

    def _seen(self, tensor: Any) -> Any:
        note = self.noted.get(self.count)
        self.count += 1
        if note is not None:
            note()
        if self.on_wait is not None:
            self.on_wait()
        if not self.on_host:
            return self._wait(tensor)
        left = None if self.enter is None else self.enter(Phase.COMMUNICATION)
        begun = time.perf_counter()
        result = self._wait(tensor)
        self.seconds += time.perf_counter() - begun
        if self.enter is not None and left is not None:
            self.enter(left)
        return result


class LayerArrivals:
    """Arrivals at the waits of a pass, by the layers that a rank has computed since the previous wait."""

    def __init__(self, model: nn.Module, waits: Waits) -> None:
        self._model, self._waits = model, waits
        self._names = [name for name, _ in model.named_parameters()]
        self._hooks: list[RemovableHandle] = []
        self._is_learning = self._is_backward = False
        self._passes: tuple[list[set[str]], list[set[str]]] = [set()], [set()]
        """Layers computed before each wait of the forward pass and of the backward pass, and after the last one."""

    def enter_backward(self) -> None:
        """Note that the backward pass begins."""
        self._is_backward = True

    def settle(self, moments: Moments) -> Places | None:
        """See `ArrivalSource`. One step records the layers computed between the waits."""
        if not self._is_learning:
            self._learn()
            return None
        self.close()
        forward, backward = (found[:-1] for found in self._passes)
        if not backward:
            return None  # a step without a wait: it is watched again
        chosen, labels = [], []
        for first, found in ((0, forward), (len(forward), backward)):
            runs = drawn_together(len(found))
            chosen += [first + run[-1] for run in runs]
            labels.append(tuple(self._range(set().union(*(found[place] for place in run))) for run in runs))
        self._waits.noted = {wait: moments.noting(place) for place, wait in enumerate(chosen)}
        return Places(
            forward=labels[0],
            backward=labels[1],
            buckets=tuple(range(len(labels[1]))),
            bucket_layers=labels[1],
            meets_once=False,
            end_of_forward=self._range(self._passes[0][-1]),
        )

    def close(self) -> None:
        """See `ArrivalSource`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._is_learning = [], False
        self._waits.noted, self._waits.on_wait, self._waits.on_pass = {}, None, lambda: None

    def _learn(self) -> None:
        """Begin to record the computed layers and the waits of a pass."""
        self._is_learning = True
        self._waits.on_pass, self._waits.on_wait = self._begin, self._wait
        for name, module in self._model.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                # before the styles' own hooks, which communicate
                self._hooks.append(module.register_forward_hook(self._seeing(name), prepend=True))

    def _begin(self) -> None:
        self._passes, self._is_backward = ([set()], [set()]), False

    def _wait(self) -> None:
        self._passes[self._is_backward].append(set())

    def _seeing(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def begins(gradient: torch.Tensor) -> None:
            self._passes[1][-1].add(name)

        def see(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._is_backward:
                return  # computed again for a checkpoint
            self._passes[0][-1].add(name)
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(begins)

        return see

    def _range(self, modules: set[str]) -> str:
        inside = tuple(f"{name}." for name in modules)
        return layer_range(name for name in self._names if name.startswith(inside)) if inside else ""
