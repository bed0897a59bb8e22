"""Independent random streams from one seed, for the model, the data, and each rank's dropout."""

import contextlib
import hashlib
import math
import os
import random
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


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

    Each generator gets different bits, since all three are Mersenne twisters, which give equal numbers for equal seeds.
    """
    torch.default_generator.manual_seed(seed & 0xFFFFFFFF)  # it uses only these bits
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
    """Context that restores all random generators at its end."""
    before = random_state(device)
    try:
        yield
    finally:
        set_random_state(before, device)


def _bits(number: float | None) -> int:
    """The 64 bits of a float; None gives those of NaN."""
    value: int = struct.unpack("<q", struct.pack("<d", math.nan if number is None else number))[0]
    return value


def _float(bits: int) -> float | None:
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return None if math.isnan(value) else value


@contextlib.contextmanager
def same_switches() -> Iterator[None]:
    """Context that restores torch's switches, so that trainings in one process do not affect each other."""
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
    """Set torch's switches for bitwise reproducible runs; operations without a deterministic algorithm then raise."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first call
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
