"""One seed, many independent streams: model, data, and dropout per rank."""

from __future__ import annotations

import hashlib
import os
import random

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


def check_equal_parameters(module: nn.Module, group: dist.ProcessGroup | None) -> str:
    """SHA-256 (16 hex digits) over all parameters and buffers, equal on every rank. Collective over `group`.

    Raises InitialisationError on all ranks, naming the first tensor that differs and the ranks that hold another value.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    digests = [_digest(tensor) for _, tensor in tensors]
    if group is not None and dist.get_world_size(group) > 1:
        device = tensors[0][1].device if tensors and dist.get_backend(group) == "nccl" else torch.device("cpu")
        mine = torch.tensor(digests, dtype=torch.int64, device=device)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, mine, group=group)
        for number, (name, _) in enumerate(tensors):
            others = [rank for rank, values in enumerate(everyone) if values[number] != everyone[0][number]]
            if others:
                raise InitialisationError(
                    f"before the first step, {name} differs between rank 0 and rank{'s' if len(others) > 1 else ''} "
                    f"{', '.join(map(str, others))}: build_model() must give the same parameters on every worker. "
                    "Draw them from torch's generator, which scaleray seeds, and from nothing else."
                )
    return hashlib.sha256(np.asarray(digests, dtype=np.int64).tobytes()).hexdigest()[:16]


def _digest(tensor: torch.Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return int.from_bytes(hashlib.sha256(flat.numpy().tobytes()).digest()[:8], "little", signed=True)
