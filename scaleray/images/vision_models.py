"""Image models by name, `torchvision:resnet18` or `timm:vit_tiny_patch16_224`, with weights only from a local file."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scaleray.checkpoints.weight_files import opened_safetensors, opened_torch
from scaleray.common.extras import library
from scaleray.errors import CheckpointError, WorkloadError, first_line

EXTRA = "images"


def build(name: str, *, num_classes: int, options: Mapping[str, Any], weights: str | None) -> nn.Module:
    """Build the named model with `num_classes` classes.

    options: more arguments of its function. weights: a .safetensors or .pt file; a head for other classes keeps its
    random initialisation. Raises WorkloadError and CheckpointError.
    """
    source, _, model_name = name.partition(":")
    if source not in _SOURCES or not model_name:
        raise WorkloadError(
            "workload.args.model", name, "it must be torchvision:NAME or timm:NAME", "for example torchvision:resnet18"
        )
    known, make = _SOURCES[source]()
    if model_name not in known:
        near = difflib.get_close_matches(model_name, known, n=3, cutoff=0.5)
        raise WorkloadError(
            "workload.args.model", name, f"{source} has no such model", f"similar: {', '.join(near) or known[0]}"
        )
    try:
        model = make(model_name, num_classes, dict(options))
    except (TypeError, ValueError) as exc:
        raise WorkloadError(
            "workload.args.options", dict(options), f"{name} does not accept them: {first_line(exc)}"
        ) from exc
    if weights is not None:
        load_weights(model, weights)
    return model


def load_weights(model: nn.Module, path: str) -> None:
    """Load a state dict from a file into a model. The tensors of one layer, the head, may differ in shape: they are
    unchanged, with a warning. Raises CheckpointError for any other difference."""
    opened = opened_safetensors if Path(path).suffix == ".safetensors" else opened_torch
    own = {name: t for name, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    with opened(path) as (names, get):
        wrong = sorted(own.keys() ^ set(names))
        if wrong:
            found = "only in the file" if wrong[0] in names else "only in the model"
            raise CheckpointError(f"the tensor {wrong[0]}", found, f"{path} must be weights of this model")
        saved = {name: get(name) for name in names}
    other = sorted(name for name, tensor in saved.items() if tensor.shape != own[name].shape)
    heads = {name.rpartition(".")[0] for name in other}
    if len(heads) > 1:
        raise CheckpointError(
            f"the tensor {other[0]}",
            list(own[other[0]].shape),
            f"{path} has {list(saved[other[0]].shape)}, and layers other than the head differ as well",
            "the weights belong to another model",
        )
    if heads:
        warnings.warn(f"{heads.pop()} is initialised at random: {path} has other classes", stacklevel=2)
    with torch.no_grad():
        for name in saved.keys() - set(other):
            own[name].copy_(saved[name])


def _torchvision() -> tuple[list[str], Callable[[str, int, dict[str, Any]], nn.Module]]:
    models = library("torchvision.models", extra=EXTRA, wanted_by="a model of torchvision")
    return models.list_models(), lambda name, num, more: models.get_model(name, weights=None, num_classes=num, **more)


def _timm() -> tuple[list[str], Callable[[str, int, dict[str, Any]], nn.Module]]:
    timm = library("timm", extra=EXTRA, wanted_by="a model of timm")
    return timm.list_models(), lambda name, num, more: timm.create_model(
        name, pretrained=False, num_classes=num, **more
    )


_SOURCES = {"torchvision": _torchvision, "timm": _timm}
