"""Ready-made workload for image classification, configured in YAML."""

import difflib
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from scaleray.checkpoints.weight_files import opened_safetensors, opened_torch
from scaleray.common.installed import library
from scaleray.common.model_blocks import find_blocks
from scaleray.errors import CheckpointError, WorkloadError, first_line
from scaleray.images.image_data import PIXELS, ImageData
from scaleray.images.image_folder import LABELS, ImageFiles, ImageFolder
from scaleray.workload import Workload

EXTRA = "images"


def build(name: str, *, num_classes: int, options: Mapping[str, Any], weights: str | None) -> nn.Module:
    """Build the named model with `num_classes` classes.

    options: more arguments of its function. weights: a .safetensors or .pt file. A head with a different number of
    classes keeps its random initialisation. Raises WorkloadError and CheckpointError.
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
        raise WorkloadError("workload.args.options", dict(options), f"{name} rejected them: {first_line(exc)}") from exc
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


class ImageClassification(Workload):
    """Classify images in folders, with one folder per class.

    model: `torchvision:NAME` or `timm:NAME`; may be omitted in a subclass with its own `build_model`. weights: a local
    file to start from. options: more arguments of the model's function. All other arguments are those of `ImageData`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        data: Mapping[str, str],
        weights: str | None = None,
        options: Mapping[str, Any] | None = None,
        **images: Any,
    ) -> None:
        self.model, self.options = model, dict(options or {})
        self.weights = None if weights is None else str(Path(weights).expanduser().absolute())
        self.images = ImageData(data, **images)

    def build_model(self) -> nn.Module:
        return build(str(self.model), num_classes=len(self.images.classes), options=self.options, weights=self.weights)

    def datasets(self) -> dict[str, ImageFolder]:
        return self.images.datasets()

    def read_data(self, path: str) -> ImageFiles | None:
        return self.images.at(path)

    def transform(self, rows: dict[str, Any], rng: Any, split: str) -> dict[str, Any]:  # type: ignore[override]
        return self.images.transform(rows, rng, split)

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        return F.cross_entropy(self.logits(model, batch), batch[LABELS], reduction="sum"), len(batch[LABELS])

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        logits, labels = self.logits(model, batch), batch[LABELS]
        loss = F.cross_entropy(logits, labels, reduction="sum")
        return {"loss": (loss, len(labels)), "accuracy": ((logits.argmax(dim=1) == labels).sum(), len(labels))}

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        """Most likely class of each row, its name, and its probability."""
        return class_answers(self.logits(model, batch), self.images.classes)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return find_blocks(model)

    def logits(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Output of the model for a batch, at least float32."""
        found: torch.Tensor = model(self.images.pixels(batch[PIXELS], dtype_of(model)))
        return found.to(torch.promote_types(found.dtype, torch.float32))


def class_answers(logits: torch.Tensor, names: Sequence[str]) -> dict[str, Any]:
    """Most likely class of each row, its name, and its probability."""
    probability, label = logits.float().softmax(dim=-1).max(dim=-1)
    return {"label": label, "class": [names[number] for number in label.tolist()], "probability": probability}


def dtype_of(model: nn.Module) -> torch.dtype:
    """dtype of a model's parameters."""
    return next(p.dtype for p in model.parameters() if p.is_floating_point())
