"""Folders of Llama weights in Hugging Face's layout, for transformer.Transformer: read into it, and written from it.

The names differ and the shapes do not. Rotary positions turn the pairs (i, i + head_width / 2) there as here, so that
queries and keys need no permutation (Meta's own files, which turn neighbours, would).
Source: the layout of `transformers.LlamaForCausalLM` (modeling_llama.py) and its config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformer import NORM_EPSILON, Transformer, TransformerConfig

from scaleray.errors import WorkloadError

LAYERS = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.gate.weight": "mlp.gate_proj.weight",
    "feed_forward.up.weight": "mlp.up_proj.weight",
    "feed_forward.down.weight": "mlp.down_proj.weight",
}
"""A block's tensors, and their names within `model.layers.N`."""


def weight_names(config: TransformerConfig, theirs: Mapping[str, Any]) -> dict[str, str]:
    """Where each tensor of a Transformer is found in a folder whose config.json is `theirs`.

    Raises WorkloadError where that describes another model, in what shapes do not show too.
    """
    _check(config, theirs)
    names = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    for block in range(config.num_blocks):
        names |= {f"blocks.{block}.{own}": f"model.layers.{block}.{their}" for own, their in LAYERS.items()}
    return names if config.tie_head else {**names, "head.weight": "lm_head.weight"}


def config_json(config: TransformerConfig, *, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The config.json of a model of this shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_blocks,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "intermediate_size": config.inner_width,
        "max_position_embeddings": config.max_sequence_length,
        "rms_norm_eps": NORM_EPSILON,
        "rope_theta": config.rope_base,
        "tie_word_embeddings": config.tie_head,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def export(model: Transformer, folder: Path) -> None:
    """Write a model as a new folder that transformers' `from_pretrained` reads: config.json and model.safetensors."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    about = config_json(model.config, dtype=model.embedding.weight.dtype)
    state = model.state_dict()
    tensors = {
        theirs: state[own].detach().cpu().contiguous() for own, theirs in weight_names(model.config, about).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(about, indent=2) + "\n")


def _check(config: TransformerConfig, theirs: Mapping[str, Any]) -> None:
    own = config_json(config)
    rope = theirs.get("rope_parameters") or {}  # transformers 5 keeps the base of the rotations there
    given = {
        "rope_theta": rope.get("rope_theta", 10_000.0),
        "num_key_value_heads": theirs.get("num_attention_heads"),
        **theirs,
    }
    # what a config leaves out has the value that transformers gives it
    given = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        **given,
    }
    given["head_dim"] = given.get("head_dim") or own["head_dim"]
    for key in sorted(own.keys() - {"architectures", "model_type", "torch_dtype", "max_position_embeddings"}):
        if given.get(key) != own[key]:
            raise WorkloadError(
                f"{key} of the folder's config.json",
                given.get(key),
                f"the model has {own[key]}",
                "set the workload's arguments to the folder's values, or take another folder",
            )
    kind = rope.get("rope_type", "default")
    scaling = theirs.get("rope_scaling") or (rope if kind != "default" else None)
    if scaling is not None:
        raise WorkloadError(
            "rope_scaling of the folder's config.json", scaling, "the model's rotations are not stretched"
        )
    longest = theirs.get("max_position_embeddings")
    if longest is not None and longest < config.max_sequence_length:
        raise WorkloadError(
            "max_position_embeddings of the folder's config.json",
            longest,
            f"the model reads {config.max_sequence_length} tokens",
            "shorten workload.args.sequence_length",
        )
