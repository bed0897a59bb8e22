"""Shapes and sizes of the models that the planner knows by name. Sources: their papers and model cards, from memory
unless noted; a test checks total and active parameter counts."""

from dataclasses import replace

from scaleray.planner.models.transformers import TransformerShape


def _llama(
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    vocab: int,
    kv_heads: int | None = None,
    *,
    tied: bool = False,
    sequence: int = 4096,
    head_dim: int | None = None,
) -> TransformerShape:
    return TransformerShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        ffn=ffn,
        vocab=vocab,
        kv_heads=kv_heads,
        sequence=sequence,
        is_gated=True,
        tied_embeddings=tied,
        head_dim=head_dim,
    )


def _gpt(
    layers: int, hidden: int, heads: int, *, vocab: int = 50257, sequence: int = 1024, dropout: bool = True
) -> TransformerShape:
    return TransformerShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=vocab,
        sequence=sequence,
        tied_embeddings=True,
        learned_positions=True,
        has_dropout=dropout,
    )


def _mixture(
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    vocab: int,
    kv_heads: int | None,
    experts: int,
    active: int,
    *,
    sequence: int = 4096,
    head_dim: int | None = None,
    dense_ffn: int | None = None,
    shared_ffn: int = 0,
    dense_layers: int = 0,
    query_rank: int = 0,
    kv_rank: int = 0,
) -> TransformerShape:
    return TransformerShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        ffn=dense_ffn or ffn,
        vocab=vocab,
        kv_heads=kv_heads,
        sequence=sequence,
        is_gated=True,
        head_dim=head_dim,
        experts=experts,
        active_experts=active,
        expert_ffn=ffn,
        shared_ffn=shared_ffn,
        dense_layers=dense_layers,
        query_rank=query_rank,
        kv_rank=kv_rank,
        rotary_dim=64 if kv_rank else 0,
    )


def _vision(layers: int, hidden: int, heads: int, *, patch: int) -> TransformerShape:
    """A vision transformer on images of 224 x 224, with patches as tokens and the projection of a patch as word
    embedding.
    """
    return TransformerShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=3 * patch**2,
        sequence=(224 // patch) ** 2 + 1,
        is_causal=False,
        learned_positions=True,
        has_lm_head=False,
        tied_embeddings=True,
    )


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
    "qwen3-1.7b": _llama(28, 2048, 16, 6144, 151936, 8, tied=True, head_dim=128),
    "qwen3-4b": _llama(36, 2560, 32, 9728, 151936, 8, tied=True, head_dim=128),
    "qwen3-8b": _llama(36, 4096, 32, 12288, 151936, 8, head_dim=128),
    "qwen3-14b": _llama(40, 5120, 40, 17408, 151936, 8, head_dim=128),
    "qwen3-32b": _llama(64, 5120, 64, 25600, 151936, 8, head_dim=128),
    "qwen2.5-72b": _llama(80, 8192, 64, 29568, 152064, 8),
    "olmo-7b": _llama(32, 4096, 32, 11008, 50304, tied=True, sequence=2048),
    "codellama-34b": _llama(48, 8192, 64, 22016, 32000, 8),
    "qwen2.5-7b": _llama(28, 3584, 28, 18944, 152064, 4),
    "qwen2.5-32b": _llama(64, 5120, 40, 27648, 152064, 8),
    "gpt2": _gpt(12, 768, 12),
    "gpt2-medium": _gpt(24, 1024, 16),
    "gpt2-large": _gpt(36, 1280, 20),
    "gpt2-xl": _gpt(48, 1600, 25),
    "gpt3-13b": _gpt(40, 5120, 40, vocab=51200, sequence=2048),
    "gpt3-175b": _gpt(96, 12288, 96, vocab=51200, sequence=2048),
    "gpt-neox-20b": replace(_gpt(44, 6144, 64, vocab=50432, sequence=2048, dropout=False), tied_embeddings=False),
    "opt-175b": _gpt(96, 12288, 96, vocab=50272, sequence=2048),
    "mt-nlg-530b": _gpt(105, 20480, 128, vocab=51200, sequence=2048),
    "nemotron-4-15b": replace(
        _gpt(32, 6144, 48, vocab=256000, sequence=4096, dropout=False), kv_heads=8, tied_embeddings=False
    ),
    "nemotron-4-340b": replace(
        _gpt(96, 18432, 96, vocab=256000, sequence=4096, dropout=False), kv_heads=8, tied_embeddings=False
    ),
    "mixtral-8x7b": _mixture(32, 4096, 32, 14336, 32000, 8, 8, 2),
    "mixtral-8x22b": _mixture(56, 6144, 48, 16384, 32768, 8, 8, 2),
    "qwen3-30b-a3b": _mixture(48, 2048, 32, 768, 151936, 4, 128, 8, head_dim=128),
    "qwen3-235b-a22b": _mixture(94, 4096, 64, 1536, 151936, 4, 128, 8, head_dim=128),
    "deepseek-v2-lite": _mixture(
        27,
        2048,
        16,
        1408,
        102400,
        None,
        64,
        6,
        head_dim=128,
        dense_ffn=10944,
        shared_ffn=2816,
        dense_layers=1,
        kv_rank=512,
    ),
    "deepseek-v2": _mixture(
        60,
        5120,
        128,
        1536,
        102400,
        None,
        160,
        6,
        head_dim=128,
        dense_ffn=12288,
        shared_ffn=3072,
        dense_layers=1,
        query_rank=1536,
        kv_rank=512,
    ),
    "deepseek-v3": _mixture(
        61,
        7168,
        128,
        2048,
        129280,
        None,
        256,
        8,
        head_dim=128,
        dense_ffn=18432,
        shared_ffn=2048,
        dense_layers=3,
        query_rank=1536,
        kv_rank=512,
    ),
    "kimi-k2": _mixture(
        61,
        7168,
        64,
        2048,
        163840,
        None,
        384,
        8,
        head_dim=128,
        dense_ffn=18432,
        shared_ffn=2048,
        dense_layers=1,
        query_rank=1536,
        kv_rank=512,
    ),
    "gpt-oss-20b": _mixture(24, 2880, 64, 2880, 201088, 8, 32, 4, head_dim=64),
    "gpt-oss-120b": _mixture(36, 2880, 64, 2880, 201088, 8, 128, 4, head_dim=64),
    "glm-4.5-air": _mixture(
        46, 4096, 96, 1408, 151552, 8, 128, 8, head_dim=128, dense_ffn=10944, shared_ffn=1408, dense_layers=1
    ),
    "llama-4-scout": _mixture(48, 5120, 40, 8192, 202048, 8, 16, 1, shared_ffn=8192),
    "llama-4-maverick": _mixture(
        48, 5120, 40, 8192, 202048, 8, 128, 1, dense_ffn=16384, shared_ffn=8192, dense_layers=24
    ),
    "grok-1": _mixture(64, 6144, 48, 32768, 131072, 8, 8, 2, sequence=8192),
    "dbrx": _mixture(40, 6144, 48, 10752, 100352, 8, 16, 4),
    "olmoe-1b-7b": _mixture(16, 2048, 16, 1024, 50304, None, 64, 8),
    "vit-b": _vision(12, 768, 12, patch=16),
    "vit-l": _vision(24, 1024, 16, patch=16),
    "vit-h": _vision(32, 1280, 16, patch=14),
    "bloom-176b": _gpt(70, 14336, 112, vocab=250880, sequence=2048, dropout=False),
    "bert-base": replace(_gpt(12, 768, 12, vocab=30522, sequence=512), is_causal=False),
    "bert-large": replace(_gpt(24, 1024, 16, vocab=30522, sequence=512), is_causal=False),
}
ALIASES = {
    "llama-2-7b": "llama-7b", "llama-2-13b": "llama-13b", "llama-2-70b": "llama-70b", "llama-3.1-8b": "llama-3-8b",
    "llama-3.1-70b": "llama-3-70b", "llama-3.1-405b": "llama-3-405b", "llama-3.2-1b": "llama-3-1b",
    "llama-3.2-3b": "llama-3-3b", "llama-2-34b": "codellama-34b", "llama-1-7b": "llama-7b",
    "nemotron-340b": "nemotron-4-340b", "nemotron-15b": "nemotron-4-15b", "megatron-turing-530b": "mt-nlg-530b",
    "mixtral": "mixtral-8x7b", "mixtral-8x7": "mixtral-8x7b", "qwen3-moe-30b": "qwen3-30b-a3b",
    "qwen3-moe-235b": "qwen3-235b-a22b", "deepseek-v3-671b": "deepseek-v3", "deepseek-671b": "deepseek-v3",
    "deepseek-r1": "deepseek-v3", "deepseek-v2-236b": "deepseek-v2", "deepseek-v2-lite-16b": "deepseek-v2-lite",
    "kimi-k2-1t": "kimi-k2", "intellect-3": "glm-4.5-air", "glm-4.5-air-106b": "glm-4.5-air", "olmoe": "olmoe-1b-7b",
    "grok-1-314b": "grok-1", "dbrx-132b": "dbrx", "vit-base": "vit-b", "vit-large": "vit-l", "vit-huge": "vit-h",
    "bloom-175b": "bloom-176b", "gpt3-177b": "gpt3-175b", "neox-20b": "gpt-neox-20b", "gpt2-small": "gpt2",
    "gpt2-1.5b": "gpt2-xl", "gpt-3": "gpt3-175b", "gpt3": "gpt3-175b", "bloom": "bloom-176b",
}  # fmt: skip

# name: parameters, multiply-adds of a forward pass, elements written by its convolutions, layers, parameters of the
# largest tensor, share of the multiply-adds in ungrouped 3x3 and 5x5 filters of stride 1, whether norms follow the
# convolutions. From Keras applications, torchvision and the papers, to two digits; activations from Dollar et
# al. 2021, arXiv:2103.06877
CONVOLUTIONAL = {
    "vgg16": (138.4e6, 15.5e9, 13.6e6, 16, 102.8e6, 0.99, False),
    "vgg11": (132.9e6, 7.6e9, 7.4e6, 11, 102.8e6, 0.99, False),
    "vgg19": (143.7e6, 19.6e9, 14.9e6, 19, 102.8e6, 0.99, False),
    "densenet-121": (8.0e6, 2.87e9, 6.9e6, 121, 1.0e6, 0.4, True),
    "densenet-169": (14.1e6, 3.4e9, 7.3e6, 169, 1.7e6, 0.4, True),
    "densenet-201": (20.0e6, 4.3e9, 7.9e6, 201, 1.9e6, 0.4, True),
    "mobilenet-v2": (3.5e6, 0.30e9, 6.7e6, 53, 1.3e6, 0.0, True),
    "googlenet": (6.6e6, 1.5e9, 3.2e6, 57, 1.0e6, 0.55, True),
    "inception-v4": (42.7e6, 12.3e9, 17.0e6, 149, 1.5e6, 0.4, True),
    "resnext-50-32x4d": (25.0e6, 4.3e9, 14.4e6, 53, 2.0e6, 0.0, True),
    "wide-resnet-50": (68.9e6, 11.4e9, 14.4e6, 53, 2.0e6, 0.7, True),
    "alexnet": (61.1e6, 0.72e9, 0.66e6, 8, 37.7e6, 0.82, False),
    "inceptionv3": (23.8e6, 5.7e9, 10.3e6, 48, 2.0e6, 0.35, True),
    "resnext-101-32x4d": (44.2e6, 8.0e9, 21.3e6, 33, 2.0e6, 0.0, True),
    "se-resnext-101-32x4d": (49.0e6, 8.0e9, 25.0e6, 33, 2.0e6, 0.0, True),
    "efficientnet-b0": (5.3e6, 0.39e9, 6.7e6, 18, 1.3e6, 0.0, True),
    "efficientnet-b4": (19.3e6, 4.4e9, 49.5e6, 32, 1.8e6, 0.0, True),
}

# models known only by size: parameters and those of the largest tensor, from their papers and repositories, from
# memory
SIZES = {
    "yolov3": (61.6e6, 4.7e6), "deepspeech2": (52.0e6, 5.0e6), "transformer-xl": (192e6, 20e6),
    "transformer-big": (210e6, 33.5e6), "gnmt": (160e6, 33e6), "mask-r-cnn": (44e6, 13e6), "quartznet": (18.9e6, 1.0e6),
    "wav2vec2": (95e6, 2.4e6), "fastpitch": (45e6, 1.5e6), "hifigan": (85e6, 5.0e6), "tacotron2": (28e6, 4.2e6),
    "tft": (2.0e6, 0.2e6), "moflow": (80e6, 5.0e6), "efficientdet": (3.9e6, 0.5e6), "ssd": (26e6, 2.4e6),
    "ncf": (31.8e6, 17.8e6), "unet": (31e6, 9.4e6), "waveglow": (88e6, 2.0e6), "dlrm": (540e6, 200e6),
    "neumf": (31.8e6, 17.8e6), "jasper": (333e6, 6e6), "t5-11b": (11e9, 67e6),
}  # fmt: skip
