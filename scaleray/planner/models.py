"""Models by name: the shapes that their papers and model cards give.

`find_model` takes `llama-70b`, `Llama 3.1 8B`, `gpt2-xl`, `resnet-50`; a number alone (`gpt-13b`, `7b`) becomes a transformer of usual proportions.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import replace

from scaleray.errors import UsageError
from scaleray.planner.profile import ModelProfile, TransformerShape, convolutional, of_size, resnet, transformer


def _llama(layers: int, hidden: int, heads: int, ffn: int, vocab: int, kv_heads: int | None = None, *, tied: bool = False, sequence: int = 4096, head_dim: int | None = None) -> TransformerShape:  # fmt: skip
    return TransformerShape(layers=layers, hidden=hidden, heads=heads, ffn=ffn, vocab=vocab, kv_heads=kv_heads, sequence=sequence,
                            is_gated=True, tied_embeddings=tied, head_dim=head_dim)  # fmt: skip


def _gpt(
    layers: int, hidden: int, heads: int, *, vocab: int = 50257, sequence: int = 1024, dropout: bool = True
) -> TransformerShape:
    return TransformerShape(layers=layers, hidden=hidden, heads=heads, vocab=vocab, sequence=sequence, tied_embeddings=True,
                            learned_positions=True, has_dropout=dropout)  # fmt: skip


TRANSFORMERS: dict[str, TransformerShape] = {
    "llama-7b": _llama(32, 4096, 32, 11008, 32000),
    "llama-13b": _llama(40, 5120, 40, 13824, 32000),
    "llama-30b": _llama(60, 6656, 52, 17920, 32000),
    "llama-65b": _llama(80, 8192, 64, 22016, 32000),
    "llama-70b": _llama(80, 8192, 64, 28672, 32000, 8),
    "llama-3-1b": _llama(16, 2048, 32, 8192, 128256, 8, tied=True, sequence=8192),
    "llama-3-3b": _llama(28, 3072, 24, 8192, 128256, 8, tied=True, sequence=8192),
    "llama-3-8b": _llama(32, 4096, 32, 14336, 128256, 8, sequence=8192),
    "llama-3-70b": _llama(80, 8192, 64, 28672, 128256, 8, sequence=8192),
    "llama-3-405b": _llama(126, 16384, 128, 53248, 128256, 8, sequence=8192),
    "tinyllama-1.1b": _llama(22, 2048, 32, 5632, 32000, 4, sequence=2048),
    "mistral-7b": _llama(32, 4096, 32, 14336, 32000, 8, sequence=8192),
    "qwen3-0.6b": _llama(28, 1024, 16, 3072, 151936, 8, tied=True, sequence=4096, head_dim=128),
    "qwen2.5-7b": _llama(28, 3584, 28, 18944, 152064, 4),
    "qwen2.5-32b": _llama(64, 5120, 40, 27648, 152064, 8),
    "gpt2": _gpt(12, 768, 12),
    "gpt2-medium": _gpt(24, 1024, 16),
    "gpt2-large": _gpt(36, 1280, 20),
    "gpt2-xl": _gpt(48, 1600, 25),
    "gpt3-13b": _gpt(40, 5120, 40, vocab=51200, sequence=2048),
    "gpt3-175b": _gpt(96, 12288, 96, vocab=51200, sequence=2048),
    "bloom-176b": _gpt(70, 14336, 112, vocab=250880, sequence=2048, dropout=False),
    "bert-base": replace(_gpt(12, 768, 12, vocab=30522, sequence=512), is_causal=False),
    "bert-large": replace(_gpt(24, 1024, 16, vocab=30522, sequence=512), is_causal=False),
}
"""Sources: the model cards and papers of each family, from memory; parameter counts are checked by a test."""

ALIASES = {
    "llama-2-7b": "llama-7b", "llama-2-13b": "llama-13b", "llama-2-70b": "llama-70b", "llama-3.1-8b": "llama-3-8b",
    "llama-3.1-70b": "llama-3-70b", "llama-3.1-405b": "llama-3-405b", "llama-3.2-1b": "llama-3-1b", "llama-3.2-3b": "llama-3-3b",
    "gpt2-small": "gpt2", "gpt2-1.5b": "gpt2-xl", "gpt-3": "gpt3-175b", "gpt3": "gpt3-175b", "bloom": "bloom-176b",
}  # fmt: skip

# name: parameters, multiply-adds of a forward pass, elements that its convolutions write, layers, parameters of the largest tensor,
# share of the multiply-adds in ungrouped 3x3 and 5x5 filters of stride 1, whether norms follow the convolutions.
# Keras applications, torchvision and the papers, from memory to two digits; activations from Dollar et al. 2021, arXiv:2103.06877
CONVOLUTIONAL = {
    "vgg16": (138.4e6, 15.5e9, 13.6e6, 16, 102.8e6, 0.99, False),
    "alexnet": (61.1e6, 0.72e9, 0.66e6, 8, 37.7e6, 0.82, False),
    "inceptionv3": (23.8e6, 5.7e9, 10.3e6, 48, 2.0e6, 0.35, True),
    "resnext-101-32x4d": (44.2e6, 8.0e9, 21.3e6, 33, 2.0e6, 0.0, True),
    "se-resnext-101-32x4d": (49.0e6, 8.0e9, 25.0e6, 33, 2.0e6, 0.0, True),
    "efficientnet-b0": (5.3e6, 0.39e9, 6.7e6, 18, 1.3e6, 0.0, True),
    "efficientnet-b4": (19.3e6, 4.4e9, 49.5e6, 32, 1.8e6, 0.0, True),
}

# models that are not taken apart: parameters and those of the largest tensor, from their papers and repositories, from memory
SIZES = {
    "yolov3": (61.6e6, 4.7e6), "deepspeech2": (52.0e6, 5.0e6), "transformer-xl": (192e6, 20e6), "transformer-big": (210e6, 33.5e6),
    "gnmt": (160e6, 33e6), "mask-r-cnn": (44e6, 13e6), "quartznet": (18.9e6, 1.0e6), "wav2vec2": (95e6, 2.4e6), "fastpitch": (45e6, 1.5e6),
    "hifigan": (85e6, 5.0e6), "tacotron2": (28e6, 4.2e6), "tft": (2.0e6, 0.2e6), "moflow": (80e6, 5.0e6), "efficientdet": (3.9e6, 0.5e6),
    "ssd": (26e6, 2.4e6), "ncf": (31.8e6, 17.8e6), "unet": (31e6, 9.4e6), "waveglow": (88e6, 2.0e6), "dlrm": (540e6, 200e6),
    "neumf": (31.8e6, 17.8e6), "jasper": (333e6, 6e6), "t5-11b": (11e9, 67e6), "vit-b": (86e6, 2.4e6),
}  # fmt: skip


def find_model(name: str, *, sequence: int | None = None, image: int = 224) -> ModelProfile:
    """The profile of a model by name. `sequence` replaces the usual length of its samples.

    Raises UsageError with the nearest names.
    """
    key = _key(name)
    shape = find_shape(name)
    if shape is not None:
        return transformer(replace(shape, sequence=sequence or shape.sequence), name)
    match = re.search(r"resnet-?(\d+)", key)
    if match and "resnext" not in key:
        return resnet(int(match[1]), image=image)
    for known, (params, macs, outputs, layers, largest, winograd_share, has_norms) in CONVOLUTIONAL.items():
        if known.replace("-", "") in key.replace("-", ""):
            return convolutional(
                known, num_params=params, forward_macs=macs, outputs=outputs, num_layers=layers, largest_params=largest,
                winograd_share=winograd_share, has_norms=has_norms,
            )  # fmt: skip
    match = re.search(r"(\d+(?:\.\d+)?)([bm])$", key)
    if match:
        params = float(match[1]) * (1e9 if match[2] == "b" else 1e6)
        return transformer(usual_shape(params, sequence=sequence or 2048), name)
    for known, (params, largest) in sorted(SIZES.items(), key=lambda item: -len(item[0])):
        if known.replace("-", "") in key.replace("-", ""):
            return of_size(name, params, num_layers=20, largest_params=largest)
    every = [*TRANSFORMERS, *ALIASES, *CONVOLUTIONAL, *SIZES, *(f"resnet-{depth}" for depth in (18, 34, 50, 101, 152))]
    near = difflib.get_close_matches(key, every, n=3, cutoff=0.5)
    raise UsageError("model", name, "no such model is known", f"nearest: {', '.join(near)}" if near else f"known: {', '.join(every)}, or a size as in gpt-13b")  # fmt: skip


def find_shape(name: str) -> TransformerShape | None:
    """The shape of a transformer by its name; None where the name is not one of those listed."""
    key = _key(name)
    key = ALIASES.get(key, key)
    return TRANSFORMERS.get(key)


def usual_shape(num_params: float, *, sequence: int, vocab: int = 51200, ffn_ratio: int = 4) -> TransformerShape:
    """A GPT of about `num_params` parameters with heads of 128: as wide for its depth as GPT-3's sizes are, about 110 to 130 a layer."""
    best: tuple[float, TransformerShape] | None = None
    for heads in range(4, 160):
        hidden = heads * 128
        per_layer = (4 + 2 * ffn_ratio) * hidden**2
        layers = max(2, round((num_params - vocab * hidden) / per_layer))
        total = layers * per_layer + vocab * hidden
        unusual = abs(hidden / layers / 120 - 1) * 0.1
        misfit = abs(total / num_params - 1) + unusual
        if best is None or misfit < best[0]:
            best = misfit, TransformerShape(layers=layers, hidden=hidden, heads=heads, vocab=vocab, sequence=sequence,
                                            ffn=ffn_ratio * hidden, tied_embeddings=True)  # fmt: skip
    assert best is not None
    return best[1]


def _key(name: str) -> str:
    key = re.sub(r"[\s_]+", "-", name.strip().lower())
    key = re.sub(r"^gpt-2", "gpt2", key)
    return re.sub(r"^llama(\d)", r"llama-\1", key)
