"""Numbers of a step that the host knows or a device is still computing, with arithmetic that works for both. A number
is a float if the host has it, and a tensor () on the device if reading it would have to wait. An operation on a
one-element tensor takes the CPU some microseconds, and a step has fifty of them, so numbers that need no wait are read
immediately."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from scaleray.strategies.contract.later import Later, on_device

Number = float | torch.Tensor
"""A float, or a tensor () of some floating type."""
Truth = bool | torch.Tensor
"""A bool, or a tensor () of bool."""


def ratio(part: Number, whole: Number) -> Number:
    """part / whole, which is not finite if `whole` is 0."""
    if isinstance(whole, torch.Tensor):
        # torch would multiply by the reciprocal, which is not the quotient to the bit
        return (part if isinstance(part, torch.Tensor) else torch.full_like(whole, part)) / whole
    return math.nan if whole == 0 else part / whole


def choose(condition: Truth, yes: Any, no: Any) -> Any:
    """`yes` if the condition holds, else `no`: numbers, or tensors of one shape."""
    if isinstance(condition, torch.Tensor):
        return torch.where(condition, yes, no)
    return yes if condition else no


def is_finite(number: Number) -> Truth:
    """Whether a number is neither infinite nor NaN."""
    return number - number == 0


def as_factor(number: Number, dtype: torch.dtype) -> Number:
    """A number as a factor for a tensor of this type, rounded to it before multiplication on host or device."""
    if isinstance(number, torch.Tensor):
        return number.to(dtype)
    if dtype in (torch.float32, torch.float64):
        return number  # torch does so itself
    return float(torch.tensor(number, dtype=dtype))


def together(numbers: Sequence[Number | Truth], device: torch.device) -> torch.Tensor:
    """The numbers in one tensor (n,) of float64 on the device."""
    known = [number for number in numbers if not isinstance(number, torch.Tensor)]
    there = on_device(known, device)
    if len(known) == len(numbers):
        return there
    placed = iter(there.unbind())
    return torch.stack([n.double() if isinstance(n, torch.Tensor) else next(placed) for n in numbers])


class Unread:
    """Numbers that the host may not have yet, in order. None stands for a missing number."""

    def __init__(self, numbers: Sequence[Number | Truth | None]) -> None:
        self._numbers = numbers
        tensors = [number.double() for number in numbers if isinstance(number, torch.Tensor)]
        self._later = Later(torch.stack(tensors)) if tensors else None

    def wait(self) -> None:
        """Wait until the device has computed the numbers."""
        if self._later is not None:
            self._later.wait()

    def read(self) -> list[Any]:
        """All numbers, after waiting for them."""
        if self._later is None:
            return list(self._numbers)
        arrived = iter(self._later.read())
        return [next(arrived) if isinstance(number, torch.Tensor) else number for number in self._numbers]
