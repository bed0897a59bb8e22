"""Plans of tensor parallelism for models of transformers, made from transformers' plans for inference."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from scaleray.errors import ConfigError, WorkloadError
from scaleray.parallel import Replicated

STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    # norms of each head: (rows, tokens, heads, width), of which a worker has some heads
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
}
"""Parallel styles of torch, by transformers' name."""
DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def transformers_plan(model: Any, *, size: int, sequence_parallel: bool) -> Mapping[str, ParallelStyle] | None:
    """The plan of a model, such as Llama or Qwen; None if it has none. Raises ConfigError for a number of workers that
    does not divide its heads, and WorkloadError for layers that can be split only for inference."""
    config, prefix = getattr(model, "config", None), getattr(model, "base_model_prefix", "")
    of_base = getattr(config, "base_model_tp_plan", None)
    if not of_base or not isinstance(getattr(model, prefix, None), nn.Module):
        return None
    for name in DIVIDED:
        count = getattr(config, name, None)
        if isinstance(count, int) and count % size:
            raise ConfigError("parallel.tensor", size, f"it must divide {name}, which is {count}")
    names = {f"{prefix}.{name}": style for name, style in of_base.items()}
    if not getattr(config, "tie_word_embeddings", False):
        names |= getattr(type(model), "_tp_plan", None) or {}
    for name, style in names.items():
        if style not in STYLES:
            raise WorkloadError(
                f"transformers' plan of {name}", style, "it supports only inference", "use parallel.shard"
            )
    plan = {name: STYLES[style]() for name, style in names.items()}
    return plan | _by_tokens(model, prefix, names) if sequence_parallel else plan


def _by_tokens(model: nn.Module, prefix: str, names: Mapping[str, str]) -> dict[str, ParallelStyle]:
    """Styles with which each worker has a part of the tokens between the first and the last layer, except in attention
    and feed-forward layers."""
    layers = getattr(model.get_submodule(prefix), "layers", nn.ModuleList())
    if len(layers) < 2 or not all(
        {"self_attn", "mlp"} <= {name for name, _ in each.named_children()} for each in layers
    ):
        raise ConfigError(
            "tensor.sequence_parallel", True, "the model has no two layers of self_attn and mlp between which tokens "
            "could be split", "use --tensor.sequence-parallel false",
        )  # fmt: skip
    part: Placement = Shard(1)
    whole, each = Replicate(), f"{prefix}.layers.*"
    plan: dict[str, ParallelStyle] = {
        f"{prefix}.layers.0": PrepareModuleInput(
            input_layouts=(whole,), desired_input_layouts=(part,), use_local_output=True
        ),
        f"{prefix}.layers.{len(layers) - 1}": PrepareModuleOutput(
            output_layouts=(part,), desired_output_layouts=(whole,), use_local_output=True
        ),
        f"{each}.self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": part},
            desired_input_kwarg_layouts={"hidden_states": whole},
            use_local_output=True,
        ),
        f"{each}.mlp": PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(whole,), use_local_output=True),
    }
    plan |= {name: RowwiseParallel(output_layouts=part) for name, style in names.items() if style == "rowwise"}
    for name, child in layers[0].named_children():
        if name not in ("self_attn", "mlp") and any(True for _ in child.parameters()):
            plan[f"{each}.{name}"] = SequenceParallel(use_local_output=True)
    for name, module in model.named_modules():
        if (
            any(True for _ in module.parameters(recurse=False))
            and f"{prefix}.layers." not in name
            and name not in names
        ):
            plan[name] = Replicated()
    return plan
