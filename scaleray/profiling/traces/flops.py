"""Floating-point operations of an operator, from the shapes that torch.profiler recorded with it.

The formulas count a multiplication and an addition as two, as torch's own flop counter does. What has no formula here,
such as additions and normalisations, counts nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Shape = Sequence[int]


def flops_of(operator: str, arguments: Mapping[str, Any]) -> int:
    """Operations of one call; 0 where no formula is known, or the shapes do not fit it."""
    formula = _FORMULAS.get(operator)
    if formula is None:
        return 0
    try:
        return formula(arguments["Input Dims"], arguments.get("Concrete Inputs", ()))
    except (IndexError, KeyError, TypeError, ValueError, ZeroDivisionError):  # of another version of the operator
        return 0


def _product_of(first: int, second: int) -> Callable[[Sequence[Shape], Sequence[str]], int]:
    """Operations of the product of two inputs, matrices or batches of them, given by their places."""

    def matrices(shapes: Sequence[Shape], _: Sequence[str]) -> int:
        *batch, rows, inner = shapes[first]
        return 2 * math.prod(batch) * rows * inner * shapes[second][-1]

    return matrices


def _convolution(shapes: Sequence[Shape], values: Sequence[str]) -> int:
    (samples, _, *space), weight = shapes[0], shapes[1]
    stride, padding, dilation, transposed = (json.loads(values[place].lower()) for place in (3, 4, 5, 6))
    if not transposed:
        space = [
            (size + 2 * pad - apart * (kernel - 1) - 1) // step + 1
            for size, pad, apart, kernel, step in zip(space, padding, dilation, weight[2:], stride, strict=True)
        ]
    return 2 * samples * math.prod(space) * math.prod(weight)


def _convolution_backward(shapes: Sequence[Shape], values: Sequence[str]) -> int:
    gradient, inputs, weight = shapes[0], shapes[1], shapes[2]
    transposed, mask = json.loads(values[7].lower()), json.loads(values[10].lower())
    space = inputs[2:] if transposed else gradient[2:]
    return 2 * gradient[0] * math.prod(space) * math.prod(weight) * sum(mask[:2])


def _attention(shapes: Sequence[Shape], _: Sequence[str]) -> int:
    query, key, value = shapes[0], shapes[1], shapes[2]
    scores = math.prod(query[:-1]) * key[-2]
    return 2 * scores * (query[-1] + value[-1])


def _attention_backward(shapes: Sequence[Shape], _: Sequence[str]) -> int:
    query, key, value = shapes[1], shapes[2], shapes[3]
    scores = math.prod(query[:-1]) * key[-2]
    return 2 * scores * (3 * query[-1] + 2 * value[-1])  # the scores are computed again


_ATTENTIONS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
_FORMULAS: dict[str, Callable[[Sequence[Shape], Sequence[str]], int]] = {
    "aten::mm": _product_of(0, 1),
    "aten::bmm": _product_of(0, 1),
    "aten::_scaled_mm": _product_of(0, 1),
    "aten::addmm": _product_of(1, 2),
    "aten::_addmm_activation": _product_of(1, 2),
    "aten::baddbmm": _product_of(1, 2),
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    **{f"aten::_scaled_dot_product_{name}": _attention for name in _ATTENTIONS},
    **{f"aten::_scaled_dot_product_{name}_backward": _attention_backward for name in _ATTENTIONS},
}
