"""Many independent random streams from one seed: model, data, and dropout per rank."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
import random
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from scaleray.errors import InitialisationError


def stream_seed(seed: int, *names: object) -> int:
    """Seed of 63 bits for one named stream, such as ("dropout", rank). Different names give independent streams."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def seed_everything(seed: int) -> None:
    """Seed torch (CPU and CUDA), numpy's and Python's global generators."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def seed_row(seed: int) -> None:
    """Seed the CPU's global generators of torch, numpy and Python for one row of a data set. seed: 64 bits.

    Each gets bits of its own: all three are Mersenne twisters, which would give equal numbers from equal seeds.
    """
    torch.default_generator.manual_seed(seed & 0xFFFFFFFF)  # it takes no more bits than these
    np.random.seed(seed >> 32)
    random.seed(seed)


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """State of all global generators of this process, as tensors."""
    _, words, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=False)
    state = {
        "torch": torch.get_rng_state().clone(),
        "python": torch.tensor([*words, _bits(gauss)], dtype=torch.int64),
        "numpy": torch.tensor(
            [*legacy["state"]["key"].tolist(), legacy["state"]["pos"], legacy["has_gauss"], _bits(legacy["gauss"])]
        ),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device).clone()
    return state


def set_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Restore a state from `random_state`."""
    torch.set_rng_state(state["torch"])
    *words, gauss = state["python"].tolist()
    random.setstate((3, tuple(words), _float(gauss)))
    *key, position, has_gauss, cached = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.asarray(key, dtype=np.uint32), position, has_gauss, _float(cached) or 0.0))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


@contextlib.contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Context that leaves all generators as they were, whatever is drawn inside."""
    before = random_state(device)
    try:
        yield
    finally:
        set_random_state(before, device)


def _bits(number: float | None) -> int:
    """Bits of a float, 64 of them; None gives those of NaN."""
    value: int = struct.unpack("<q", struct.pack("<d", math.nan if number is None else number))[0]
    return value


def _float(bits: int) -> float | None:
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return None if math.isnan(value) else value


@contextlib.contextmanager
def same_switches() -> Iterator[None]:
    """Context that restores torch's switches: trainings share a process, and what one sets must not reach the next."""
    was_deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    benchmark, allows_tf32 = torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32
    matmul_precision = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
        torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = benchmark, allows_tf32
        torch.set_float32_matmul_precision(matmul_precision)
        torch.set_num_threads(threads)


def use_deterministic_algorithms() -> None:
    """Set torch's switches so that the same run gives the same bits; operations that cannot will raise."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it before its first call
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def check_equal_structure(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Check that every rank built tensors of the same names, shapes and types. Collective over `group`.

    It is meant to come first: the collectives of a strategy would wait for ever on a difference.
    Raises InitialisationError on all ranks.
    """
    if group is None or dist.get_world_size(group) == 1:
        return
    tensors = [*module.named_parameters(), *module.named_buffers()]
    mine = [f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for name, tensor in tensors]
    digests = _gather([stream_seed(0, *mine)], module, group)
    if all(digest == digests[0] for digest in digests):
        return
    everyone: list[Any] = [None] * len(digests)
    dist.all_gather_object(everyone, mine, group=group)
    rank = next(rank for rank, theirs in enumerate(everyone) if theirs != everyone[0])
    pairs = itertools.zip_longest(everyone[0], everyone[rank], fillvalue="nothing more")
    ours, theirs = next(pair for pair in pairs if pair[0] != pair[1])
    raise InitialisationError(
        f"before the first step, rank 0 built {ours} and rank {rank} {theirs}: "
        "build_model() must give the same model on every worker"
    )


def check_equal_parameters(module: nn.Module, group: dist.ProcessGroup | None, *, is_partitioned: bool = False) -> str:
    """SHA-256 (16 hex digits) over all parameters and buffers, equal on every rank. Collective over `group`.

    Sharded tensors are gathered one by one. is_partitioned: ranks have different tensors, each of which counts once, by
    name. Raises InitialisationError on all ranks, naming the first tensor that differs and the ranks that hold another
    value.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    digests = [_digest(tensor) for _, tensor in tensors]
    if is_partitioned:
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(
            parts, {name: digest for (name, _), digest in zip(tensors, digests, strict=True)}, group=group
        )
        by_name = {name: digest for part in parts for name, digest in part.items()}
        return hashlib.sha256(repr(sorted(by_name.items())).encode()).hexdigest()[:16]
    if group is not None and dist.get_world_size(group) > 1:
        check_equal_digests([name for name, _ in tensors], digests, module, group)
    return hashlib.sha256(np.asarray(digests, dtype=np.int64).tobytes()).hexdigest()[:16]


def check_equal_digests(names: list[str], digests: list[int], module: nn.Module, group: dist.ProcessGroup) -> None:
    """Check that the digests (64 bits, signed) of tensors with these names are equal on every rank. Collective over
    `group`. Raises InitialisationError on all ranks, naming the first tensor that differs and the ranks that hold
    another value."""
    everyone = _gather(digests, module, group)
    for number, name in enumerate(names):
        others = [rank for rank, values in enumerate(everyone) if values[number] != everyone[0][number]]
        if others:
            raise InitialisationError(
                f"before the first step, {name} differs between rank 0 and rank{'s' if len(others) > 1 else ''} "
                f"{', '.join(map(str, others))}: build_model() must give the same parameters on every worker. "
                "Draw them from torch's generator, which scaleray seeds, and from nothing else."
            )


def _gather(values: list[int], module: nn.Module, group: dist.ProcessGroup) -> list[list[int]]:
    """Values of every rank; each rank must give as many. Collective over `group`."""
    device = next(module.parameters()).device if dist.get_backend(group) == "nccl" else torch.device("cpu")
    mine = torch.tensor(values, dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return [theirs.tolist() for theirs in everyone]


def _digest(tensor: torch.Tensor) -> int:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    flat = whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return int.from_bytes(hashlib.sha256(flat.numpy().tobytes()).digest()[:8], "little", signed=True)
