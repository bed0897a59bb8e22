"""One seed, many independent streams: model, data, and dropout per rank."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from scaleray.errors import InitialisationError


def stream_seed(seed: int, *names: object) -> int:
    """A 63-bit seed for one named stream, such as ("dropout", rank). Different names give independent streams."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def seed_everything(seed: int) -> None:
    """Seed torch (CPU and CUDA), numpy's and Python's global generators."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def use_deterministic_algorithms() -> None:
    """Set torch's switches so that the same run gives the same bits; operations that cannot will raise."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it before its first call
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def check_equal_structure(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Every rank built tensors of the same names, shapes and types. Collective over `group`, and meant to come first:

    the collectives of a strategy would wait for ever on a difference. Raises InitialisationError on all ranks.
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


def check_equal_parameters(module: nn.Module, group: dist.ProcessGroup | None) -> str:
    """SHA-256 (16 hex digits) over all parameters and buffers, equal on every rank. Collective over `group`.

    Raises InitialisationError on all ranks, naming the first tensor that differs and the ranks that hold another value.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    digests = [_digest(tensor) for _, tensor in tensors]
    if group is not None and dist.get_world_size(group) > 1:
        everyone = _gather(digests, module, group)
        for number, (name, _) in enumerate(tensors):
            others = [rank for rank, values in enumerate(everyone) if values[number] != everyone[0][number]]
            if others:
                raise InitialisationError(
                    f"before the first step, {name} differs between rank 0 and rank{'s' if len(others) > 1 else ''} "
                    f"{', '.join(map(str, others))}: build_model() must give the same parameters on every worker. "
                    "Draw them from torch's generator, which scaleray seeds, and from nothing else."
                )
    return hashlib.sha256(np.asarray(digests, dtype=np.int64).tobytes()).hexdigest()[:16]


def _gather(values: list[int], module: nn.Module, group: dist.ProcessGroup) -> list[list[int]]:
    """The values of every rank, as many on each."""
    device = next(module.parameters()).device if dist.get_backend(group) == "nccl" else torch.device("cpu")
    mine = torch.tensor(values, dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return [theirs.tolist() for theirs in everyone]


def _digest(tensor: torch.Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return int.from_bytes(hashlib.sha256(flat.numpy().tobytes()).digest()[:8], "little", signed=True)
