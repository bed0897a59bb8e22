"""Memory of a worker by use: parameters, gradients, optimizer state, buffers and activations, in bytes.

On a GPU the caching allocator reports them. The CPU's allocator keeps no records, so tensors are counted; the report
also has the resident memory of the process, which includes Python, torch and the input pipeline."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from scaleray.common.watchers import Guard, Watcher
from scaleray.training.health.live_memory import LiveTensors, storage_bytes
from scaleray.training.observer import Observer
from scaleray.training.profile.used_memory import peak_resident_bytes, resident_bytes
from scaleray.training.setup.model_setup import Setup


class MemoryReport(Observer):
    """Report on the second step of a process, the first that begins with the optimizer's state.

    found: the result; empty before that step and if measuring fails. parameters_bytes, gradients_bytes,
    optimizer_bytes, buffers_bytes: memory that outlives the step. activations_bytes: additional memory at the peak of
    the step, including temporary results; None if compiled code on a CPU hides it. allocated_bytes: memory of tensors.
    reserved_bytes: memory of the allocator (CPU: resident memory). peak_bytes: memory of tensors at the peak.
    fragmentation_share: share of the reserved memory that lies unused between blocks in use; None on the CPU."""

    def __init__(self, device: torch.device, guard: Guard) -> None:
        self.device, self.guard = device, guard
        self.found: dict[str, Any] = {}
        self._num_steps = 0

    def begin(self, setup: Setup) -> None:
        """Store the set-up whose tensors are counted."""
        self._setup = setup

    def during_step(self, number: int) -> contextlib.AbstractContextManager[None] | None:
        """Context that counts the memory of a step if it is the second one."""
        self._num_steps += 1
        return self._looking() if self._num_steps == 2 else None

    @contextlib.contextmanager
    def _looking(self) -> Iterator[None]:
        is_cuda = self.device.type == "cuda"
        if is_cuda:  # what building the model took is no need of a step
            torch.cuda.reset_peak_memory_stats(self.device)
        # counting would switch compiled code off
        live = LiveTensors() if not is_cuda and self._setup.compilation is None else None
        with live or contextlib.nullcontext():
            yield
        look = (lambda: _on_cuda(self._setup, self.device)) if is_cuda else (lambda: _on_cpu(self._setup, live))
        self.found = self.guard(Watcher.MEMORY, look, {})


def lasting(setup: Setup) -> dict[str, int]:
    """Bytes on this rank that outlive a step, by category."""
    state = setup.optimizer.state
    return {
        "parameters_bytes": storage_bytes(setup.parallel.module.parameters()),
        "gradients_bytes": storage_bytes(gradients(setup)),
        "optimizer_bytes": storage_bytes(v for s in state.values() for v in s.values() if isinstance(v, torch.Tensor)),
        "buffers_bytes": storage_bytes(setup.parallel.module.buffers()),
    }


def gradients(setup: Setup) -> list[torch.Tensor]:
    """Gradients that exist on this rank."""
    return [p.grad for p in setup.parallel.module.parameters() if p.grad is not None]


def _on_cpu(setup: Setup, live: LiveTensors | None) -> dict[str, Any]:
    kept = lasting(setup)
    total = sum(kept.values())
    activations = None
    if live is not None:
        activations = max(0, live.counted().peak - storage_bytes(g for g in gradients(setup) if live.knows(g)))
    return {
        **kept,
        "activations_bytes": activations,
        "allocated_bytes": total,
        "reserved_bytes": resident_bytes(),
        "peak_bytes": total + activations if activations is not None else None,
        "peak_resident_bytes": peak_resident_bytes(),
        "fragmentation_share": None,
        "device_bytes": None,  # what a worker may have of a node's memory is not known
        "is_counted": True,
    }


def _on_cuda(setup: Setup, device: torch.device) -> dict[str, Any]:
    kept = lasting(setup)
    stats = torch.cuda.memory_stats(device)
    peak, reserved = stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.current"]
    return {
        **kept,
        "activations_bytes": max(0, peak - sum(kept.values())),
        "allocated_bytes": stats["allocated_bytes.all.current"],
        "reserved_bytes": reserved,
        "peak_bytes": peak,
        "device_bytes": torch.cuda.get_device_properties(device).total_memory,
        "peak_resident_bytes": peak_resident_bytes(),
        "fragmentation_share": stats["inactive_split_bytes.all.current"] / reserved if reserved else 0.0,
        "is_counted": False,
    }
