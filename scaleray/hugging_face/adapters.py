"""Models wrapped by the library peft: made from a workload's arguments, and written as peft or without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scaleray.errors import WorkloadError, first_line
from scaleray.hugging_face.exported import check_same, distinct_names
from scaleray.hugging_face.libraries import peft


def wrapped(model: nn.Module, settings: Mapping[str, Any]) -> Any:
    """The model with adapters of peft, everything else frozen. settings: of `peft.LoraConfig`. Raises WorkloadError for
    what peft does not take."""
    library = peft()
    try:
        return library.get_peft_model(model, library.LoraConfig(**settings))
    except (TypeError, ValueError) as exc:
        raise WorkloadError("workload.args.peft", dict(settings), f"peft does not take it: {first_line(exc)}") from exc


def export(build: Callable[[], nn.Module], weights: Mapping[str, torch.Tensor], folder: Path, *, merge: bool) -> None:
    """Write the trained model with its adapters added to its weights, or the adapters alone.

    build: makes the wrapped model. Raises CheckpointError for weights of another model.
    """
    model: Any = build()
    check_same(model, weights)
    model.load_state_dict({name: weights[name] for name in distinct_names(model)}, strict=False)
    if merge:
        model.merge_and_unload().save_pretrained(folder)
    else:
        model.save_pretrained(folder)
