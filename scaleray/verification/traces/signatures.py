"""Signatures, which show whether and by how much two tensors differ, and number formats that tensors fit."""

import hashlib

import numpy as np
import torch

CHUNK = 2**22
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}  # fewest digits first


class Signer:
    """Signatures of tensors: norm, sum, and sums under two fixed random signs, in float64.

    If two tensors differ by d, each signed sum differs by about the norm of d, whatever d is, so four numbers show
    whether and by how much they differ. Signs depend only on the name and the number of elements."""

    def __init__(self, num_projections: int = 2) -> None:
        self.num_projections = num_projections
        self._signs: dict[tuple[str, int, torch.device], torch.Tensor] = {}

    def __call__(self, name: str, tensor: torch.Tensor) -> np.ndarray:
        """The signature (2 + num_projections,) of one tensor."""
        flat = _flat(tensor)
        signs = self._signs_of(name, flat)
        total = torch.zeros(2 + self.num_projections, dtype=torch.float64, device=flat.device)
        for start in range(0, flat.numel(), CHUNK):  # float64 copies of a large table would not fit beside it
            part = flat[start : start + CHUNK].to(torch.float64)
            total[0] += part @ part
            total[1] += part.sum()
            total[2:] += signs[:, start : start + CHUNK].to(torch.float64) @ part
        total[0] = total[0].sqrt()
        return total.cpu().numpy()

    def _signs_of(self, name: str, flat: torch.Tensor) -> torch.Tensor:
        key = (name, flat.numel(), flat.device)
        if key not in self._signs:
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
            draw = torch.Generator().manual_seed(seed)
            signs = torch.randint(0, 2, (self.num_projections, flat.numel()), generator=draw, dtype=torch.int8)
            self._signs[key] = (2 * signs - 1).to(flat.device)
        return self._signs[key]


def number_format(tensor: torch.Tensor) -> str:
    """Number format with the fewest digits that holds every value of a float64 or float32 tensor: bf16, fp16 or fp32;
    "" if it needs its own type or has only zeros.

    Sums use all digits of their type, so a tensor that fits a narrower type was rounded."""
    flat = _flat(tensor)
    if flat.dtype not in (torch.float64, torch.float32) or not bool(flat.any()):
        return ""
    narrower = ((name, kind) for name, kind in FORMATS.items() if kind != flat.dtype)
    return next((name for name, kind in narrower if torch.equal(flat.to(kind).to(flat.dtype), flat)), "")


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All numbers of a tensor, (n,); each complex element counts as two."""
    flat = tensor.detach().to_dense().reshape(-1)
    return torch.view_as_real(flat.resolve_conj()).reshape(-1) if flat.is_complex() else flat
