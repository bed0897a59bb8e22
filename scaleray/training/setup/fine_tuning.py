"""Training from existing weights: reading them, freezing parts, and low-rank adapters (LoRA).

An adapter consists of two parameters `lora_a` and `lora_b` of the layer itself, whose own weight keeps its name, so
that weights of a model without adapters can still be loaded. Called by model_setup, before and after the strategy, and
by the loop at the end. Source: Hu et al. 2021, arXiv:2106.09685."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from scaleray.checkpoints import consolidated
from scaleray.checkpoints.hugging_face import ModelFolder, model_folder
from scaleray.checkpoints.model_layout import is_model_folder
from scaleray.checkpoints.peft_adapter import is_adapter_folder, is_inside, is_of_adapter, load_adapter
from scaleray.config.averaging_pruning_fine_tuning import FineTuningSettings
from scaleray.errors import CheckpointError, WorkloadError
from scaleray.strategies.contract.weight_shares import WeightShare
from scaleray.workload import call_user_code


class LoraLinear(nn.Linear):
    """Linear layer with `alpha / rank * B A` added to its weight. A is lora_a (rank, in), B is lora_b (out, rank)."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    lora_scale: float

    @classmethod
    def adapt(cls, layer: nn.Linear, *, rank: int, alpha: float) -> None:
        """Add an adapter to a layer in place, so that hooks and references to the layer remain valid. B is zero, so the
        layer's output is unchanged; A is initialised like a linear layer, as in the paper's code."""
        weight = layer.weight
        layer.__class__ = cls
        assert isinstance(layer, cls)
        layer.lora_scale = alpha / rank
        layer.lora_a = nn.Parameter(torch.empty(rank, layer.in_features, dtype=weight.dtype, device=weight.device))
        layer.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank, dtype=weight.dtype, device=weight.device))
        nn.init.kaiming_uniform_(layer.lora_a, a=math.sqrt(5))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        low_rank = F.linear(F.linear(input, self.lora_a), self.lora_b)
        return super().forward(input) + self.lora_scale * low_rank


def adapt(model: nn.Module, settings: FineTuningSettings) -> None:
    """Freeze parameters and add adapters, in place. Called before the strategy, which shards the result.

    Adapters draw from torch's generator after the model has, so the model itself starts as it would without them.
    Raises WorkloadError for names that the model does not have, and if nothing is left to train."""
    for beginning in settings.freeze:
        # including the second names of tied parameters
        found = [p for name, p in model.named_parameters(remove_duplicate=False) if name.startswith(beginning)]
        if not found:
            raise WorkloadError(
                "fine_tuning.freeze",
                beginning,
                "no parameter's name starts with it",
                f"names are: {_shortened(sorted({n for n, _ in model.named_children()}))}",
            )
        for parameter in found:
            parameter.requires_grad_(False)
    if settings.lora_rank:
        layers, heads = _layers(model, settings), _trained_whole(model, settings)
        model.requires_grad_(False)
        for parameter in heads:
            parameter.requires_grad_(True)
        for layer in layers:
            LoraLinear.adapt(layer, rank=settings.lora_rank, alpha=settings.lora_alpha)
    if settings.freeze and not any(p.requires_grad for p in model.parameters()):
        raise WorkloadError("fine_tuning.freeze", list(settings.freeze), "nothing is left to train")


def load(module: nn.Module, workload: Any, where: str, *, is_part: bool = False) -> None:
    """Load the weights at `where` into a model, which may be sharded. Adapters are unchanged if the weights contain
    none.

    is_part: the module is a stage of the model and takes only its own tensors. where: as for `workload.weights`. Each
    rank reads its own part, without communication. Raises CheckpointError."""
    where = model_folder(where)
    tensors = {name: t for name, t in module.state_dict().items() if isinstance(t, torch.Tensor)}
    adapters = {name for name in tensors if is_of_adapter(name)}
    if is_adapter_folder(where):
        trained = {name for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
        _load_adapter(module, {n: t for n, t in tensors.items() if n in trained}, where, is_part=is_part)
        return
    if not is_model_folder(where):
        if consolidated.load_file(tensors, where, optional=adapters, is_part=is_part):
            return
        consolidated.load_weights(tensors, where, optional=adapters, is_part=is_part)
        return
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    folder = ModelFolder.open(where, rank=rank, num_ranks=num_ranks)
    names: Mapping[str, str] | None = None
    if not folder.has_own_names and callable(getattr(workload, "weight_names", None)):
        names = call_user_code(
            lambda: workload.weight_names(module, folder.config), what="weight_names()", doing="naming the weights"
        )
    if names is None:
        names = {name: name for name in tensors if name in folder.files}
    if is_part:
        names = {name: source for name, source in names.items() if name in tensors}
    folder.load(tensors, names, optional=adapters, is_part=is_part)


def _load_adapter(module: nn.Module, adapters: Mapping[str, torch.Tensor], where: str, *, is_part: bool) -> None:
    """Load the adapters and the modules trained with them; the rest of the model stays as `build_model` made it."""
    scales = {part.lora_scale for part in module.modules() if isinstance(part, LoraLinear)}
    if not scales:
        raise CheckpointError(
            "workload.weights", where, "it is a peft adapter, but the model has none", "--fine-tuning.lora-rank N"
        )
    load_adapter(adapters, where, scale=scales.pop(), is_part=is_part)


def merged_share(share: WeightShare, settings: FineTuningSettings) -> WeightShare:
    """Final weights with each adapter added to its layer's weight, which is in the same share, under the names of a
    model without adapters; and the adapters separately."""
    if not settings.lora_rank or not settings.merge:
        return share
    layout = {name: placed for name, placed in share.layout.items() if not is_of_adapter(name)}
    apart = WeightShare(
        {name: value for name, value in share.tensors.items() if is_of_adapter(name)},
        {name: placed for name, placed in share.layout.items() if is_of_adapter(name)},
    )
    return replace(share, tensors=merged(share.tensors, settings), layout=layout, adapters=apart)


def has_adapters(weights: Mapping[str, Any]) -> bool:
    """Whether any of these tensors belongs to an adapter, judging by its name."""
    return any(map(is_of_adapter, weights))


def merged(weights: dict[str, Any], settings: FineTuningSettings) -> dict[str, Any]:
    """State dict of whole layers, with each adapter added to its layer's weight."""
    plain = {name: value for name, value in weights.items() if not is_of_adapter(name)}
    for name, low in weights.items():
        layer, _, last = name.rpartition(".")
        if last != "lora_a":
            continue
        prefix = f"{layer}." if layer else ""
        weight, high = weights[f"{prefix}weight"], weights[f"{prefix}lora_b"]
        # computed in float32 at least, and rounded once
        wide = torch.promote_types(weight.dtype, torch.float32)
        change = settings.lora_alpha / settings.lora_rank * (high.to(wide) @ low.to(wide))
        plain[f"{prefix}weight"] = (weight.to(wide) + change).to(weight.dtype)
    return plain


def _layers(model: nn.Module, settings: FineTuningSettings) -> list[nn.Linear]:
    # exactly nn.Linear: a subclass may compute something else
    whole = settings.trained_whole
    linear = {n: part for n, part in model.named_modules() if type(part) is nn.Linear and not is_inside(f"{n}.", whole)}
    chosen: dict[str, nn.Linear] = {}
    for words in settings.lora_layers:
        found = {name: part for name, part in linear.items() if name == words or name.endswith(f".{words}")}
        if not found:
            there = sorted({name.rpartition(".")[2] for name in linear})
            raise WorkloadError(
                "fine_tuning.lora_layers",
                words,
                "no linear layer's name ends with it",
                f"there are: {_shortened(there)}",
            )
        chosen.update(found)
    return list(chosen.values())


def _trained_whole(model: nn.Module, settings: FineTuningSettings) -> list[nn.Parameter]:
    """Parameters of the modules to be trained in full, except those that the workload has frozen."""
    if settings.trained_whole != FineTuningSettings().trained_whole:
        there = [name for name, _ in model.named_modules()]
        for words in settings.trained_whole:
            if not any(is_inside(f"{name}.", [words]) for name in there):
                own = sorted({name for name, _ in model.named_children()})
                raise WorkloadError(
                    "fine_tuning.trained_whole", words, "no module's name ends with it", f"there are: {_shortened(own)}"
                )
    found = model.named_parameters(remove_duplicate=False)
    return [p for name, p in found if p.requires_grad and is_inside(name, settings.trained_whole)]


def _shortened(names: list[str]) -> str:
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") if names else "none"
