"""Export of a run's weights to a folder for `from_pretrained`."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scaleray.checkpoints.model_layout import WEIGHTS
from scaleray.errors import CheckpointError
from scaleray.hugging_face.libraries import transformers

GENERATION = "generation_config.json"


def write_model(
    config: Any, auto_class: str, weights: Mapping[str, torch.Tensor], folder: Path, *, source: str | None = None
) -> None:
    """Write config.json, model.safetensors and, for a generative model, generation_config.json.

    weights: by the names of the model's state dict. source: the model's original folder, whose generation config is
    copied. Raises CheckpointError for weights of another model."""
    from safetensors.torch import save_file

    with torch.device("meta"):  # only for names, ties and the class
        model = getattr(transformers(), auto_class).from_config(config)
    check_same(model, weights)
    kept = {name: weights[name].detach().cpu().contiguous() for name in distinct_names(model)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})
    config.architectures = [type(model).__name__]
    config.dtype = next(str(t.dtype).removeprefix("torch.") for t in kept.values() if t.is_floating_point())
    config.save_pretrained(folder)
    if source is not None and (Path(source) / GENERATION).is_file():
        shutil.copyfile(Path(source) / GENERATION, folder / GENERATION)
    elif model.can_generate():
        model.generation_config.save_pretrained(folder)


def distinct_names(model: nn.Module) -> list[str]:
    """Names in the model's state dict, without the second names of tied tensors."""
    first: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first.setdefault(id(tensor), name)
    return list(first.values())


def check_same(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the weights' names differ from the model's state dict."""
    own = model.state_dict().keys()
    if different := sorted(own ^ weights.keys()):
        raise CheckpointError.problem(
            f"the tensor {different[0]}",
            ("is only in the weights" if different[0] in weights else "is only in the model")
            + f": {len(different)} tensors differ from those of a {type(model).__name__} of this config",
            "export to a .safetensors file, or define export() in the workload",
        )
