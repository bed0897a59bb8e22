"""Casts in a workload's code that leave float64, such as `.float()`, which make a float64 comparison meaningless."""

import contextlib
import traceback
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from scaleray.common.seeding import same_random_numbers
from scaleray.config.precision import PrecisionSettings
from scaleray.training.setup import precision
from scaleray.training.setup.weighted_losses import summed_loss
from scaleray.training.step.micro_batches import user_batch
from scaleray.workload import built_model, user_frames

CPU = torch.device("cpu")
INSTEAD = (
    "cast to the dtype of another tensor, as in x.to(weight.dtype), or compare in the precision that the code is "
    "written for: --precision fp32, which has its own bound"
)


class _Casts(TorchDispatchMode):
    """Records each line of the user's code in which a float64 tensor becomes narrower."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        was = args[0].dtype if args and isinstance(args[0], torch.Tensor) else None
        is_cast = func in (torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype)
        if is_cast and was == torch.float64 and given.is_floating_point() and given.dtype != was:
            frames = user_frames(traceback.extract_stack())
            if frames:
                last = frames[-1]
                self.places[f"{last.filename}:{last.lineno}: {last.line}"] = None
        return given


def narrow_casts(workload: Any, rows: Mapping[str, Any], *, gives_tuples: bool) -> list[str]:
    """Places, as file, line and code, where a forward pass of the workload's loss leaves float64. rows: a few rows of
    the training data. Does not affect random numbers; an error in the workload only ends the search."""
    casts = _Casts()
    with contextlib.suppress(Exception, SystemExit), same_random_numbers(CPU):
        with torch.device(CPU):
            model = built_model(workload)
        arithmetic = precision.prepare(model, CPU, PrecisionSettings(dtype="fp64"))
        columns = {name: values[np.arange(len(values))] for name, values in rows.items()}
        batch = user_batch(workload, columns, CPU, arithmetic.input_dtype, gives_tuples=gives_tuples)
        with casts:
            summed_loss(workload, model, batch)
    return list(casts.places)


def to_text(places: list[str]) -> str:
    """Description of these casts, with a remedy; empty if there are none."""
    if not places:
        return ""
    more = f", and {len(places) - 3} more" if len(places) > 3 else ""
    return f"float64 is left at {'; '.join(places[:3])}{more}\n  {INSTEAD}"
