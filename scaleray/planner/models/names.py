"""Models by name, or only by size.

`find_model` accepts names such as `llama-70b`, `Llama 3.1 8B`, `gpt2-xl` and `resnet-50`; a size alone (`gpt-13b`,
`7b`) becomes a transformer of usual proportions.
"""

import re
from dataclasses import replace

from scaleray.common.parsing import near_words
from scaleray.errors import UsageError
from scaleray.planner.models.block_counts import ModelProfile, of_size
from scaleray.planner.models.convolutions import convolutional, resnet
from scaleray.planner.models.shapes import ALIASES, CONVOLUTIONAL, SIZES, TRANSFORMERS
from scaleray.planner.models.transformers import TransformerShape, transformer

LEAST_PARAMS, MOST_PARAMS = 3e7, 1e13
"""Smallest and largest number of parameters that count as a transformer's size: the smallest of `usual_shape`, and
several times the largest trained so far."""


def find_model(name: str, *, sequence: int | None = None) -> ModelProfile:
    """Return the profile of a model by name. `sequence` replaces the usual length of its samples.

    Raises UsageError with the nearest names.
    """
    key = _key(name)
    if (known_name := _known_name(key)) is not None:
        shape = TRANSFORMERS[ALIASES.get(known_name, known_name)]
        return _taken_for(transformer(replace(shape, sequence=sequence or shape.sequence), name), known_name, key)
    match = re.search(r"resnet-?(\d{1,4})(?!\d)", key)
    if match and "resnext" not in key:
        return _taken_for(resnet(int(match[1])), match[0], key)
    for known, (params, macs, outputs, layers, largest, winograd_share, has_norms) in CONVOLUTIONAL.items():
        if known.replace("-", "") in key.replace("-", ""):
            made = convolutional(
                known,
                num_params=params,
                forward_macs=macs,
                outputs=outputs,
                num_layers=layers,
                largest_params=largest,
                winograd_share=winograd_share,
                has_norms=has_norms,
            )
            return _taken_for(made, known, key)
    # only a bare size or GPT's: another name with a size is probably a mistake
    match = re.fullmatch(r"(?:gpt-)?(\d+(?:\.\d+)?)([bm])", key)
    if match:
        return _of_size_alone(name, float(match[1]) * (1e9 if match[2] == "b" else 1e6), sequence=sequence or 2048)
    for known, (params, largest) in sorted(SIZES.items(), key=lambda item: -len(item[0])):
        if known.replace("-", "") in key.replace("-", ""):
            return _taken_for(of_size(name, params, num_layers=20, largest_params=largest), known, key)
    every = [*TRANSFORMERS, *ALIASES, *CONVOLUTIONAL, *SIZES, *(f"resnet-{depth}" for depth in (18, 34, 50, 101, 152))]
    near = near_words(key, every, most=3, likeness=0.5)
    raise UsageError(
        "model",
        name,
        "this model is unknown",
        f"nearest: {', '.join(near)}" if near else f"available: {', '.join(every)}, or a size as in gpt-13b",
    )


def find_shape(name: str) -> TransformerShape | None:
    """Return the shape of a transformer by name; None for an unlisted name."""
    known = _known_name(_key(name))
    return None if known is None else TRANSFORMERS[ALIASES.get(known, known)]


def _known_name(key: str) -> str | None:
    if key in TRANSFORMERS or key in ALIASES:
        return key
    words = key.split("-")
    for known in sorted([*TRANSFORMERS, *ALIASES], key=lambda one: (-one.count("-"), -len(one))):
        parts = known.split("-")
        at = next((i for i in range(len(words) - len(parts) + 1) if words[i : i + len(parts)] == parts), None)
        # the rest may be a version or a task (Instruct-2507), but not another size: GPT-2 8B is not GPT-2
        if at is not None and not any(
            _SIZE.fullmatch(word) or word in _SIZE_WORDS for word in words[:at] + words[at + len(parts) :]
        ):
            return known
    return None


def _taken_for(model: ModelProfile, known: str, key: str) -> ModelProfile:
    """Add a note to the model if the given name has more words than the matched one, such as a version, a task or
    another size."""
    if known.replace("-", "") == key.replace("-", ""):
        return model
    return replace(
        model,
        notes=(
            *model.notes,
            f"by its name, the model is assumed to be {known}; "
            "if it is another, give its size as in gpt-13b, or a config with -c",
        ),
    )


def _of_size_alone(name: str, num_params: float, *, sequence: int) -> ModelProfile:
    """Return a transformer of usual proportions, with a note about it. Raises UsageError for an impossible size."""
    if not LEAST_PARAMS <= num_params <= MOST_PARAMS:
        raise UsageError(
            "model",
            name,
            f"a size must be from {LEAST_PARAMS / 1e6:.0f}m to {MOST_PARAMS / 1e9:,.0f}b parameters",
            "the largest models so far have about 1,000b; below the minimum, the vocabulary dominates: use -c",
        )
    shape = usual_shape(num_params, sequence=sequence)
    made = transformer(shape, name)
    alike = [
        f"{known} has {transformer(one, known).num_params / 1e9:.3g}b"
        for known, one in TRANSFORMERS.items()
        if _is_near(known, name)
    ]
    also = f" ({', '.join(alike)})" if alike else ""
    note = (
        f"only the size of the model is known: {shape.layers} layers of width {shape.hidden} with {shape.heads} heads "
        f"and a vocabulary of {shape.vocab} ({made.num_params / 1e9:.3g}b), in GPT-3's proportions; "
        f"give a name from the catalogue{also}, or -c CONFIG, to plan the actual model"
    )
    return replace(made, notes=(*made.notes, note), is_guessed=True)


def _is_near(known: str, name: str) -> bool:
    """Whether a catalogue name ends in the same size, as gpt3-13b does for gpt-13b."""
    return known.rpartition("-")[2] == _key(name).rpartition("-")[2]


def usual_mixture(num_params: float, active_params: float, *, sequence: int, vocab: int = 128256) -> TransformerShape:
    """Return a mixture of experts of which only the sizes are known, with the first of the usual numbers of experts,
    from 8 with 2 active to 512 with 8 active, that leaves a usual share to the dense part."""
    for experts, active in ((8, 2), (16, 2), (64, 8), (128, 8), (256, 8), (512, 8)):
        routed = (num_params - active_params) / (1 - active / experts)
        dense = active_params - routed * active / experts
        # attention, embeddings and other parts used by every token: a third of the active parameters, as in known
        # models
        if dense > 0.2 * active_params:
            break
    else:
        raise UsageError.problem(
            "No common mixture of experts",
            f"has {num_params:.3g} parameters, {active_params:.3g} of them active",
            "give its shape",
        )
    base = usual_shape(active_params, sequence=sequence, vocab=vocab)
    width = max(1, round(routed / (3 * base.layers * base.hidden * experts)))
    left = dense - base.layers * 4 * base.hidden**2 - vocab * base.hidden
    shared = max(0, round(left / (3 * base.layers * base.hidden)))
    return replace(base, is_gated=True, experts=experts, active_experts=active, expert_ffn=width, shared_ffn=shared)


def usual_shape(num_params: float, *, sequence: int, vocab: int = 51200, ffn_ratio: int = 4) -> TransformerShape:
    """Return a GPT of about `num_params` parameters, with heads of 128 and GPT-3's ratio of width to depth, about 110
    to 130 per layer."""
    best: tuple[float, TransformerShape] | None = None
    for heads in range(4, 160):
        hidden = heads * 128
        per_layer = (4 + 2 * ffn_ratio) * hidden**2
        layers = max(2, round((num_params - vocab * hidden) / per_layer))
        total = layers * per_layer + vocab * hidden
        unusual = abs(hidden / layers / 120 - 1) * 0.1
        misfit = abs(total / num_params - 1) + unusual
        if best is None or misfit < best[0]:
            best = (
                misfit,
                TransformerShape(
                    layers=layers,
                    hidden=hidden,
                    heads=heads,
                    vocab=vocab,
                    sequence=sequence,
                    ffn=ffn_ratio * hidden,
                    tied_embeddings=True,
                ),
            )
    assert best is not None
    return best[1]


_SIZE = re.compile(r"\d+(\.\d+)?[bmt]|a\d+b|\d+x\d+b")
_SIZE_WORDS = frozenset({"small", "base", "medium", "large", "xl", "lite", "mini", "tiny", "air"})


def _key(name: str) -> str:
    key = re.sub(r"[\s_/]+", "-", name.strip().lower())
    key = re.sub(r"^gpt-2", "gpt2", key)
    key = re.sub(r"llama-?v?(\d)", r"llama-\1", key)
    return re.sub(r"\((.*?)\)", r"\1", key)
