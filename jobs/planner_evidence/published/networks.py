"""The model that a published row trained, from the shape or only the name that its source gives."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from jobs.planner_evidence.published.fields import number, part, text, whole
from scaleray.config.hardware.hardware_kinds import Gpu
from scaleray.errors import ConfigError, UsageError
from scaleray.planner.models.block_counts import ModelProfile, of_size
from scaleray.planner.models.convolutions import resnet
from scaleray.planner.models.names import find_model, find_shape, usual_mixture, usual_shape
from scaleray.planner.models.transformers import TransformerShape, transformer

GATED = (
    "llama", "mistral", "qwen", "mixtral", "gemma", "olmo", "deepseek", "nanotron", "smollm", "kimi", "gpt-oss",
    "glm", "grok", "dbrx", "intellect",
)  # fmt: skip

# units that a table counts for one sample: target tokens of Transformer-XL's base recipe, words of a WMT sentence pair,
# frames of an utterance of LJSpeech or of HiFiGAN's training segment. They are those of the recipes, from memory, and
# set only how large a share communication has
UNITS = {
    "transformer-xl": 192,
    "gnmt": 50,
    "fastpitch": 600,
    "hifigan": 32,
    "tacotron2": 600,
    "wav2vec2": 4500,
    "transformer big": 1,
}
EXPERT_FIELDS = ("experts", "num_experts", "n_experts", "routed_experts", "num_local_experts")
ACTIVE_FIELDS = (
    "active_experts",
    "top_k",
    "topk",
    "experts_per_token",
    "num_experts_per_tok",
    "moe_top_k",
    "router_topk",
)
ACTIVE_PARAM_FIELDS = ("active_params", "params_active", "activated_params", "num_active_params")
LARGEST_SEQUENCE, MOST_LAYERS, WIDEST = 2**24, 4096, 2**20
"""Limits beyond what anyone has trained: a row with more is a slip."""


def model_of(model: dict[str, Any], row: dict[str, Any]) -> ModelProfile:
    """The model of a row, by its shape, else by its name.

    Raises UsageError where neither says enough, ConfigError where what it says cannot be.
    """
    name = text(model, "name")
    sequence = whole(model, "seq_len", "sequence", "sequence_length")
    _check(model)
    known = find_shape(name)
    # image sizes are those of convolutional networks, and of vision transformers, which have a shape
    if known is None and (
        "image" in model or "resnet" in name.lower() or model.get("dataset") in ("CIFAR-10", "ImageNet")
    ):
        return trained_model(name, model)
    if number(model, "hidden"):
        return transformer(shape_of(model, row), name)
    if known is not None:
        image = whole(model, "image")
        if image and not known.has_lm_head and not known.is_causal:
            sequence = (image // round((known.vocab / 3) ** 0.5)) ** 2 + 1
        return transformer(replace(known, sequence=sequence or known.sequence), name)
    params = number(model, "params")
    active = number(model, *ACTIVE_PARAM_FIELDS)
    if params and active and active < params:
        return transformer(
            replace(usual_mixture(params, active, sequence=sequence or 4096), **_old_attention(row)), name
        )
    if is_mixture(model):
        raise ConfigError(
            "model", name or None, "of a mixture of experts, total and active parameters or its width must be given"
        )
    size = re.search(r"(\d+(?:\.\d+)?)B\b", name)
    if params is None and size:
        params = float(size[1]) * 1e9
        sequence = sequence or 4096
    looks_like_text = "gpt" in name.lower() or any(word in name.lower() for word in GATED) or sequence
    if params and looks_like_text:
        return transformer(replace(usual_shape(params, sequence=int(sequence or 1024)), **_old_attention(row)), name)
    try:
        return find_model(name, sequence=int(sequence) if sequence else None)
    except UsageError:
        if params:
            return of_size(name, params, num_layers=20)
        raise


def is_mixture(model: dict[str, Any]) -> bool:
    """Whether a row says that its model routes tokens to experts."""
    return bool(number(model, *EXPERT_FIELDS, *ACTIVE_PARAM_FIELDS)) or model.get("moe") is True


def trained_model(name: str, model: dict[str, Any]) -> ModelProfile:
    """A network of a table, by name, with its image size where one is given."""
    match = re.search(r"resnet-?(\d+)", name.lower())
    if match and "resnext" not in name.lower() and "wide" not in name.lower():
        if "CIFAR" in name or model.get("dataset") == "CIFAR-10":
            return resnet(int(match[1]), image=32, num_classes=10, is_small_stem=True)
        return resnet(int(match[1]), image=whole(model, "image") or 224)
    if "bert" in name.lower():
        size = "bert-large" if "large" in name.lower() else "bert-base"
        shape = find_shape(size)
        assert shape is not None
        sequence = re.search(r"sequence length (\d+)", name)
        length = int(sequence[1]) if sequence else whole(model, "seq_len") or 128
        return transformer(replace(shape, sequence=length, fused_attention=False, predicted_share=0.15), name)
    return find_model(name)


def shape_of(model: dict[str, Any], row: dict[str, Any]) -> TransformerShape:
    """The transformer of a row that gives at least its width; layers follow from the parameters where they are missing.

    What it does not say of its experts is taken from the model of its name, where that is known.
    """
    name = text(model, "name").lower()
    hidden = whole(model, "hidden") or 1
    vocab = whole(model, "vocab", "vocab_size") or (30522 if "bert" in name else 51200)
    experts = _experts_of(model, find_shape(name))
    is_gated = any(word in name for word in GATED) or (bool(experts) and "gpt" not in name)
    ffn = whole(model, "ffn") or 4 * hidden
    # heads of 128 where they are not given
    heads = whole(model, "heads") or max(1, hidden // 128)
    layers = whole(model, "layers")
    if not layers:
        params = number(model, "params")
        if params is None:
            raise ConfigError("model.layers", None, "layers or parameters must be given")
        per_layer = 4 * hidden**2 + (3 if is_gated else 2) * hidden * (ffn * experts.get("experts", 1))
        layers = max(1, round((params - vocab * hidden) / per_layer))
    kv_heads = whole(model, "kv_heads", "num_kv_heads")
    return TransformerShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=vocab,
        sequence=whole(model, "seq_len", "sequence", "sequence_length") or 1024,
        ffn=ffn,
        kv_heads=kv_heads,
        head_dim=whole(model, "head_dim"),
        is_gated=is_gated,
        is_causal="bert" not in name and "vit" not in name,
        tied_embeddings=bool(model.get("tied_embeddings", not is_gated)),
        learned_positions=not is_gated,
        has_lm_head="squad" not in name and "fine-tuning" not in name,
        predicted_share=0.15 if "bert" in name else 1.0,
        logit_bytes=_logit_bytes(name, row, is_gated=is_gated),
        **experts,
        **_old_attention(row),
    )


def _logit_bytes(name: str, row: dict[str, Any], *, is_gated: bool) -> int:
    """Bytes of a logit at the loss's peak, by what the framework's loss does: KempnerForge's stays in 16 bit,
    nanotron's and Megatron's work in place."""
    if "kempnerforge" in name:
        return 8
    return 14 if is_gated and "nanotron" not in text(part(row, "parallelism"), "strategy") else 6


def _experts_of(model: dict[str, Any], known: TransformerShape | None) -> dict[str, Any]:
    experts = whole(model, *EXPERT_FIELDS)
    if experts is None:
        if not (is_mixture(model) and known is not None and known.experts):
            return {}
        names = (
            "experts",
            "active_experts",
            "expert_ffn",
            "shared_ffn",
            "dense_layers",
            "query_rank",
            "kv_rank",
            "rotary_dim",
        )
        return {name: value for name in names if (value := getattr(known, name))}
    width = whole(model, "expert_ffn", "moe_ffn", "moe_intermediate_size", "ffn") or 4 * (whole(model, "hidden") or 1)
    shared = whole(model, "shared_ffn") or (whole(model, "shared_experts", "n_shared_experts") or 0) * width
    found: dict[str, Any] = {
        "experts": experts,
        "active_experts": whole(model, *ACTIVE_FIELDS) or min(2, experts),
        "expert_ffn": width,
    }
    dense = whole(model, "dense_layers", "first_k_dense_replace") or 0
    return found | ({"shared_ffn": shared} if shared else {}) | ({"dense_layers": dense} if dense else {})


def fused_attention(row: dict[str, Any], gpu: Gpu) -> bool:
    """Whether scores stayed out of memory: from 2023 on, on GPUs with bf16 units; a row may say it itself."""
    said = text(part(row, "parallelism"), "attention") + text(part(row, "model"), "arch")
    if "flash" in said.lower() or "FA" in said:
        return True
    precision = text(part(row, "parallelism"), "precision")
    return "bf16" in gpu.peak_tflops and "fp16" not in precision and "bigscience" not in row["file"]


def with_attention_kernel(gpu: Gpu, row: dict[str, Any]) -> Gpu:
    """The GPU with the rate of the attention kernel that the row names, or that its framework brings: Transformer
    Engine's is cuDNN's."""
    parallelism = part(row, "parallelism")
    said = text(parallelism, "attention").lower()
    frameworks = " ".join(text(parallelism, name) for name in ("framework", "strategy", "kernels")).lower()
    is_newest = any(
        word in said for word in ("fa3", "fa4", "flash-attention-3", "flashattention-3", "flash_attention_3", "cudnn")
    )
    brings = "fa" not in said and any(
        word in frameworks
        for word in ("nemo", "megatron-bridge", "megatron bridge", "transformer engine", "megatron-core")
    )
    if gpu.best_attention_share is None or not (is_newest or brings):
        return gpu
    return replace(gpu, attention_share=gpu.best_attention_share)


def samples_per_unit(name: str, column: str) -> float:
    """Samples for each unit that the throughput column counts."""
    key = name.lower()
    units = next((value for known, value in UNITS.items() if known in key), 1)
    if "samples" in column and "tacotron" in key:
        return 1 / 8000.0  # WaveGlow, in audio samples of its training segments
    return 1.0 / units


def _check(model: dict[str, Any]) -> None:
    for names, most in (
        (("seq_len", "sequence", "sequence_length"), LARGEST_SEQUENCE),
        (("layers",), MOST_LAYERS),
        (("hidden",), WIDEST),
        (("heads",), WIDEST),
        (("ffn",), 64 * WIDEST),
        (("vocab", "vocab_size"), 64 * WIDEST),
        (("image",), 2**14),
    ):
        found = number(model, *names)
        if found is not None and found > most:
            raise ConfigError(f"model.{names[0]}", found, f"it must be at most {most}")


def _old_attention(row: dict[str, Any]) -> dict[str, bool]:
    """Scores in memory and dropout, as the recipes before flash attention had."""
    from scaleray.config.hardware.catalogue import CATALOGUE

    gpu = CATALOGUE.find_gpu(text(part(row, "hardware"), "gpu", "accelerator"))
    fused = fused_attention(row, gpu)
    return {"fused_attention": fused, "has_dropout": not fused}
