"""The model that a published row trained, from the shape or only the name that its source gives."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from scaleray.errors import UsageError
from scaleray.planner.hardware import Gpu
from scaleray.planner.models import find_model, find_shape, usual_shape
from scaleray.planner.profile import ModelProfile, TransformerShape, of_size, resnet, transformer

GATED = ("llama", "mistral", "qwen", "mixtral", "gemma", "olmo", "deepseek", "nanotron", "smollm")

# what a table counts for one sample: target tokens of Transformer-XL's base recipe, words of a WMT sentence pair, frames of an utterance
# of LJSpeech or of HiFiGAN's training segment. From the recipes, from memory; they set only how large a share communication has
UNITS = {
    "transformer-xl": 192,
    "gnmt": 50,
    "fastpitch": 600,
    "hifigan": 32,
    "tacotron2": 600,
    "wav2vec2": 4500,
    "transformer big": 1,
}


def model_of(model: dict[str, Any], row: dict[str, Any]) -> ModelProfile:
    """By its shape, else by its name. Raises UsageError where neither says enough."""
    name = str(model.get("name", ""))
    sequence = _number(model.get("seq_len"))
    if "image" in model or "resnet" in name.lower() or model.get("dataset") in ("CIFAR-10", "ImageNet"):
        return trained_model(name, model)
    if model.get("hidden"):
        return transformer(shape_of(model, row), name)
    known = find_shape(name)
    if known is not None:
        return transformer(replace(known, sequence=int(sequence or known.sequence)), name)
    params = _number(model.get("params"))
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


def trained_model(name: str, model: dict[str, Any]) -> ModelProfile:
    """A network of a table, by name, with its image size where one is given."""
    match = re.search(r"resnet-?(\d+)", name.lower())
    if match and "resnext" not in name.lower():
        if "CIFAR" in name or model.get("dataset") == "CIFAR-10":
            return resnet(int(match[1]), image=32, num_classes=10, is_small_stem=True)
        return resnet(int(match[1]), image=int(model.get("image") or 224))
    if "bert" in name.lower():
        size = "bert-large" if "large" in name.lower() else "bert-base"
        shape = find_shape(size)
        assert shape is not None
        sequence = re.search(r"sequence length (\d+)", name)
        length = int(sequence[1]) if sequence else int(model.get("seq_len") or 128)
        return transformer(replace(shape, sequence=length, fused_attention=False, predicted_share=0.15), name)
    return find_model(name)


def shape_of(model: dict[str, Any], row: dict[str, Any]) -> TransformerShape:
    """The transformer of a row that gives at least its width; layers follow from the parameters where they are missing."""
    name = str(model.get("name", "")).lower()
    hidden = int(model["hidden"])
    vocab = int(_number(model.get("vocab")) or (30522 if "bert" in name else 51200))
    is_gated = any(word in name for word in GATED)
    ffn = int(_number(model.get("ffn")) or 4 * hidden)
    # heads of 128 where they are not given
    heads = int(_number(model.get("heads")) or max(1, hidden // 128))
    layers = _number(model.get("layers"))
    if not layers:
        per_layer = 4 * hidden**2 + (3 if is_gated else 2) * hidden * ffn
        layers = max(1, round((float(model["params"]) - vocab * hidden) / per_layer))
    return TransformerShape(
        layers=int(layers), hidden=hidden, heads=heads, vocab=vocab, sequence=int(_number(model.get("seq_len")) or 1024), ffn=ffn,
        kv_heads=int(model["kv_heads"]) if model.get("kv_heads") else None, head_dim=int(model["head_dim"]) if model.get("head_dim") else None,
        is_gated=is_gated, is_causal="bert" not in name, tied_embeddings=bool(model.get("tied_embeddings", not is_gated)),
        learned_positions=not is_gated, has_lm_head="squad" not in name and "fine-tuning" not in name,
        predicted_share=0.15 if "bert" in name else 1.0, logit_bytes=_logit_bytes(name, row, is_gated=is_gated), **_old_attention(row),
    )  # fmt: skip


def _logit_bytes(name: str, row: dict[str, Any], *, is_gated: bool) -> int:
    """Of the loss's peak, by what the framework's loss does: KempnerForge's stays in 16 bit, nanotron's and Megatron's work in place."""
    if "kempnerforge" in name:
        return 8
    return 14 if is_gated and "nanotron" not in str(row.get("parallelism", {}).get("strategy")) else 6


def fused_attention(row: dict[str, Any], gpu: Gpu) -> bool:
    """Whether scores stayed out of memory: from 2023 on, on GPUs with bf16 units; a row may say it itself."""
    said = str(row.get("parallelism", {}).get("attention", "")) + str(row.get("model", {}).get("arch", ""))
    if "flash" in said.lower() or "FA" in said:
        return True
    precision = str(row.get("parallelism", {}).get("precision", ""))
    return "bf16" in gpu.peak_tflops and "fp16" not in precision and "bigscience" not in row["file"]


def samples_per_unit(name: str, column: str) -> float:
    """Samples for each unit that the throughput column counts."""
    key = name.lower()
    units = next((value for known, value in UNITS.items() if known in key), 1)
    if "samples" in column and "tacotron" in key:
        return 1 / 8000.0  # WaveGlow, in audio samples of its training segments
    return 1.0 / units


def _old_attention(row: dict[str, Any]) -> dict[str, bool]:
    """Scores in memory and dropout, as the recipes before flash attention had."""
    from scaleray.planner.catalogue import CATALOGUE

    gpu = CATALOGUE.find_gpu(str(row.get("hardware", {}).get("gpu")))
    fused = fused_attention(row, gpu)
    return {"fused_attention": fused, "has_dropout": not fused}


def _number(value: Any) -> float | None:
    """4096, or the last number of a text such as `auto 1.3x (14336)`."""
    if isinstance(value, int | float):
        return float(value)
    numbers = re.findall(r"\d+(?:\.\d+)?", str(value)) if value is not None else []
    return float(numbers[-1]) if numbers else None
