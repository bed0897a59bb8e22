"""Plans of tensor parallelism for models of transformers, from those that transformers has for inference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from scaleray.errors import ConfigError, WorkloadError

STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    # norms of each head: (rows, tokens, heads, width), of which a worker has some heads
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
}
"""Styles of torch by transformers' name."""
DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def transformers_plan(model: Any, *, size: int, sequence_parallel: bool) -> Mapping[str, ParallelStyle] | None:
    """The plan of a model, such as Llama and Qwen; None for a model without one. Raises ConfigError for a number of
    workers that does not divide its heads, and WorkloadError for layers that only inference can split."""
    config, prefix = getattr(model, "config", None), getattr(model, "base_model_prefix", "")
    of_base = getattr(config, "base_model_tp_plan", None)
    if not of_base or not isinstance(getattr(model, prefix, None), nn.Module):
        return None
    if sequence_parallel:
        allowed = "plans of transformers only split layers"
        raise ConfigError("tensor.sequence_parallel", True, allowed, "use --tensor.sequence-parallel false")
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
    return {name: STYLES[style]() for name, style in names.items()}
